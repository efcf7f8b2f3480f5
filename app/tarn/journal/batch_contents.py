"""Find, count and delete the events of batches, whether stored as rows or in packs."""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import pyarrow as pa
from sqlalchemy import Column, ColumnElement, Connection, LargeBinary, Select, cast, delete, func, select, type_coerce
from sqlalchemy.types import NullType

from tarn.db.tables import journal, journal_batches, journal_packs
from tarn.journal.packs import Pack, concerning
from tarn.model.datasets.shards import shard_of

PURGE_ROWS = 5000
"""Rows deleted in one transaction: one large DELETE would block every writer of SQLite."""

PURGE_PACKED = 65_536
"""Events in packs deleted in one transaction; they are only a few SQL rows."""

ABOUT_PACKS = tuple(column for column in journal_packs.c if column.name != "data")


class SegmentPack(NamedTuple):
    """A pack and its segment."""

    segment: int
    pack: Pack


def packs_of(*conditions: ColumnElement[bool]) -> Select[Any]:
    """Return a query for `packs`: the packs of committed batches that match these conditions."""
    return (
        select(*ABOUT_PACKS, journal_batches.c.commit, journal_batches.c.segment)
        .join(journal_batches, journal_batches.c.id == journal_packs.c.batch)
        .where(journal_batches.c.commit.is_not(None), *conditions)
        .order_by(journal_batches.c.commit, journal_packs.c.position)
    )


def packs(
    connection: Connection,
    query: Select[Any],
    parameters: Mapping[str, Any] | None = None,
    shards: Sequence[int] | None = None,
) -> Iterator[SegmentPack]:
    """Yield the packs of a query one at a time: all, or those that may have events for entities of these shards."""
    requested = None if shards is None else sorted(shards)
    for row in connection.execute(query, parameters).all():
        if requested is not None and not row.has_canonical and not _meet(requested, row.low, row.high):
            continue
        own = journal_packs.c.batch == row.batch, journal_packs.c.position == row.position
        data = connection.execute(select(journal_packs.c.data).where(*own)).scalar_one()
        yield SegmentPack(row.segment, Pack(row.batch, row.commit, row.position, row.rows, row.checksum, data))


def packed_events(
    connection: Connection, query: Select[Any], parameters: Mapping[str, Any], entities: Set[str] | None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield segments and events of the packs of a query: all events, or at least those of some entities.

    Includes events of other entities whose canonical id is one of these. Raises DamagedPack.
    """
    shards = None if entities is None else {shard_of(entity) for entity in entities}
    for segment, pack in packs(connection, query, parameters, None if shards is None else sorted(shards)):
        events = pack.decode()
        if entities is not None and shards is not None:
            events = concerning(events, shards, entities)
        yield segment, events


def _meet(shards: Sequence[int], low: int, high: int) -> bool:
    """Return whether any of the sorted shards is in a range."""
    position = bisect_left(shards, low)
    return position < len(shards) and shards[position] <= high


def event_count() -> ColumnElement[int]:
    """Return a column expression that counts the events of a row of `journal_batches`."""
    own = journal_batches.c.id
    single = select(func.count()).where(journal.c.batch == own).correlate(journal_batches).scalar_subquery()
    many = select(func.coalesce(func.sum(journal_packs.c.rows), 0)).where(journal_packs.c.batch == own)
    return single + many.correlate(journal_batches).scalar_subquery()


def events_at(
    connection: Connection, uid: str, positions: Collection[int], names: Sequence[str]
) -> dict[int, tuple[Any, ...]]:
    """Return raw column values of a batch's events by position. Raises DamagedPack."""
    number = select(journal_batches.c.id).where(journal_batches.c.uid == uid).scalar_subquery()
    columns = [_raw(connection, journal.c[name]) for name in names]
    rows = connection.execute(
        select(journal.c.position, *columns).where(journal.c.batch == number, journal.c.position.in_(positions))
    )
    events = {position: tuple(values) for position, *values in rows}
    missing = set(positions) - events.keys()
    if missing:
        last = journal_packs.c.position + journal_packs.c.rows
        near = journal_packs.c.batch == number, journal_packs.c.position <= max(missing), last > min(missing)
        for _, pack in packs(connection, packs_of(*near)):
            own = [position for position in missing if pack.position <= position < pack.position + pack.rows]
            selected = pack.decode().take([position - pack.position for position in own]).select(list(names))
            events |= dict(zip(own, (tuple(event.values()) for event in selected.to_pylist()), strict=True))
    return events


def delete_all(connection: Connection, batch_ids: Collection[int]) -> None:
    """Delete the events of small batches in the caller's transaction."""
    for table in (journal, journal_packs):
        connection.execute(delete(table).where(table.c.batch.in_(batch_ids)))


def delete_some(connection: Connection, batch_id: int) -> bool:
    """Delete the next events of a large batch. Return False if none were left."""
    for table, most in ((journal, PURGE_ROWS), (journal_packs, PURGE_PACKED)):
        of_batch = table.c.batch == batch_id
        first = connection.execute(select(func.min(table.c.position)).where(of_batch)).scalar()
        if first is not None:
            connection.execute(delete(table).where(of_batch, table.c.position < first + most))
            return True
    return False


def _raw(connection: Connection, column: Column[Any]) -> Any:
    """Return a column without type conversion: events are rejected because SQLite may hold values of any type."""
    return type_coerce(cast(column, LargeBinary), NullType) if connection.dialect.name == "sqlite" else column
