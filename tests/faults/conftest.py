"""Fixtures of the fault tests. `FAULT_SEEDS=20` runs each test on twenty random histories."""

import os

import pytest
from tarn.access.bootstrap import ensure_admin
from tarn.db.engine import Database
from tarn.settings import Settings
from tarn.storage.store import Store

from tests.faults.scene import Scene
from tests.pipeline.kernels import DirectKernels

# Without the prefix of Tarn's settings: no process starts with an unknown setting.
SEEDS = int(os.environ.get("FAULT_SEEDS", "1"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(SEEDS))


@pytest.fixture
def scene(
    settings: Settings,
    database: Database,
    store: Store,
    kernels: DirectKernels,
    seed: int,
) -> Scene:
    ensure_admin(database, settings)
    return Scene.make(settings, database, store, kernels, seed)
