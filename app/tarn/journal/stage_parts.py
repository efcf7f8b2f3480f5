"""Parts of a stage, written over ADBC alone: for processes that must not open SQLite by anything else.

A part is a batch of a stage. It opens, is filled chunk by chunk with packs (or rows, beside processes that know no
packs), and is closed with what it holds; whoever has the stage commits it, with the others or not at all. What was not
closed, or is not wanted, ends with the stage.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from urllib.parse import unquote

import pyarrow as pa
from adbc_driver_manager import dbapi

from tarn.errors import Unavailable
from tarn.journal.bulk import Appender, PostgresqlBulk, copied, failure, inserted
from tarn.journal.event_buffer import Packed
from tarn.journal.packs import encode
from tarn.journal.sqlite_loader_process import RENEW, prepared
from tarn.model.ids import new_id

# A part is what its stage is, but for who wrote it.
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
    """A connection that writes parts, one after the other."""

    def __init__(self, connection: dbapi.Connection, turn: "WriteLock | None") -> None:
        self._connection = connection
        self._turn = turn
        self._marks = ("$1", "$2", "$3", "$4") if turn is None else ("?",) * 4
        renew = PostgresqlBulk.RENEW if turn is None else RENEW
        self._rows = Appender(connection, renew, copied if turn is None else inserted)
        self._packs = Appender(connection, renew, _ingested)

    def open(self, stage: int, tenant: str) -> int:
        """Begin a part; its id. Raises Unavailable, also if the stage is no longer open."""
        return self._changed(OPEN, (new_id(), tenant, stage))

    def write(self, part: int, position: int, events: Sequence[pa.RecordBatch], expiry: float, in_packs: bool) -> None:
        """Write events on entities, in packs or in rows, in a transaction of its own.

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
            with self._turn or nullcontext():
                written = appender.append(part, time.time() + expiry, chunk)
        except dbapi.Error as error:
            raise failure(error) from error
        if not written:
            raise _closed()

    def close(self, part: int, entities: int, rows: int, size: int) -> None:
        """Say what a part holds: from now on it lives as long as its stage. Raises Unavailable as `open` does."""
        self._changed(CLOSE, (entities, rows, size, part))

    def _changed(self, statement: str, parameters: tuple[object, ...]) -> int:
        try:
            with self._connection.cursor() as cursor:
                cursor.execute(statement.format(*self._marks), parameters)
                row = cursor.fetchone()
            self._connection.adbc_connection.commit()
        except dbapi.Error as error:
            self._connection.adbc_connection.rollback()
            raise failure(error) from error
        if row is None:
            raise _closed()
        return int(row[0])


class WriteLock:
    """Lets one process of this machine at a time write to a SQLite, and wakes the next one at once.

    SQLite itself lets others try again after a while, which grows to a tenth of a second: longer than many chunks take.
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
def opened(uri: str, is_sqlite: bool) -> Iterator[StagePartWriter]:
    """Write to the journal at a URI as ADBC's drivers want it said."""
    turn = None
    if is_sqlite:
        from adbc_driver_sqlite import dbapi as sqlite

        connection = prepared(sqlite.connect(uri, autocommit=True))
        turn = WriteLock(unquote(uri.removeprefix("file:")))
    else:
        from adbc_driver_postgresql import dbapi as postgresql

        connection = postgresql.connect(uri)
    try:
        yield StagePartWriter(connection, turn)
    finally:
        connection.close()
        if turn is not None:
            turn.close()


def _ingested(cursor: dbapi.Cursor, packs: pa.RecordBatch) -> None:
    cursor.adbc_ingest("journal_packs", packs, mode="append")


def _closed() -> Unavailable:
    """Whoever opened the stage may open another."""
    return Unavailable("the stage is no longer open: it expired, or was aborted", retry_after=1)
