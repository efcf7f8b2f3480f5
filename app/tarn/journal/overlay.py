"""Overlay: committed journal events that no snapshot holds yet, as Arrow tables."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from sqlalchemy import Connection, bindparam, select

from tarn.datasets.registry import ACTIVE, Dataset
from tarn.db.tables import datasets, journal, journal_batches, journal_head, snapshot_heads
from tarn.errors import DatasetNotFound
from tarn.journal import batch_contents
from tarn.journal.batches import COMMITTED
from tarn.journal.parsing.event_buffer import SCHEMA as EVENTS
from tarn.model.datasets.shards import shard_of
from tarn.model.datasets.snapshot import Head

FIELDS = tuple(name for name in EVENTS.names if name not in ("batch", "position", "shard_key"))

SCHEMA = pa.schema([("ord", pa.int64()), *(EVENTS.field(name) for name in FIELDS)])
"""An event with `ord`, its position in the dataset's history (commit number << 32 | position in the batch)."""

NOTHING = SCHEMA.empty_table()

FETCH = 20_000
"""Rows fetched from SQL at once, which are Python objects until they are converted."""

PIECES = 16
"""Cached tables per segment before they are concatenated."""

Spool = Callable[[], Path]
"""Returns the path of a temporary file to write to; the caller deletes it."""


class DatasetState(NamedTuple):
    """State of a dataset in one transaction: its head snapshot and its journal's last commit."""

    head: Head
    commit: int
    waiting: int
    """Committed rows that no snapshot holds."""


# Queries that every read runs are built once: building them takes longer than the database takes to answer.

_PRESENT = (
    select(snapshot_heads, journal_head.c.commit, journal_head.c.rows)
    .join(journal_head, journal_head.c.dataset_id == snapshot_heads.c.dataset_id)
    .join(datasets, datasets.c.id == snapshot_heads.c.dataset_id)
    .where(snapshot_heads.c.dataset_id == bindparam("dataset"), datasets.c.state == ACTIVE)
)


def present(connection: Connection, dataset: Dataset) -> DatasetState:
    """Read the recorded head and the journal's head in one query. Raises DatasetNotFound."""
    row = connection.execute(_PRESENT, {"dataset": dataset.id}).first()
    if row is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
    head = Head(seq=row.seq, id=row.snapshot, content=row.content, segment=row.segment)
    return DatasetState(head, row.commit, row.rows)


class Unflushed(NamedTuple):
    """Events that are newer than a head, unordered. Events that apply to every entity are always included."""

    table: pa.Table = NOTHING
    file: Path | None = None
    """Parquet file with the same columns, used instead of `table` if there are too many events for memory."""
    is_whole: bool = True
    """Whether events of all entities are included, not only those of the requested ones."""
    names: Set[str | None] | None = None
    """Superset of the entity ids and canonical ids in the events, with None for events that apply to every entity."""
    version: tuple[str, int, int] | None = None
    """Cache key of the events, if there is one: dataset id, the head's segment, last commit."""

    def may_concern(self, entity_id: str) -> bool:
        """Return False if certainly no event applies to this id."""
        return self.names is None or None in self.names or entity_id in self.names

    def on(self, entities: Set[str]) -> pa.Table:
        """Return the events of these entities, and those that apply to every entity."""
        requested = pa.array(sorted(entities), pa.string())
        if self.file is not None:
            entity = pc.field("entity_id")
            return pq.read_table(self.file, filters=entity.isin(requested) | entity.is_null())
        if not self.table.num_rows:
            return self.table
        names = self.table.column("entity_id")
        return self.table.filter(pc.or_(pc.is_null(names), pc.is_in(names, requested)))

    def added(self, entities: Set[str], canonicals: Set[str]) -> set[tuple[str, str]]:
        """Return (entity id, canonical id) of ADD events with these entity ids or canonical ids.

        The canonical id of an event without one is its entity id.
        """
        of, under = pa.array(sorted(entities | canonicals), pa.string()), pa.array(sorted(canonicals), pa.string())
        columns = ["entity_id", "canonical_id"]
        if self.file is not None:
            concerns = pc.field("entity_id").isin(of) | pc.field("canonical_id").isin(under)
            matching = pq.read_table(self.file, columns=columns, filters=(pc.field("kind") == 1) & concerns)
        elif self.table.num_rows:
            entity, canonical = self.table.column("entity_id"), self.table.column("canonical_id")
            concerned = pc.or_(pc.is_in(entity, of), pc.is_in(canonical, under))
            matching = self.table.select(columns).filter(pc.and_(concerned, pc.equal(self.table.column("kind"), 1)))
        else:
            return set()
        pairs = zip(matching.column(0).to_pylist(), matching.column(1).to_pylist(), strict=True)
        return {(entity, entity if canonical is None else canonical) for entity, canonical in pairs}


