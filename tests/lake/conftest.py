"""What lake tests stand on beside the house: a dataset with workers and clients in this process."""

import pytest

from app.db.engine import Database
from app.settings import Settings
from app.storage.store import Store
from app.tenancy.bootstrap import ensure_admin
from tests.faults.scene import Scene
from tests.pipeline.kernels import DirectKernels


@pytest.fixture
def scene(settings: Settings, database: Database, store: Store, kernels: DirectKernels) -> Scene:
    ensure_admin(database, settings)
    return Scene.make(settings, database, store, kernels, 1)
