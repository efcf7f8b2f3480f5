"""Rows of the journal turned into packs where they stand, so that whatever is tested with rows can be with packs."""

from itertools import groupby
from typing import Any

import pyarrow as pa
from sqlalchemy import delete, insert, select
from tarn.db.engine import Database
from tarn.db.tables import journal, journal_packs
from tarn.journal.event_buffer import SCHEMA
from tarn.journal.packs import encode


def pack_rows(database: Database) -> None:
    """Pack all rows but those that concern every entity: what comes before one of those stays before it."""
    with database.write() as connection:
        rows = connection.execute(select(journal).order_by(journal.c.batch, journal.c.position)).all()
        runs = groupby(rows, key=lambda row: (row.batch, row.shard_key is None))
        for (batch, is_for_all), run in runs:
            if not is_for_all:
                events = [dict(row._mapping) for row in run]
                own = journal.c.position.between(events[0]["position"], events[-1]["position"])
                connection.execute(delete(journal).where(journal.c.batch == batch, own))
                packs = encode(as_batch(events), batch, events[0]["position"])
                connection.execute(insert(journal_packs), packs.to_pylist())


def as_batch(events: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(events, SCHEMA)