@dataclass
class _CachedEvents:
    """Cached events of one dataset by segment: those of segments above `floor` up to the commit `upto`."""

    floor: int
    upto: int = 0
    segments: dict[int, list[pa.Table]] = field(default_factory=dict)
    names: set[str | None] = field(default_factory=set)
    lock: Lock = field(default_factory=Lock)

    @property
    def rows(self) -> int:
        return sum(piece.num_rows for pieces in self.segments.values() for piece in pieces)

    def drop(self, floor: int) -> None:
        """Drop flushed segments. Replaces `names` instead of shrinking it, because earlier readers still hold it."""
        if floor > self.floor:
            self.floor = floor
            self.segments = {number: pieces for number, pieces in self.segments.items() if number > floor}
            self.names = set().union(*(_names(piece) for pieces in self.segments.values() for piece in pieces))

    def add(self, number: int, table: pa.Table) -> None:
        self.names |= _names(table)
        pieces = self.segments.setdefault(number, [])
        pieces.append(table)
        if len(pieces) > PIECES:
            self.segments[number] = [pa.concat_tables(pieces).combine_chunks()]

    def table(self) -> pa.Table:
        pieces = [piece for pieces in self.segments.values() for piece in pieces]
        return pa.concat_tables(pieces) if pieces else NOTHING


class Overlay:
    """Cached reader of unflushed events. Reads in the transaction that read the head, so that both are consistent.

    Rows of a committed batch never change, and commit numbers increase in the order in which batches become visible.
    So events up to a commit are cached, within limits, and only later ones are read from SQL.
    """

    def __init__(self, most_rows: int) -> None:
        self._most = most_rows
        self._kept: OrderedDict[str, _CachedEvents] = OrderedDict()
        self._lock = Lock()

    def events(
        self, connection: Connection, dataset: Dataset, now: DatasetState, entities: Set[str] | None, spool: Spool
    ) -> Unflushed:
        """Return the events that are newer than the head: all of them, or at least those of some entities.

        If all are requested and they exceed the cache limit, they are written to the file that `spool` returns.
        """
        if not now.waiting:
            return Unflushed()
        if now.waiting <= self._most:
            cached = self._from_kept(connection, dataset, now)
            if cached is not None:
                return cached
        pieces = (table for _, table in _read(connection, dataset, now.head.segment, 0, entities))
        if entities is not None:
            return Unflushed(pa.concat_tables([NOTHING, *pieces]), is_whole=False)
        return Unflushed(file=_spooled(pieces, spool()))

    def _from_kept(self, connection: Connection, dataset: Dataset, now: DatasetState) -> Unflushed | None:
        """Return all events from the cache after adding new ones; None if segments of this reader were dropped."""
        with self._lock:
            cached = self._kept.setdefault(dataset.id, _CachedEvents(now.head.segment))
            self._kept.move_to_end(dataset.id)
        with cached.lock:
            if cached.floor > now.head.segment:
                # A concurrent reader has seen a later head.
                return None
            cached.drop(now.head.segment)
            if cached.upto < now.commit:
                # Read everything before adding anything: after a failed read, the part already added would be read
                # and added again.
                for number, piece in list(_read(connection, dataset, now.head.segment, cached.upto, None)):
                    cached.add(number, piece)
                cached.upto = now.commit
            table, names, later = cached.table(), cached.names, cached.upto > now.commit
        self._shrink()
        if later:
            table = table.filter(pc.less(table.column("ord"), (now.commit + 1) << 32))
        return Unflushed(table, names=names, version=(dataset.id, now.head.segment, now.commit))

    def _shrink(self) -> None:
        """Evict the least recently read datasets until the cache is within its limit."""
        with self._lock:
            rows = sum(cached.rows for cached in list(self._kept.values()))
            while rows > self._most and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                rows -= oldest.rows


