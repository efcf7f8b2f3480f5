"""Heartbeats of API processes: one row each, with the oldest snapshots that the process is reading."""

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
    """The latest heartbeat of a process: its count, and the oldest snapshot that it reads, by dataset."""

    beat: int
    oldest: Mapping[str, int]


def beat(connection: Connection, reader: str, heartbeat: ReaderHeartbeat) -> None:
    """Replace a process's heartbeat; the first one lists the data formats that it reads."""
    values = {"seen": now(), "beat": heartbeat.beat, "oldest": dict(heartbeat.oldest)}
    connection.execute(
        upsert(connection, readers)
        .values(
            id=reader,
            host=socket.gethostname(),
            pid=os.getpid(),
            speaks=[data_format.name for data_format in FORMATS],
            **values,
        )
        .on_conflict_do_update(index_elements=["id"], set_=values)
    )


def latest(connection: Connection) -> dict[str, ReaderHeartbeat]:
    """Return the latest heartbeat of every process."""
    rows = connection.execute(select(readers.c.id, readers.c.beat, readers.c.oldest))
    return {row.id: ReaderHeartbeat(row.beat, row.oldest) for row in rows}


def forget(connection: Connection, reader_ids: Collection[str]) -> None:
    """Delete the heartbeats of processes that have stopped."""
    connection.execute(delete(readers).where(readers.c.id.in_(reader_ids)))
