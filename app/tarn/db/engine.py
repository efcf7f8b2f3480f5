"""The database: SQLite or PostgreSQL behind two kinds of transaction, one to read and one to write."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from tarn.db import outbox as events
from tarn.db.connection_shares import TenantSemaphore
from tarn.errors import StartRefused, StorageFull, TarnError, Unavailable

CHECKPOINT_PAGES = 16_000
"""Pages (64 MB) of SQLite's log that may gather before they are copied into the database: bulk writes would do that for
every few thousand rows otherwise."""

BUSY_SECONDS = 20
"""How long a SQLite writer waits for another before it gives up."""


SQLITE_EXTRA = 16
"""Connections to SQLite beyond those to a server: they cost next to nothing, and each writer that waits for another has
one."""

TCP_KEEPALIVE = {"keepalives_idle": 5, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 20_000}
"""A server that is gone without a word is found out within 20 s, also by who waits for its answer."""


TASK = "tarn-task"
"""The name of connections that tasks of Spark have, wherever they run."""


class Database:
    """Transactions on one database. A failure to reach it is `Unavailable`, never a driver's own error.

    Raises StartRefused for a SQLite file that can never be opened.
    """

    def __init__(self, url: str, pool: int = 10, name: str = "tarn") -> None:
        self.url = url
        self.name = name
        """What PostgreSQL calls its connections, so that operators see who has which."""
        self.is_sqlite = make_url(url).get_backend_name() == "sqlite"
        most = 2 * pool + (SQLITE_EXTRA if self.is_sqlite else 0)
        self._shares = TenantSemaphore(most, BUSY_SECONDS)
        self.engine = _sqlite_engine(url, pool) if self.is_sqlite else _postgresql_engine(url, pool, name)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A read-only view of one moment: everything read in it fits together."""
        options = {} if self.is_sqlite else {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        with _answering(), self._shares.one(), self.engine.connect() as connection:
            yield connection.execution_options(**options)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that commits on return and rolls back on any error. Events recorded in it are written last.

        SQLite takes its write lock at the start: a transaction that reads first and locks later would fail
        instead of waiting when another one has written in between.
        """
        recorded: list[events.RecordedEvent] = []
        with _answering(), self._shares.one(), self.engine.connect() as connection:
            connection = connection.execution_options(sqlite_begin="BEGIN IMMEDIATE", **{events.RECORDED: recorded})
            with connection.begin():
                yield connection
                events.number(connection, recorded)

    @contextmanager
    def rebuild(self) -> Iterator[Connection]:
        """A transaction that writes, and may make tables anew, as SQLite does to change one: what refers to such a
        table is without it for a moment, so references are looked at once, before it commits."""
        with _answering(), self.engine.connect() as connection:
            connection = connection.execution_options(sqlite_begin="BEGIN IMMEDIATE", sqlite_references="OFF")
            try:
                with connection.begin():
                    yield connection
                    if self.is_sqlite and (broken := connection.exec_driver_sql("PRAGMA foreign_key_check").first()):
                        raise RuntimeError(f"a row of {broken[0]} refers to none of {broken[2]}")
            finally:
                # The connection goes on without references: nobody is to get it again.
                connection.invalidate()

    def serialize(self, connection: Connection, what: str) -> None:
        """Let one process at a time go on from here to its commit. SQLite's writers are so anyway."""
        if not self.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtext(:what))"), {"what": f"tarn:{what}"})

    def close(self) -> None:
        self.engine.dispose()


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except TarnError:
        raise
    except (DBAPIError, PoolTimeout) as error:
        if _is_full(error):
            raise StorageFull("the database has no room left") from error
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
        # The driver's own transactions begin too late and too weakly; ours begin where `_begin` says.
        connection.isolation_level = None
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            f"wal_autocheckpoint={CHECKPOINT_PAGES}",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if "sqlite_references" in options:
            # Within a transaction it would have no effect.
            connection.exec_driver_sql(f"PRAGMA foreign_keys={options['sqlite_references']}")
        connection.exec_driver_sql(options.get("sqlite_begin", "BEGIN"))

    return engine


def _check_file(path: Path) -> None:
    """Make the file's folder, and see that the file can be opened and is a database or nothing yet."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise StartRefused(f"TARN_DATABASE_URL: {path} is a folder, and a database is a file")
        with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection:
            connection.execute("PRAGMA schema_version")
    except OSError as error:
        raise StartRefused(f"TARN_DATABASE_URL: {path} cannot be used: {error.strerror}") from error
    except ValueError as error:
        raise StartRefused(f"TARN_DATABASE_URL: {str(path)!r} is no path: {error}") from error
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorname", "") in ("SQLITE_CANTOPEN", "SQLITE_NOTADB"):
            raise StartRefused(f"TARN_DATABASE_URL: {path} cannot be opened: {error}") from error


def adbc_uri(url: str, name: str) -> str:
    """Where a PostgreSQL is, as ADBC's driver wants it said, for connections of this name."""
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