_BATCHES = (
    journal_batches.c.dataset_id == bindparam("dataset"),
    journal_batches.c.commit > bindparam("since"),
    journal_batches.c.state == COMMITTED,
    journal_batches.c.segment > bindparam("after"),
)

_ROWS = (
    select(
        journal_batches.c.segment,
        journal_batches.c.commit,
        journal.c.position,
        *(journal.c[name] for name in FIELDS),
    )
    .join(journal, journal.c.batch == journal_batches.c.id)
    .where(*_BATCHES)
)

_CONCERNING = _ROWS.where(
    journal.c.shard_key.in_(bindparam("shards", expanding=True))
    | journal.c.shard_key.is_(None)
    # An event of another entity applies if its canonical id is one of these.
    | journal.c.canonical_id.in_(bindparam("entities", expanding=True))
)

_PACKS = batch_contents.packs_of(*_BATCHES)


def _read(
    connection: Connection, dataset: Dataset, after: int, since: int, entities: Set[str] | None
) -> Iterator[tuple[int, pa.Table]]:
    """Yield events of segments above `after` and commits above `since`, one segment per table. Raises DamagedPack."""
    parameters = {"dataset": dataset.id, "since": since, "after": after}
    yield from _rows(connection, parameters, entities)
    for segment, events in batch_contents.packed_events(connection, _PACKS, parameters, entities):
        yield segment, pa.Table.from_batches([events]).select(SCHEMA.names).cast(SCHEMA)


def _rows(
    connection: Connection, which: Mapping[str, Any], entities: Set[str] | None
) -> Iterator[tuple[int, pa.Table]]:
    query, parameters = _ROWS, dict[str, Any](which)
    if entities is not None:
        query = _CONCERNING
        parameters |= {"shards": sorted({shard_of(entity) for entity in entities}), "entities": sorted(entities)}
    with connection.execution_options(stream_results=True).execute(query, parameters) as result:
        for rows in result.partitions(FETCH):
            columns = list(zip(*rows, strict=True))
            table = _table(columns)
            segments = np.array(columns[0])
            for number in np.unique(segments):
                yield int(number), table.filter(pa.array(segments == number))


def _names(events: pa.Table) -> set[str | None]:
    """Return the entity ids and canonical ids in some events, with None for events that apply to every entity."""
    of, under = (pc.unique(events.column(name)).to_pylist() for name in ("entity_id", "canonical_id"))
    return {*of, *(name for name in under if name is not None)}


def _spooled(pieces: Iterable[pa.Table], file: Path) -> Path:
    with pq.ParquetWriter(file, SCHEMA, compression="lz4") as writer:
        for piece in pieces:
            writer.write_table(piece)
    return file


def _table(columns: list[tuple[object, ...]]) -> pa.Table:
    ords = (np.array(columns[1], np.int64) << 32) + np.array(columns[2], np.int64)
    own = [pa.array(values, SCHEMA.field(name).type) for name, values in zip(FIELDS, columns[3:], strict=True)]
    return pa.Table.from_arrays([pa.array(ords), *own], schema=SCHEMA)
