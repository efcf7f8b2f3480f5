"""What the journal holds that no snapshot holds yet, as Arrow."""

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
from tarn.journal import batch_contents as contents
from tarn.journal.batches import COMMITTED
from tarn.journal.event_buffer import SCHEMA as EVENTS
from tarn.model.shards import shard_of
from tarn.model.snapshot import Head

FIELDS = tuple(name for name in EVENTS.names if name not in ("batch", "position", "shard_key"))

SCHEMA = pa.schema([("ord", pa.int64()), *(EVENTS.field(name) for name in FIELDS)])
"""An event with its place in the dataset's history."""

NOTHING = SCHEMA.empty_table()

FETCH = 20_000
"""Rows that are Python objects at once."""

PIECES = 16
"""Tables that a segment may be kept in before they are joined."""

Spool = Callable[[], Path]
"""Names a file of the caller's, who removes it."""


class DatasetState(NamedTuple):
    """A dataset at one moment: what its head is, and how far its journal goes."""

    head: Head
    commit: int
    waiting: int
    """Committed rows that no snapshot holds."""


# Statements of every read are put together once: that takes longer than the database takes to answer them.

_PRESENT = (
    select(snapshot_heads, journal_head.c.commit, journal_head.c.rows)
    .join(journal_head, journal_head.c.dataset_id == snapshot_heads.c.dataset_id)
    .join(datasets, datasets.c.id == snapshot_heads.c.dataset_id)
    .where(snapshot_heads.c.dataset_id == bindparam("dataset"), datasets.c.state == ACTIVE)
)


def present(connection: Connection, dataset: Dataset) -> DatasetState:
    """The recorded head and the journal's, as one. Raises DatasetNotFound."""
    row = connection.execute(_PRESENT, {"dataset": dataset.id}).first()
    if row is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
    head = Head(seq=row.seq, id=row.snapshot, content=row.content, segment=row.segment)
    return DatasetState(head, row.commit, row.rows)


class Unflushed(NamedTuple):
    """Events above a head, in no particular order. Those that concern every entity are always among them."""

    table: pa.Table = NOTHING
    file: Path | None = None
    """Where they are if they are too many to be held: a Parquet file with the same columns."""
    is_whole: bool = True
    """Whether events on entities that were not asked for are among them too."""
    names: Set[str | None] | None = None
    """Ids of the entities they speak of, canonical ones too, and None where every entity is meant; perhaps more."""
    version: tuple[str, int, int] | None = None
    """What says the same of the same events, if anything does: the dataset, a head's segment, and the last commit."""

    def may_concern(self, entity_id: str) -> bool:
        """False if it is certain that no event speaks of this id."""
        return self.names is None or None in self.names or entity_id in self.names

    def on(self, entities: Set[str]) -> pa.Table:
        """The events on some entities, and those that concern every one."""
        wanted = pa.array(sorted(entities), pa.string())
        if self.file is not None:
            entity = pc.field("entity_id")
            return pq.read_table(self.file, filters=entity.isin(wanted) | entity.is_null())
        if not self.table.num_rows:
            return self.table
        names = self.table.column("entity_id")
        return self.table.filter(pc.or_(pc.is_null(names), pc.is_in(names, wanted)))

    def added(self, entities: Set[str], canonicals: Set[str]) -> set[tuple[str, str]]:
        """The pairs of entity id and canonical id in adds of these entities, or under these canonical ids.

        An add that names no canonical id is under its entity's own.
        """
        of, under = pa.array(sorted(entities | canonicals), pa.string()), pa.array(sorted(canonicals), pa.string())
        columns = ["entity_id", "canonical_id"]
        if self.file is not None:
            concerns = pc.field("entity_id").isin(of) | pc.field("canonical_id").isin(under)
            found = pq.read_table(self.file, columns=columns, filters=(pc.field("kind") == 1) & concerns)
        elif self.table.num_rows:
            entity, canonical = self.table.column("entity_id"), self.table.column("canonical_id")
            concerned = pc.or_(pc.is_in(entity, of), pc.is_in(canonical, under))
            found = self.table.select(columns).filter(pc.and_(concerned, pc.equal(self.table.column("kind"), 1)))
        else:
            return set()
        pairs = zip(found.column(0).to_pylist(), found.column(1).to_pylist(), strict=True)
        return {(one, one if other is None else other) for one, other in pairs}


