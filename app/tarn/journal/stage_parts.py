"""Writer of stage parts through ADBC only, for processes that must not open SQLite in any other way.

A part is a batch of a stage. It is opened, filled chunk by chunk with packs (or with rows, if processes of an older
version that cannot read packs run on the same database), and closed with its counts. The owner of the stage commits all
closed parts atomically. Parts that were not closed, or are not needed, are deleted with the stage.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa
from adbc_driver_manager import Error as DriverError

from tarn.errors import Unavailable
from tarn.journal.bulk import Appender, PostgresqlBulk, copy_rows, insert_rows, to_error
from tarn.journal.packs import encode
from tarn.journal.parsing.event_buffer import Packed
from tarn.journal.sqlite_loader_process import RENEW, configure
from tarn.model.ids import new_id

if TYPE_CHECKING:
    # Importing it imports every table library that is installed, which few processes need.
    from adbc_driver_manager import dbapi

# A part copies the columns of its stage, except the tenant.
OPEN = (
    "INSERT INTO journal_batches (uid, dataset_id, tenant, origin, state, is_stage, stage, entities, rows, size, "
    "reserved, metadata, created, expires) "
    "SELECT {0}, dataset_id, {1}, origin, 'open', false, id, 0, 0, 0, 0, metadata, created, expires "
    "FROM journal_batches WHERE id = {2} AND is_stage AND state = 'open' RETURNING id"
)
CLOSE = (
    "UPDATE journal_batches SET state = 'staged', entities = {0}, rows = {1}, size = {2} "
    "WHERE id = {3} AND state = 'open' RETURNING id"
)


class StagePartWriter:
    """ADBC connection that writes parts, one after the other."""

    def __init__(self, connection: "dbapi.Connection", write_lock: "WriteLock | None") -> None:
        self._connection = connection
        self._write_lock = write_lock
        self._placeholders = ("$1", "$2", "$3", "$4") if write_lock is None else ("?",) * 4
        renew = PostgresqlBulk.RENEW if write_lock is None else RENEW
        self._rows = Appender(connection, renew, copy_rows if write_lock is None else insert_rows)
        self._packs = Appender(connection, renew, _ingest_packs)

    def open(self, stage: int, tenant: str) -> int:
        """Open a part and return its id. Raises Unavailable, also if the stage is no longer open."""
        return self._changed(OPEN, (new_id(), tenant, stage))

    def write(self, part: int, position: int, events: Sequence[pa.RecordBatch], expiry: float, in_packs: bool) -> None:
        """Write events of entities, as packs or as rows, in a transaction of its own.

        Raises StorageFull, and Unavailable as `open` does.
        """
        starts = list(accumulate((len(some) for some in events[:-1]), initial=position))
        placed = zip(events, starts, strict=True)
        if in_packs:
            appender, chunks = self._packs, [encode(some, part, start) for some, start in placed]
        else:
            appender, chunks = self._rows, [Packed(some, 0, 0, 0).table(part, start) for some, start in placed]
        chunk = pa.concat_batches(chunks)
        try:
            with self._write_lock or nullcontext():
                written = appender.append(part, time.time() + expiry, chunk)
        except DriverError as error:
            raise to_error(error) from error
        if not written:
            raise _stage_closed()

    def close(self, part: int, entities: int, rows: int, size: int) -> None:
        """Close a part and record its counts; it then expires with its stage. Raises Unavailable as `open` does."""
        self._changed(CLOSE, (entities, rows, size, part))

    def _changed(self, statement: str, parameters: tuple[object, ...]) -> int:
        try:
            with self._connection.cursor() as cursor:
                cursor.execute(statement.format(*self._placeholders), parameters)
                row = cursor.fetchone()
            self._connection.adbc_connection.commit()
        except DriverError as error:
            self._connection.adbc_connection.rollback()
            raise to_error(error) from error
        if row is None:
            raise _stage_closed()
        return int(row[0])


class WriteLock:
    """File lock that serializes the processes of this machine that write to a SQLite database.

    The next process is woken immediately. SQLite's own busy handler polls with delays up to a tenth of a second, which
    is longer than writing many chunks takes.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(f"{path}-turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._file)


@contextmanager
def open_writer(uri: str, is_sqlite: bool) -> Iterator[StagePartWriter]:
    """Open the journal at a URI in the format of ADBC's drivers."""
    write_lock = None
    if is_sqlite:
        from adbc_driver_sqlite import dbapi as sqlite

        connection = configure(sqlite.connect(uri, autocommit=True))
        write_lock = WriteLock(unquote(uri.removeprefix("file:")))
    else:
        from adbc_driver_postgresql import dbapi as postgresql

        connection = postgresql.connect(uri)
    try:
        yield StagePartWriter(connection, write_lock)
    finally:
        connection.close()
        if write_lock is not None:
            write_lock.close()


def _ingest_packs(cursor: "dbapi.Cursor", packs: pa.RecordBatch) -> None:
    cursor.adbc_ingest("journal_packs", packs, mode="append")


def _stage_closed() -> Unavailable:
    """Return a retryable error: the owner of the stage may open another one."""
    return Unavailable("the stage is no longer open: it expired, or was aborted", retry_after=1)
