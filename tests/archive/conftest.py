"""What archive tests stand on: a dataset with an archive, and whoever puts files into it."""

import pytest

from app.db.engine import Database
from app.settings import Settings
from app.storage.store import Store
from app.tenancy.bootstrap import ensure_admin
from tests.archive.desk import Desk


@pytest.fixture
def desk(settings: Settings, database: Database, store: Store) -> Desk:
    ensure_admin(database, settings)
    return Desk.make(settings, database, store)
