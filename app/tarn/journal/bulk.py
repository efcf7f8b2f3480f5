"""Bulk inserts into the journal: Arrow record batches through ADBC, one transaction per chunk.

ADBC's SQLite driver contains its own copy of SQLite, and two copies in one process release each other's file locks
(POSIX locks belong to the process, and closing any descriptor drops all of them). So on SQLite the driver runs in a
child process (`tarn.journal.sqlite_loader_process`), where nothing else opens the database; on PostgreSQL it runs in
this process.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import structlog
from adbc_driver_manager import Error as DriverError
from sqlalchemy.engine import make_url

from tarn.child_process import ChildProcess
from tarn.db.engine import Database, adbc_uri
from tarn.errors import StageClosed, StorageFull, TarnError, Unavailable

if TYPE_CHECKING:
    # Importing it imports every table library that is installed, which few processes need.
    from adbc_driver_manager import dbapi

log = structlog.get_logger(__name__)

END_SECONDS = 30.0
"""How long the child process may take to finish a transaction and exit."""

CONNECTIONS = 16
"""Maximum bulk connections to PostgreSQL per process: the number of large bodies that it reads concurrently."""

OFTEN_CONSTANT = ("batch", "kind", "canonical_id", "lang", "external", "origin", "first_seen", "last_seen")
"""Columns that often have the same value in all rows of a chunk."""


class Bulk(Protocol):
    """Writer of chunks of open batches."""

    def write(self, batch: int, expires: float, rows: pa.RecordBatch) -> None:
        """Write rows in one transaction, which also renews the batch's expiry (seconds since 1970).

        Raises StageClosed, having written nothing, if the batch is no longer open; StorageFull; Unavailable.
        """

    def close(self) -> None: ...


def bulk_for(database: Database) -> Bulk:
    """Return the bulk writer for a database."""
    if database.is_sqlite:
        return SqliteBulk(str(make_url(database.url).database))
    return PostgresqlBulk(adbc_uri(database.url, f"{database.name}-bulk"))


Ingest = Callable[["dbapi.Cursor", pa.RecordBatch], None]


def copy_rows(cursor: "dbapi.Cursor", rows: pa.RecordBatch) -> None:
    """Write rows by the driver's own ingestion: PostgreSQL's COPY."""
    cursor.adbc_ingest("journal", rows, mode="append")


def insert_rows(cursor: "dbapi.Cursor", rows: pa.RecordBatch) -> None:
    """Write rows by an INSERT that has constant columns as literals, which takes a fifth less time on SQLite."""
    if not rows.num_rows:
        return
    constants = {name: rows.column(name)[0].as_py() for name in OFTEN_CONSTANT if _is_constant(rows.column(name))}
    names = rows.schema.names
    values = ", ".join(_literal(constants[name]) if name in constants else "?" for name in names)
    columns = ", ".join(f'"{name}"' for name in names)
    statement = f"INSERT INTO journal ({columns}) VALUES ({values})"  # noqa: S608 - literals are checked and quoted
    cursor.executemany(statement, rows.select([name for name in names if name not in constants]))


def _is_constant(column: pa.Array) -> bool:
    """Return whether all rows have the same value, and one that is safe as a SQL literal."""
    if column.null_count:
        return bool(column.null_count == len(column))
    first = column[0]
    is_plain = not isinstance(value := first.as_py(), str) or (value.isascii() and value.isprintable())
    return is_plain and bool(pc.all(pc.equal(column, first)).as_py())


def _literal(value: int | str | None) -> str:
    if value is None:
        return "NULL"
    return "'{}'".format(value.replace("'", "''")) if isinstance(value, str) else str(int(value))


class Appender:
    """ADBC connection that appends chunks to open batches."""

    def __init__(self, connection: "dbapi.Connection", renew: str, ingest: Ingest) -> None:
        self._connection = connection
        self._renew = renew
        self._ingest = ingest

    def append(self, batch: int, expires: float, rows: pa.RecordBatch) -> bool:
        """Write the rows and renew the batch's expiry. Return False, having written nothing, if it is not open."""
        with self._connection.cursor() as cursor:
            try:
                cursor.execute(self._renew, (expires, batch))
                if cursor.fetchone() is None:
                    self._connection.adbc_connection.rollback()
                    return False
                self._ingest(cursor, rows)
                self._connection.adbc_connection.commit()
            except BaseException:
                self._connection.adbc_connection.rollback()
                raise
        return True

    def close(self) -> None:
        self._connection.close()


class PostgresqlBulk:
    """Bulk writer by COPY through ADBC in this process, with a pool of at most `CONNECTIONS` connections."""

    RENEW = "UPDATE journal_batches SET expires = to_timestamp($1) WHERE id = $2 AND state = 'open' RETURNING id"

    def __init__(self, url: str) -> None:
        self._url = url
        self._idle: list[Appender] = []
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(CONNECTIONS)

    def write(self, batch: int, expires: float, rows: pa.RecordBatch) -> None:
        with self._slots:
            self._write(batch, expires, rows)

    def _write(self, batch: int, expires: float, rows: pa.RecordBatch) -> None:
        appender = None
        try:
            appender = self._take()
            written = appender.append(batch, expires, rows)
        except DriverError as error:
            # What broke one connection has usually broken the idle ones too.
            self._end([] if appender is None else [appender])
            raise to_error(str(error)) from error
        with self._lock:
            self._idle.append(appender)
        if not written:
            raise batch_closed()

    def close(self) -> None:
        self._end([])

    def _end(self, more: list[Appender]) -> None:
        """Close these connections and all idle ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for appender in idle + more:
            with suppress(DriverError):  # it is closed already
                appender.close()

    def _take(self) -> Appender:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        from adbc_driver_postgresql import dbapi as postgresql

        return Appender(postgresql.connect(self._url), self.RENEW, copy_rows)


class SqliteBulk:
    """Bulk writer that runs ADBC's SQLite in a child process, started on first use and restarted if it died."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None

    def write(self, batch: int, expires: float, rows: pa.RecordBatch) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_batch(rows)
        with self._lock:
            try:
                response = self._request({"batch": batch, "expires": expires}, sink.getvalue())
            except (OSError, EOFError) as error:
                self._end()
                raise Unavailable("the process that writes to the journal died", retry_after=1) from error
        if "error" in response:
            raise to_error(response["error"])
        if not response["written"]:
            raise batch_closed()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _request(self, header: dict[str, object], rows: pa.Buffer) -> dict[str, object]:
        if self._child is not None and self._child.exit_reason is not None:
            self._end()
        if self._child is None:
            self._child = ChildProcess("tarn.journal.sqlite_loader_process", self._path)
        self._child.connection.send(header, rows)
        response: dict[str, object] = self._child.connection.receive()[0]
        return response

    def _end(self) -> None:
        """End the child, after the transaction that it is in."""
        child, self._child = self._child, None
        if child is not None:
            child.end(END_SECONDS)
            if child.exit_reason != "exit code 0":
                log.warning("journal loader process died", pid=child.pid, reason=child.exit_reason)


def batch_closed() -> StageClosed:
    """Return the error for a batch that is no longer open."""
    return StageClosed("the batch is no longer open: it expired, or was aborted")


def to_error(text: object) -> TarnError:
    """Return the error for a driver's error message."""
    message = str(text).lower()
    if "full" in message and ("disk" in message or "database" in message):
        return StorageFull("the database has no space left")
    return Unavailable("the database did not accept the rows", retry_after=2)
