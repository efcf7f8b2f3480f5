"""What API processes say they read: a row for each, which it replaces again and again."""

import os
import socket
from collections.abc import Collection, Mapping
from typing import NamedTuple

from sqlalchemy import Connection, delete, select

from tarn.db.format_versions import FORMATS
from tarn.db.tables import readers
from tarn.db.upsert import upsert
from tarn.model.ids import now


class ReaderHeartbeat(NamedTuple):
    """What one process said last: how many times it did, and the oldest snapshot that it reads, by dataset."""

    beat: int
    oldest: Mapping[str, int]


def tell(connection: Connection, reader: str, report: ReaderHeartbeat) -> None:
    """Put a process's report in the place of its last one; the first one says which forms of data it reads."""
    said = {"seen": now(), "beat": report.beat, "oldest": dict(report.oldest)}
    connection.execute(
        upsert(connection, readers)
        .values(id=reader, host=socket.gethostname(), pid=os.getpid(), speaks=[form.name for form in FORMATS], **said)
        .on_conflict_do_update(index_elements=["id"], set_=said)
    )


def latest(connection: Connection) -> dict[str, ReaderHeartbeat]:
    """The last report of every process."""
    rows = connection.execute(select(readers.c.id, readers.c.beat, readers.c.oldest))
    return {row.id: ReaderHeartbeat(row.beat, row.oldest) for row in rows}


def forget(connection: Connection, gone: Collection[str]) -> None:
    connection.execute(delete(readers).where(readers.c.id.in_(gone)))
