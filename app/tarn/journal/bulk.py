"""The bulk path: Arrow into the journal through ADBC, a chunk a transaction.

ADBC's SQLite driver carries a SQLite of its own, and two SQLites in one process undo each other's file locks (POSIX
locks belong to the process, and closing one descriptor drops them all). So on SQLite the driver lives in a child
process (`tarn.journal.sqlite_loader_process`), with nothing else that opens the database; on PostgreSQL it lives here.
"""

import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Protocol

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import structlog
from adbc_driver_manager import dbapi
from sqlalchemy.engine import make_url

from tarn.db.engine import Database, adbc_uri
from tarn.errors import StageClosed, StorageFull, TarnError, Unavailable

log = structlog.get_logger(__name__)

LENGTH = struct.Struct(">Q")

CONNECTIONS = 16
"""Connections to PostgreSQL that the bulk path of a process has at most: as many as it reads large bodies at once."""

ALIKE = ("batch", "kind", "canonical_id", "lang", "external", "origin", "first_seen", "last_seen")
"""Columns that are the same in all rows of many a chunk."""


class Bulk(Protocol):
    """Writes one chunk of a batch at a time."""

    def write(self, batch: int, expires: float, rows: pa.RecordBatch) -> None:
        """Write rows in one transaction, which also renews the batch's expiry (seconds since 1970).

        Raises StageClosed, having written nothing, if the batch is no longer open; StorageFull; Unavailable.
        """

    def close(self) -> None: ...


def bulk_for(database: Database) -> Bulk:
    """The bulk path of a database, for one process."""
    if database.is_sqlite:
        return SqliteBulk(str(make_url(database.url).database))
    return PostgresqlBulk(adbc_uri(database.url, f"{database.name}-bulk"))


Ingest = Callable[[dbapi.Cursor, pa.RecordBatch], None]


def copied(cursor: dbapi.Cursor, rows: pa.RecordBatch) -> None:
    """Write rows as the driver does it by itself: PostgreSQL's COPY."""
    cursor.adbc_ingest("journal", rows, mode="append")


def inserted(cursor: dbapi.Cursor, rows: pa.RecordBatch) -> None:
    """Write rows by a statement that says what they have in common: SQLite takes a fifth less time for it."""
    if not rows.num_rows:
        return
    same = {name: rows.column(name)[0].as_py() for name in ALIKE if _is_alike(rows.column(name))}
    names = rows.schema.names
    said = ", ".join(_literal(same[name]) if name in same else "?" for name in names)
    columns = ", ".join(f'"{name}"' for name in names)
    statement = f"INSERT INTO journal ({columns}) VALUES ({said})"  # noqa: S608 - of our own words and names
    cursor.executemany(statement, rows.select([name for name in names if name not in same]))


def _is_alike(column: pa.Array) -> bool:
    """Whether all rows say the same, and something that can be part of a statement."""
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
    """An ADBC connection that appends chunks to batches that are still open."""

    def __init__(self, connection: dbapi.Connection, renew: str, ingest: Ingest) -> None:
        self._connection = connection
        self._renew = renew
        self._ingest = ingest

    def append(self, batch: int, expires: float, rows: pa.RecordBatch) -> bool:
        """Write the rows and renew the batch. False if it is not open: then nothing was written."""
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
    """COPY through ADBC in this process: a connection a chunk, taken from those that are idle, and so many at most."""

    RENEW = "UPDATE journal_batches SET expires = to_timestamp($1) WHERE id = $2 AND state = 'open' RETURNING id"

    def __init__(self, url: str) -> None:
        self._url = url
        self._idle: list[Appender] = []
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(CONNECTIONS)

    def write(self, batch: int, expires: float, rows: pa.RecordBatch) -> None:
        with self._places:
            self._write(batch, expires, rows)

    def _write(self, batch: int, expires: float, rows: pa.RecordBatch) -> None:
        appender = None
        try:
            appender = self._take()
            written = appender.append(batch, expires, rows)
        except dbapi.Error as error:
            # What ended one connection has ended the idle ones, too, more often than not.
            self._end([] if appender is None else [appender])
            raise failure(str(error)) from error
        with self._lock:
            self._idle.append(appender)
        if not written:
            raise closed()

    def close(self) -> None:
        self._end([])

    def _end(self, more: list[Appender]) -> None:
        """Close these connections, and all that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for appender in idle + more:
            with suppress(dbapi.Error):  # it is gone already
                appender.close()

    def _take(self) -> Appender:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        from adbc_driver_postgresql import dbapi as postgresql

        return Appender(postgresql.connect(self._url), self.RENEW, copied)


class SqliteBulk:
    """A child process with ADBC's SQLite in it, started when it is first needed and again if it died."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def write(self, batch: int, expires: float, rows: pa.RecordBatch) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_batch(rows)
        header = orjson.dumps({"batch": batch, "expires": expires})
        with self._lock:
            try:
                answer = self._ask(header, sink.getvalue())
            except (OSError, EOFError) as error:
                self._discard()
                raise Unavailable("the journal's loader died", retry_after=1) from error
        if "error" in answer:
            raise failure(answer["error"])
        if not answer["written"]:
            raise closed()

    def close(self) -> None:
        with self._lock:
            self._discard()

    def _ask(self, header: bytes, rows: pa.Buffer) -> dict[str, object]:
        if self._child is None or self._child.poll() is not None:
            command = [sys.executable, "-m", "tarn.journal.sqlite_loader_process", self._path]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 - ours
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        send(self._child.stdin, header)
        send(self._child.stdin, rows)
        self._child.stdin.flush()
        answer: dict[str, object] = orjson.loads(receive(self._child.stdout))
        return answer

    def _discard(self) -> None:
        """End the child: it stops when its input does."""
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        assert child.stdout is not None
        for pipe in (child.stdin, child.stdout):
            try:
                pipe.close()
            except OSError:
                log.warning("the journal's loader was gone already")
        child.wait(30)


def send(pipe: IO[bytes], data: "bytes | pa.Buffer") -> None:
    """Write one message."""
    pipe.write(LENGTH.pack(len(data)))
    pipe.write(memoryview(data))


def receive(pipe: IO[bytes]) -> bytes:
    """Read one message. Raises EOFError if the other side is gone."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    (length,) = LENGTH.unpack(head)
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return data


def closed() -> StageClosed:
    return StageClosed("the batch is no longer open: it expired, or was aborted")


def failure(text: object) -> TarnError:
    """What a driver's words mean."""
    said = str(text).lower()
    if "full" in said and ("disk" in said or "database" in said):
        return StorageFull("the database has no room left")
    return Unavailable("the database did not take the rows", retry_after=2)
