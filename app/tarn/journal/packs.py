"""Packs: many events of a batch in one row of SQL, as Arrow. This is the one module that knows what is in them.

To a reader a pack and as many rows of `journal` are the same: both are seen when their batch commits, never change, and
go when it is done. A pack holds events on entities only, sorted by shard, and its row says which shards those are: who
looks for some entities opens the packs that may hold them. Light to import: executors read packs without SQLAlchemy.
"""

import zlib
from collections.abc import Set
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tarn.errors import Internal

ROWS = 4096
"""Events of a pack: what is decoded for one entity, and then some hundred kilobytes."""

BYTES = 8 << 20
"""Bytes of a pack before it is compressed, about: long texts are in packs of fewer events."""

SCHEMA = pa.schema(
    [
        ("batch", pa.int64()),
        ("position", pa.int64()),
        ("rows", pa.int32()),
        ("low", pa.int32()),
        ("high", pa.int32()),
        ("has_canonical", pa.bool_()),
        ("checksum", pa.int64()),
        ("data", pa.binary()),
    ]
)
"""The columns of `journal_packs`, in types that both databases take as they are."""

PLACE = ("batch", "position")
"""What the row says, and the data does not."""

WRITING = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
READING = pa.ipc.IpcReadOptions(use_threads=False)


class DamagedPack(Internal):
    """A pack of the journal is not what was written. Nothing of it is passed over: who reads it stops here."""


class Pack(NamedTuple):
    """A row of `journal_packs`, with its batch's number in history."""

    batch: int
    commit: int
    position: int
    rows: int
    checksum: int
    data: "bytes | pa.Buffer"

    def opened(self) -> pa.RecordBatch:
        """Its events with their `ord`, sorted by `shard_key`. Raises Damaged."""
        if zlib.crc32(self.data) != self.checksum:
            raise self._damaged()
        try:
            (events,) = pa.ipc.open_stream(self.data, options=READING)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._damaged() from error
        if events.num_rows != self.rows:
            raise self._damaged()
        first = (self.commit << 32) + self.position
        ords = pa.array(np.arange(first, first + self.rows))
        return pa.RecordBatch.from_arrays([ords, *events.columns], ["ord", *events.schema.names])

    def _damaged(self) -> DamagedPack:
        last = self.position + self.rows - 1
        return DamagedPack(f"the events {self.position} to {last} of the journal's batch {self.batch} cannot be read")


def encode(events: pa.RecordBatch, batch: int, start: int) -> pa.RecordBatch:
    """Events on entities as rows of `journal_packs`, with positions from `start` on.

    They are put into the order of their shards, and so are their positions. Those of an entity stay in theirs, which is
    all that their places decide. Raises ValueError for an event without a shard: it concerns every entity.
    """
    shards = events.column("shard_key")
    if shards.null_count:
        raise ValueError("what concerns every entity is not packed")
    keys = shards.to_numpy()
    own = events.select([name for name in events.schema.names if name not in PLACE])
    if np.any(keys[1:] < keys[:-1]):
        own = own.take(pa.array(np.argsort(keys, kind="stable")))
    count = max(1, -(-own.num_rows // ROWS), -(-own.nbytes // BYTES))
    bounds = [own.num_rows * number // count for number in range(count + 1)]
    rows = [_row(own.slice(low, high - low), batch, start + low) for low, high in pairwise(bounds) if high > low]
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


def _row(events: pa.RecordBatch, batch: int, position: int) -> dict[str, Any]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, events.schema, options=WRITING) as stream:
        stream.write_batch(events)
    data = sink.getvalue()
    shards, canonicals = events.column("shard_key"), events.column("canonical_id")
    return {
        "batch": batch,
        "position": position,
        "rows": events.num_rows,
        "low": shards[0].as_py(),
        "high": shards[-1].as_py(),
        "has_canonical": canonicals.null_count < len(canonicals),
        "checksum": zlib.crc32(data),
        "data": data.to_pybytes(),
    }


def within(events: pa.RecordBatch, low: int, high: int) -> pa.RecordBatch:
    """Of the events of a pack those on entities in a range of shards."""
    shards = events.column("shard_key").to_numpy()
    first, last = np.searchsorted(shards, low, "left"), np.searchsorted(shards, high, "right")
    return events.slice(first, last - first)


def concerning(events: pa.RecordBatch, shards: Set[int], entities: Set[str]) -> pa.RecordBatch:
    """Of the events of a pack those on entities in some shards, or on what they say is one of these entities."""
    wanted, names = pa.array(sorted(shards), pa.int32()), pa.array(sorted(entities), pa.string())
    own, said = events.column("shard_key"), events.column("canonical_id")
    return events.filter(pc.or_(pc.is_in(own, wanted), pc.is_in(said, names)))