@dataclass
class _CachedEvents:
    """Events of one dataset, by segment: all of segments above `floor` up to the commit `upto`."""

    floor: int
    upto: int = 0
    segments: dict[int, list[pa.Table]] = field(default_factory=dict)
    names: set[str | None] = field(default_factory=set)
    lock: Lock = field(default_factory=Lock)

    @property
    def rows(self) -> int:
        return sum(piece.num_rows for pieces in self.segments.values() for piece in pieces)

    def drop(self, floor: int) -> None:
        """Forget what is flushed. Who was given `names` before keeps them as they were, or more."""
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
    """Unflushed events, read in the transaction that read the head, so that the two fit together.

    Rows of a committed batch never change, and commit numbers rise in the order in which batches become visible. So
    what was read up to a commit is kept, within limits, and only what came since is read.
    """

    def __init__(self, most_rows: int) -> None:
        self._most = most_rows
        self._kept: OrderedDict[str, _CachedEvents] = OrderedDict()
        self._lock = Lock()

    def events(
        self, connection: Connection, dataset: Dataset, now: DatasetState, entities: Set[str] | None, spool: Spool
    ) -> Unflushed:
        """The events above the head: all of them, or at least those on some entities.

        As many as are not kept go to a file that `spool` names, if all are asked for.
        """
        if not now.waiting:
            return Unflushed()
        if now.waiting <= self._most:
            kept = self._from_kept(connection, dataset, now)
            if kept is not None:
                return kept
        pieces = (table for _, table in _read(connection, dataset, now.head.segment, 0, entities))
        if entities is not None:
            return Unflushed(pa.concat_tables([NOTHING, *pieces]), is_whole=False)
        return Unflushed(file=_spooled(pieces, spool()))

    def _from_kept(self, connection: Connection, dataset: Dataset, now: DatasetState) -> Unflushed | None:
        """All events from memory, after reading what is new; None if what this reader needs was dropped."""
        with self._lock:
            kept = self._kept.setdefault(dataset.id, _CachedEvents(now.head.segment))
            self._kept.move_to_end(dataset.id)
        with kept.lock:
            if kept.floor > now.head.segment:
                # Another reader has seen a later head.
                return None
            kept.drop(now.head.segment)
            if kept.upto < now.commit:
                # All or nothing: what is kept of a read that failed would be read again, and be there twice.
                for number, piece in list(_read(connection, dataset, now.head.segment, kept.upto, None)):
                    kept.add(number, piece)
                kept.upto = now.commit
            table, names, later = kept.table(), kept.names, kept.upto > now.commit
        self._shrink()
        if later:
            table = table.filter(pc.less(table.column("ord"), (now.commit + 1) << 32))
        return Unflushed(table, names=names, version=(dataset.id, now.head.segment, now.commit))

    def _shrink(self) -> None:
        """Forget the datasets that were not read for the longest time."""
        with self._lock:
            rows = sum(kept.rows for kept in list(self._kept.values()))
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
    # Another entity's event is of interest if it says that it is one of these.
    | journal.c.canonical_id.in_(bindparam("entities", expanding=True))
)

_PACKS = contents.packs_of(*_BATCHES)


def _read(
    connection: Connection, dataset: Dataset, after: int, since: int, entities: Set[str] | None
) -> Iterator[tuple[int, pa.Table]]:
    """Events of segments above `after` in commits above `since`, in pieces of one segment each. Raises Damaged."""
    which = {"dataset": dataset.id, "since": since, "after": after}
    yield from _rows(connection, which, entities)
    for segment, events in contents.packed_events(connection, _PACKS, which, entities):
        yield segment, pa.Table.from_batches([events]).select(SCHEMA.names).cast(SCHEMA)


def _rows(
    connection: Connection, which: Mapping[str, Any], entities: Set[str] | None
) -> Iterator[tuple[int, pa.Table]]:
    query, asked = _ROWS, dict[str, Any](which)
    if entities is not None:
        query = _CONCERNING
        asked |= {"shards": sorted({shard_of(entity) for entity in entities}), "entities": sorted(entities)}
    with connection.execution_options(stream_results=True).execute(query, asked) as found:
        for rows in found.partitions(FETCH):
            columns = list(zip(*rows, strict=True))
            table = _table(columns)
            segments = np.array(columns[0])
            for number in np.unique(segments):
                yield int(number), table.filter(pa.array(segments == number))


def _names(events: pa.Table) -> set[str | None]:
    """The ids in some events; None for those that concern every entity. A canonical id is the entity's own if null."""
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
