"""Database engine: read and write transactions on SQLite or PostgreSQL."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from tarn.db import notifications, outbox
from tarn.db.connection_semaphore import ConnectionSemaphore
from tarn.db.notifications import Notifications, PostgresChannel, SqliteChannel
from tarn.errors import StartRefused, StorageFull, TarnError, Unavailable

CHECKPOINT_PAGES = 16_000
"""Pages (64 MB) in SQLite's WAL before a checkpoint: with the default, bulk writes would checkpoint every few thousand
rows."""

BUSY_SECONDS = 20
"""Seconds that a SQLite writer waits for another one before it fails."""

LOCK_POLL_SECONDS = 0.01
"""Seconds between two attempts to get a lock for which SQLite does not wait."""


SQLITE_EXTRA = 16
"""Additional connections for SQLite: they are cheap, and each waiting writer occupies one."""

TCP_KEEPALIVE = {"keepalives_idle": 5, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 20_000}
"""TCP settings that detect a dead server within 20 s, also while a query waits for its result."""


TASK = "tarn-task"
"""Application name of the connections of Spark tasks."""


class Database:
    """Transactions on one database. A connection failure raises `Unavailable`, never a driver's own error.

    The constructor raises StartRefused for a SQLite file that can never be opened.
    """

    def __init__(self, url: str, pool: int = 10, name: str = "tarn") -> None:
        self.url = url
        self.name = name
        """PostgreSQL's application_name, so that operators can distinguish the connections."""
        self.is_sqlite = make_url(url).get_backend_name() == "sqlite"
        connections = 2 * pool + (SQLITE_EXTRA if self.is_sqlite else 0)
        self._semaphore = ConnectionSemaphore(connections, BUSY_SECONDS)
        self.engine = _sqlite_engine(url, pool) if self.is_sqlite else _postgresql_engine(url, pool, name)
        self.notifications = Notifications(
            SqliteChannel(Path(str(make_url(url).database))) if self.is_sqlite else PostgresChannel(adbc_uri(url, name))
        )

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a read-only transaction on one consistent view (repeatable read)."""
        options = {} if self.is_sqlite else {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        with _translated_errors(), self._semaphore.slot(), self.engine.connect() as connection:
            yield connection.execution_options(**options)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction that commits on return and rolls back on any error. Its outbox events are written last,
        and their readers are notified.

        SQLite takes its write lock at the start: a transaction that reads first and locks later would fail
        instead of waiting when another one has written in between.
        """
        recorded: list[outbox.RecordedEvent] = []
        topics: set[str] = set()
        with _translated_errors(), self._semaphore.slot(), self.engine.connect() as connection:
            connection = connection.execution_options(
                sqlite_begin="BEGIN IMMEDIATE", **{outbox.RECORDED: recorded, notifications.TOPICS: topics}
            )
            with connection.begin():
                yield connection
                outbox.number(connection, recorded)
                topics |= outbox.topics(recorded)
                if topics:
                    self.notifications.send_with_commit(connection, topics)
        if topics:
            self.notifications.send_after_commit(topics)

    @contextmanager
    def rebuild(self) -> Iterator[Connection]:
        """Open a write transaction that may recreate tables, as SQLite needs to alter one.

        Foreign keys that refer to a recreated table are broken meanwhile, so they are checked once, before the commit.
        """
        with _translated_errors(), self.engine.connect() as connection:
            connection = connection.execution_options(sqlite_begin="BEGIN IMMEDIATE", sqlite_references="OFF")
            try:
                with connection.begin():
                    yield connection
                    if self.is_sqlite and (broken := connection.exec_driver_sql("PRAGMA foreign_key_check").first()):
                        raise RuntimeError(
                            f"a row of table {broken[0]} refers to a row of {broken[2]} that does not exist"
                        )
            finally:
                # This connection no longer enforces foreign keys: it must not return to the pool.
                connection.invalidate()

    def serialize(self, connection: Connection, name: str) -> None:
        """Take an advisory lock until the commit. SQLite has only one writer at a time anyway."""
        if not self.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtext(:name))"), {"name": f"tarn:{name}"})

    def close(self) -> None:
        self.notifications.close()
        self.engine.dispose()


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except TarnError:
        raise
    except (DBAPIError, PoolTimeout) as error:
        if _is_full(error):
            raise StorageFull("the database has no space left") from error
        if isinstance(error, OperationalError | PoolTimeout) or getattr(error, "connection_invalidated", False):
            raise Unavailable("the database does not answer", retry_after=2) from error
        raise


def _is_full(error: SQLAlchemyError) -> bool:
    cause = getattr(error, "orig", None)
    return getattr(cause, "sqlstate", None) == "53100" or getattr(cause, "sqlite_errorname", "") == "SQLITE_FULL"


def _sqlite_engine(url: str, pool: int) -> Engine:
    path = make_url(url).database
    assert path is not None
    _check_file(Path(path))
    engine = create_engine(
        url,
        pool_size=pool,
        max_overflow=pool + SQLITE_EXTRA,
        hide_parameters=True,
        connect_args={"timeout": BUSY_SECONDS},
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: Any) -> None:
        # The driver would begin transactions late and without a write lock: `_begin` does it instead.
        connection.isolation_level = None
        _use_write_ahead_log(connection)
        for pragma in (
            "synchronous=FULL",
            "foreign_keys=ON",
            f"wal_autocheckpoint={CHECKPOINT_PAGES}",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if "sqlite_references" in options:
            # The pragma has no effect within a transaction.
            connection.exec_driver_sql(f"PRAGMA foreign_keys={options['sqlite_references']}")
        connection.exec_driver_sql(options.get("sqlite_begin", "BEGIN"))

    return engine


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Set the journal mode. Raises OperationalError if the database stays locked.

    SQLite does not wait for the lock that the first change of a new database needs, so two processes that create it at
    the same time would fail.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(LOCK_POLL_SECONDS)
        else:
            return


def _check_file(path: Path) -> None:
    """Create the file's folder; raise StartRefused unless the file is absent or can be opened as a database."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise StartRefused(f"TARN_DATABASE_URL: {path} is a folder, expected a file")
        with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection:
            connection.execute("PRAGMA schema_version")
    except OSError as error:
        raise StartRefused(f"TARN_DATABASE_URL: {path} cannot be used: {error.strerror}") from error
    except ValueError as error:
        raise StartRefused(f"TARN_DATABASE_URL: {str(path)!r} is not a valid path: {error}") from error
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorname", "") in ("SQLITE_CANTOPEN", "SQLITE_NOTADB"):
            raise StartRefused(f"TARN_DATABASE_URL: {path} cannot be opened: {error}") from error


def adbc_uri(url: str, name: str) -> str:
    """Return a PostgreSQL URL in the form of ADBC's driver, with this application_name."""
    options = {"application_name": name} | {key: str(value) for key, value in TCP_KEEPALIVE.items()}
    return make_url(url).set(drivername="postgresql").update_query_dict(options).render_as_string(hide_password=False)


def _postgresql_engine(url: str, pool: int, name: str) -> Engine:
    return create_engine(
        url,
        pool_size=pool,
        max_overflow=pool,
        pool_pre_ping=True,
        pool_timeout=BUSY_SECONDS,
        hide_parameters=True,
        connect_args={"connect_timeout": 5, "application_name": name, **TCP_KEEPALIVE},
    )
