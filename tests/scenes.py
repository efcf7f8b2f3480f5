"""Fixtures of lake tests: a dataset with workers and clients in this process, and restore targets."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from shutil import copyfile

import pytest
from tarn.access.bootstrap import ensure_admin
from tarn.db.engine import Database
from tarn.settings import Settings, load_settings
from tarn.storage.store import Store

from tests.conftest import copied_postgresql
from tests.faults.scene import Scene
from tests.pipeline.kernels import DirectKernels
from tests.recovery.backups import Elsewhere


@pytest.fixture
def scene(settings: Settings, database: Database, store: Store, kernels: DirectKernels) -> Scene:
    ensure_admin(database, settings)
    return Scene.make(settings, database, store, kernels, 1)


@pytest.fixture
def elsewhere(
    request: pytest.FixtureRequest, database_url: str, tmp_path: Path, kernel_process: ProcessPoolExecutor
) -> Iterator[Elsewhere]:
    """Return an empty database of the same kind, and a folder without a lake."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    with ExitStack() as stack:
        if database_url.startswith("sqlite"):
            copyfile(request.getfixturevalue("sqlite"), folder / "tarn.db")
            url = f"sqlite:///{folder}/tarn.db"
        else:
            url = stack.enter_context(copied_postgresql(request.getfixturevalue("postgresql")))
        settings = load_settings(database_url=url, lake_uri=str(folder / "lake"))
        database = Database(settings.database_url)
        stack.callback(database.close)
        yield Elsewhere(settings, database, kernel_process)


@pytest.fixture
def elsewhere_postgresql(postgresql: str, tmp_path: Path, kernel_process: ProcessPoolExecutor) -> Iterator[Elsewhere]:
    """Return an empty PostgreSQL database, whatever the test's own database is."""
    with copied_postgresql(postgresql) as url:
        settings = load_settings(database_url=url, lake_uri=str(tmp_path / "elsewhere"))
        database = Database(settings.database_url)
        yield Elsewhere(settings, database, kernel_process)
        database.close()
