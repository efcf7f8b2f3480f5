"""Convert rows of the journal into packs, so that tests that use rows can run with packs."""

from itertools import groupby
from typing import Any

import pyarrow as pa
from sqlalchemy import delete, insert, select
from tarn.db.engine import Database
from tarn.db.tables import journal, journal_packs
from tarn.journal.packs import encode
from tarn.journal.parsing.event_buffer import SCHEMA


def pack_rows(database: Database) -> None:
    """Pack all rows except those that concern every entity; the order relative to those is kept."""
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
