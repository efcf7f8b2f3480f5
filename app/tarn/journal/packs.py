"""Packs: many events of a batch in one SQL row, as compressed Arrow. Only this module knows their format.

To a reader, a pack is equivalent to the same events as rows of `journal`: both become visible when their batch commits,
never change, and are deleted after it is done. A pack holds events of single entities only, sorted by shard, and its
row has the range of shards, so that a lookup of some entities opens only packs that may contain them.

This module does not import SQLAlchemy, because executors read packs without it.
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
"""Maximum events per pack. A lookup of one entity decodes a whole pack, which is some hundred kilobytes."""

BYTES = 8 << 20
"""Approximate maximum bytes of a pack before compression: packs of long texts have fewer events."""

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
"""The columns of `journal_packs`, in types that both databases accept without conversion."""

PLACE = ("batch", "position")
"""Columns of an event that are in the SQL row and not in the pack's data."""

WRITING = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
READING = pa.ipc.IpcReadOptions(use_threads=False)


class DamagedPack(Internal):
    """A pack of the journal is not what was written. No event is skipped: the read or flush fails."""


class Pack(NamedTuple):
    """A row of `journal_packs`, with the commit number of its batch."""

    batch: int
    commit: int
    position: int
    rows: int
    checksum: int
    data: "bytes | pa.Buffer"

    def decode(self) -> pa.RecordBatch:
        """Decode the pack: return its events with their `ord`, sorted by `shard_key`. Raises DamagedPack."""
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
    """Encode events of entities as rows of `journal_packs`, with positions from `start` on.

    Events are sorted by shard and numbered in that order. The sort is stable, so the events of one entity keep their
    relative order, which is the only order that matters. Raises ValueError for an event without a shard, because it
    applies to every entity.
    """
    shards = events.column("shard_key")
    if shards.null_count:
        raise ValueError("an event that applies to every entity cannot be packed")
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
    """Filter the events of a pack to those of entities in a range of shards."""
    shards = events.column("shard_key").to_numpy()
    first, last = np.searchsorted(shards, low, "left"), np.searchsorted(shards, high, "right")
    return events.slice(first, last - first)


def concerning(events: pa.RecordBatch, shards: Set[int], entities: Set[str]) -> pa.RecordBatch:
    """Filter the events of a pack to those in these shards, or with one of these entities as canonical id."""
    requested, names = pa.array(sorted(shards), pa.int32()), pa.array(sorted(entities), pa.string())
    shard_keys, canonicals = events.column("shard_key"), events.column("canonical_id")
    return events.filter(pc.or_(pc.is_in(shard_keys, requested), pc.is_in(canonicals, names)))
