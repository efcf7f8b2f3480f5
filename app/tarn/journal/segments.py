"""Journal segments: slices of a dataset's journal. Each closed segment with rows becomes one snapshot."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, delete, func, select, update
from sqlalchemy.orm import aliased

from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import journal_batches, journal_head, snapshot_heads
from tarn.errors import DatasetNotFound
from tarn.journal import batch_contents, head
from tarn.journal.batch_contents import PURGE_ROWS
from tarn.journal.batches import COMMITTED, DONE
from tarn.model.datasets.snapshot import IncludedBatch
from tarn.model.ids import now

LAST_FLUSHED = "journal/last_flushed"
LAST_MOVED = "statements/last_updated"

IDS_PER_QUERY = 500
"""Ids in one statement."""


class Segment(NamedTuple):
    """A closed segment that no snapshot holds yet, with the batches committed in it."""

    number: int
    after: int
    """The segment of the head snapshot; segments between the two are empty."""
    batches: tuple[IncludedBatch, ...]
    stage: IncludedBatch | None
    """Set if all batches belong to one stage: a batch with the stage's tenant, message and metadata."""
    size: int = 0
    """Characters of its values."""

    @property
    def rows(self) -> int:
        return sum(batch.rows for batch in self.batches)


def close(connection: Connection, dataset: Dataset) -> None:
    """Close the open segment if it has a committed batch, so that it can be flushed."""
    open_segment = select(journal_head.c.segment).where(journal_head.c.dataset_id == dataset.id).scalar_subquery()
    filled = connection.execute(
        select(journal_batches.c.id).where(*_committed(dataset), journal_batches.c.segment == open_segment).limit(1)
    ).first()
    if filled is not None:
        head.rotate(connection, dataset.id)


def last_closed(connection: Connection, dataset: Dataset) -> int:
    """Return the number of the newest closed segment. Raises DatasetNotFound."""
    number: int | None = connection.execute(
        select(journal_head.c.segment).where(journal_head.c.dataset_id == dataset.id)
    ).scalar()
    if number is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
    return number - 1


def oldest(connection: Connection, dataset: Dataset) -> Segment | None:
    """Return the first closed segment that has rows and is not flushed. Segments are flushed in order."""
    number: int | None = connection.execute(
        select(func.min(journal_batches.c.segment))
        .join(journal_head, journal_head.c.dataset_id == journal_batches.c.dataset_id)
        .join(snapshot_heads, snapshot_heads.c.dataset_id == journal_batches.c.dataset_id)
        .where(
            *_committed(dataset),
            journal_batches.c.segment < journal_head.c.segment,
            journal_batches.c.segment > snapshot_heads.c.segment,
            journal_batches.c.rows > 0,
            ~journal_batches.c.is_stage,
        )
    ).scalar()
    if number is None:
        return None
    after: int = connection.execute(
        select(snapshot_heads.c.segment).where(snapshot_heads.c.dataset_id == dataset.id)
    ).scalar_one()
    stage = aliased(journal_batches, name="stage")
    rows = connection.execute(
        select(journal_batches, stage.c.message.label("stage_message"), stage.c.metadata.label("stage_metadata"))
        .outerjoin(stage, stage.c.id == journal_batches.c.stage)
        .where(
            *_committed(dataset),
            journal_batches.c.segment > after,
            journal_batches.c.segment <= number,
            ~journal_batches.c.is_stage,
        )
        .order_by(journal_batches.c.commit)
    )
    committed = [(row.stage, _included_batch(row), row.size) for row in rows]
    batches = tuple(batch for _, batch, _ in committed)
    is_one_stage = len({stage for stage, _, _ in committed}) == 1 and committed[0][0] is not None
    return Segment(number, after, batches, batches[0] if is_one_stage else None, sum(size for _, _, size in committed))


