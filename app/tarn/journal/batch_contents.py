"""What batches hold, whether in rows or in packs: found, counted and deleted."""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import pyarrow as pa
from sqlalchemy import Column, ColumnElement, Connection, LargeBinary, Select, cast, delete, func, select, type_coerce
from sqlalchemy.types import NullType

from tarn.db.tables import journal, journal_batches, journal_packs
from tarn.journal.packs import Pack, concerning
from tarn.model.shards import shard_of

PURGE_ROWS = 5000
"""Rows deleted in one transaction: one large DELETE would stall every writer of SQLite."""

PURGE_PACKED = 65_536
"""The same of events in packs, which are a few rows."""

ABOUT_PACKS = tuple(column for column in journal_packs.c if column.name != "data")


class SegmentPack(NamedTuple):
    """A pack, and the segment that it is in."""

    segment: int
    pack: Pack


def packs_of(*which: ColumnElement[bool]) -> Select[Any]:
    """The query by which `packs` finds those of committed batches that match."""
    return (
        select(*ABOUT_PACKS, journal_batches.c.commit, journal_batches.c.segment)
        .join(journal_batches, journal_batches.c.id == journal_packs.c.batch)
        .where(journal_batches.c.commit.is_not(None), *which)
        .order_by(journal_batches.c.commit, journal_packs.c.position)
    )


def packs(
    connection: Connection,
    query: Select[Any],
    asked: Mapping[str, Any] | None = None,
    shards: Sequence[int] | None = None,
) -> Iterator[SegmentPack]:
    """Packs that a query finds, one at a time: all, or those that may concern entities of these shards."""
    wanted = None if shards is None else sorted(shards)
    for row in connection.execute(query, asked).all():
        if wanted is not None and not row.has_canonical and not _meet(wanted, row.low, row.high):
            continue
        own = journal_packs.c.batch == row.batch, journal_packs.c.position == row.position
        data = connection.execute(select(journal_packs.c.data).where(*own)).scalar_one()
        yield SegmentPack(row.segment, Pack(row.batch, row.commit, row.position, row.rows, row.checksum, data))


def packed_events(
    connection: Connection, query: Select[Any], asked: Mapping[str, Any], entities: Set[str] | None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Events in packs that a query finds, with their segments: all, or at least those on some entities.

    An event on another entity that says that it is one of these is among them. Raises Damaged.
    """
    shards = None if entities is None else {shard_of(entity) for entity in entities}
    for segment, pack in packs(connection, query, asked, None if shards is None else sorted(shards)):
        events = pack.opened()
        if entities is not None and shards is not None:
            events = concerning(events, shards, entities)
        yield segment, events


def _meet(shards: Sequence[int], low: int, high: int) -> bool:
    """Whether any of the shards, which are sorted, is in a range."""
    place = bisect_left(shards, low)
    return place < len(shards) and shards[place] <= high


def counted() -> ColumnElement[int]:
    """How many events a row of `journal_batches` has, for a query on it."""
    own = journal_batches.c.id
    single = select(func.count()).where(journal.c.batch == own).correlate(journal_batches).scalar_subquery()
    many = select(func.coalesce(func.sum(journal_packs.c.rows), 0)).where(journal_packs.c.batch == own)
    return single + many.correlate(journal_batches).scalar_subquery()


def events_at(
    connection: Connection, uid: str, positions: Collection[int], names: Sequence[str]
) -> dict[int, tuple[Any, ...]]:
    """Columns of a batch's events at some positions, as they stand. Raises Damaged."""
    number = select(journal_batches.c.id).where(journal_batches.c.uid == uid).scalar_subquery()
    columns = [_raw(connection, journal.c[name]) for name in names]
    rows = connection.execute(
        select(journal.c.position, *columns).where(journal.c.batch == number, journal.c.position.in_(positions))
    )
    found = {position: tuple(values) for position, *values in rows}
    missing = set(positions) - found.keys()
    if missing:
        last = journal_packs.c.position + journal_packs.c.rows
        near = journal_packs.c.batch == number, journal_packs.c.position <= max(missing), last > min(missing)
        for _, pack in packs(connection, packs_of(*near)):
            own = [position for position in missing if pack.position <= position < pack.position + pack.rows]
            chosen = pack.opened().take([position - pack.position for position in own]).select(list(names))
            found |= dict(zip(own, (tuple(event.values()) for event in chosen.to_pylist()), strict=True))
    return found


def delete_all(connection: Connection, batch_ids: Collection[int]) -> None:
    """Delete what some batches hold, which together is not much."""
    for table in (journal, journal_packs):
        connection.execute(delete(table).where(table.c.batch.in_(batch_ids)))


def delete_some(connection: Connection, batch_id: int) -> bool:
    """Delete the next of what a large batch holds. False if nothing was left."""
    for table, most in ((journal, PURGE_ROWS), (journal_packs, PURGE_PACKED)):
        of_batch = table.c.batch == batch_id
        first = connection.execute(select(func.min(table.c.position)).where(of_batch)).scalar()
        if first is not None:
            connection.execute(delete(table).where(of_batch, table.c.position < first + most))
            return True
    return False


def _raw(connection: Connection, column: Column[Any]) -> Any:
    """A column without a look at what is in it: SQLite may have anything there, and that is why it is set aside."""
    return type_coerce(cast(column, LargeBinary), NullType) if connection.dialect.name == "sqlite" else column