def mark_done(connection: Connection, dataset: Dataset, segment: int, uids: Sequence[str], moved: bool) -> None:
    """Mark batches as done in the transaction that records their snapshot, and update the system tags.

    `journal/last_flushed` is a moment up to which everything is flushed. If nothing is left, it is now: later commits
    wait for the head's row, which is locked here, so none of them is older. Otherwise it is just before the oldest
    batch that is left.
    """
    # Lock the head's row. A writer that has a commit number and has not committed yet holds it; without waiting for
    # that writer, its batch would be missed below and not count as waiting.
    connection.execute(
        select(journal_head.c.dataset_id).where(journal_head.c.dataset_id == dataset.id).with_for_update()
    )
    moment = now()
    done = {"rows": 0, "size": 0}
    for some in _split_ids(uids):
        updated = connection.execute(
            update(journal_batches)
            .where(*_committed(dataset), journal_batches.c.uid.in_(some))
            .values(state=DONE)
            .returning(journal_batches.c.rows, journal_batches.c.size)
        )
        for row in updated:
            done["rows"] += row.rows
            done["size"] += row.size
    # Stages have no rows of their own: they are done when their batches are.
    connection.execute(
        update(journal_batches)
        .where(*_committed(dataset), journal_batches.c.is_stage, journal_batches.c.segment <= segment)
        .values(state=DONE)
    )
    oldest_left: datetime | None = connection.execute(
        select(func.min(journal_batches.c.created, type_=journal_batches.c.created.type)).where(
            *_committed(dataset), journal_batches.c.rows > 0
        )
    ).scalar()
    connection.execute(
        update(journal_head)
        .where(journal_head.c.dataset_id == dataset.id)
        .values(rows=journal_head.c.rows - done["rows"], size=journal_head.c.size - done["size"], oldest=oldest_left)
    )
    head.touch(
        connection,
        dataset.id,
        LAST_FLUSHED,
        moment if oldest_left is None else min(moment, oldest_left - timedelta(microseconds=1)),
    )
    if moved:
        head.touch(connection, dataset.id, LAST_MOVED, moment)


def purge_done(database: Database, dataset: Dataset | None = None, most: int | None = None) -> None:
    """Delete batches that a snapshot holds, and their rows, in short transactions.

    Covers one dataset or all of them. With `most`, skips batches with more rows and stops after about that many rows.
    Stages are kept until they expire, because clients may still query their state.
    """
    where = [journal_batches.c.state == DONE, ~journal_batches.c.is_stage]
    if dataset is not None:
        where.append(journal_batches.c.dataset_id == dataset.id)
    if most is not None:
        where.append(journal_batches.c.rows <= most)
    purged = 0
    while most is None or purged < most:
        with database.read() as connection:
            done = connection.execute(
                select(journal_batches.c.id, journal_batches.c.rows)
                .where(*where)
                .order_by(journal_batches.c.id)
                .limit(IDS_PER_QUERY)
            ).all()
        if not done:
            return
        for row in done:
            if row.rows > PURGE_ROWS:
                _purge_large(database, row.id)
        for some in _group_by_rows(done):
            with database.write() as connection:
                batch_contents.delete_all(connection, some)
                connection.execute(delete(journal_batches).where(journal_batches.c.id.in_(some)))
        purged += sum(row.rows for row in done)


def _purge_large(database: Database, batch_id: int) -> None:
    is_empty = False
    while not is_empty:
        with database.write() as connection:
            is_empty = not batch_contents.delete_some(connection, batch_id)
            if is_empty:
                connection.execute(delete(journal_batches).where(journal_batches.c.id == batch_id))


def _group_by_rows(done: Iterable[Any]) -> Iterable[list[int]]:
    """Group the ids of small batches so that a group has at most `PURGE_ROWS` rows."""
    some: list[int] = []
    rows = 0
    for row in done:
        if row.rows > PURGE_ROWS:
            continue
        if some and rows + row.rows > PURGE_ROWS:
            yield some
            some, rows = [], 0
        some.append(row.id)
        rows += row.rows
    if some:
        yield some


def _committed(dataset: Dataset) -> tuple[Any, ...]:
    return journal_batches.c.dataset_id == dataset.id, journal_batches.c.state == COMMITTED


def _included_batch(row: Row[Any]) -> IncludedBatch:
    return IncludedBatch(
        id=row.uid,
        tenant=row.tenant,
        commit=row.commit,
        message=row.stage_message if row.message is None else row.message,
        metadata=row.metadata or row.stage_metadata or {},
        entities=row.entities,
        rows=row.rows,
    )


def _split_ids(uids: Sequence[str]) -> Iterable[Sequence[str]]:
    return (uids[start : start + IDS_PER_QUERY] for start in range(0, len(uids), IDS_PER_QUERY))
