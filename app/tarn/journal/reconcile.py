"""Reconcile the journal with a lake of another point in time, after a restore of the database or of the lake.

Batches in a snapshot are marked as done; batches whose snapshot is gone are marked as committed again. Commit numbers
and segments only increase, so a journal that is older than the lake continues above the numbers that the lake has.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, delete, select, update

from tarn.datasets.registry import Dataset
from tarn.db import idempotency
from tarn.db.tables import journal_batches, journal_head, mapping_runs, tags
from tarn.journal import batch_contents
from tarn.journal.batches import COMMITTED, DONE, OPEN, STAGED
from tarn.model.datasets.recovery import Commits, RecordedBatch
from tarn.model.datasets.snapshot import IncludedBatch, Snapshot
from tarn.model.ftm.mapping import tag_of
from tarn.model.names import LAKEHOUSE, Checksum

IDS_PER_QUERY = 500


def last_commit(manifest: Snapshot) -> int:
    """Return the highest commit number in a snapshot's files (by their `ord` statistics) and batches."""
    highest = max((batch.commit for batch in manifest.batches), default=0)
    for file in (*manifest.statements.files, *manifest.translog.files):
        bound = file.columns["ord"].max if "ord" in file.columns else None
        if isinstance(bound, int):
            highest = max(highest, bound >> 32)
    return highest


def catch_up(connection: Connection, dataset: Dataset, recorded: Iterable[Snapshot]) -> None:
    """Raise the journal's numbers above snapshots that are about to be recorded.

    Also marks batches as done that were open or staged when the database was backed up, and are in one of them.
    """
    commit = segment = 0
    for manifest in recorded:
        commit, segment = max(commit, last_commit(manifest)), max(segment, manifest.segment)
        uids = [batch.id for batch in manifest.batches]
        for start in range(0, len(uids), IDS_PER_QUERY):
            some = uids[start : start + IDS_PER_QUERY]
            own = journal_batches.c.dataset_id == dataset.id, journal_batches.c.uid.in_(some)
            updated = connection.execute(
                update(journal_batches)
                .where(*own, journal_batches.c.state.in_((OPEN, STAGED)))
                .values(state=DONE, segment=manifest.segment)
                .returning(journal_batches.c.stage)
            )
            stages = {row.stage for row in updated} - {None}
            connection.execute(
                update(journal_batches)
                .where(journal_batches.c.id.in_(stages), journal_batches.c.state == OPEN)
                .values(state=DONE, segment=manifest.segment, commit=max(batch.commit for batch in manifest.batches))
            )
    raise_to(connection, dataset, commit, segment + 1)


def raise_to(connection: Connection, dataset: Dataset, commit: int, segment: int) -> None:
    """Raise the journal's commit number and open segment to at least these."""
    head = journal_head.c
    own = head.dataset_id == dataset.id
    connection.execute(update(journal_head).where(own, head.commit < commit).values(commit=commit))
    connection.execute(update(journal_head).where(own, head.segment < segment).values(segment=segment))


def skipped_batches(connection: Connection, dataset: Dataset, segment: int) -> list[RecordedBatch]:
    """Return committed batches in segments up to this one, which count as flushed though no snapshot has them."""
    rows = connection.execute(select(journal_batches).where(*_passed(dataset, segment)).order_by(journal_batches.c.id))
    return [known(row) for row in rows]


def reopen(connection: Connection, dataset: Dataset, segment: int) -> None:
    """Move committed batches of flushed segments to the open segment. They keep their commit numbers and order."""
    opened = select(journal_head.c.segment).where(journal_head.c.dataset_id == dataset.id).scalar_subquery()
    connection.execute(update(journal_batches).where(*_passed(dataset, segment)).values(segment=opened))


def unflushed_by_rollback(
    connection: Connection, dataset: Dataset, segment: int
) -> tuple[list[RecordedBatch], list[RecordedBatch]]:
    """Return batches marked as done in later segments: those whose rows are still in the journal, and the lost ones."""
    counted = (
        select(journal_batches, batch_contents.event_count().label("present"))
        .where(*_done_after(dataset, segment))
        .order_by(journal_batches.c.id)
    )
    complete: list[RecordedBatch] = []
    lost_batches: list[RecordedBatch] = []
    for row in connection.execute(counted):
        (complete if row.present == row.rows else lost_batches).append(known(row))
    return complete, lost_batches


def roll_back(
    connection: Connection, dataset: Dataset, again: Sequence[RecordedBatch], target: Snapshot | None
) -> None:
    """Mark batches as committed so that they are flushed again, and delete records derived from lost data.

    Deletes idempotency keys created since the target snapshot, because the writes that they confirm may be lost and a
    client that retries must be able to write. Deletes all mapping runs and their tags, so that mappings run again.
    """
    uids = [batch.id for batch in again]
    for start in range(0, len(uids), IDS_PER_QUERY):
        some = journal_batches.c.uid.in_(uids[start : start + IDS_PER_QUERY])
        connection.execute(update(journal_batches).where(some).values(state=COMMITTED))
    idempotency.forget_since(connection, None if target is None else target.created)
    runs = mapping_runs.c.dataset_id == dataset.id
    hashes = connection.execute(select(mapping_runs.c.content_hash).where(runs)).scalars().all()
    keys = [tag_of(Checksum(content_hash)) for content_hash in hashes]
    own = tags.c.dataset_id == dataset.id, tags.c.tenant == LAKEHOUSE, tags.c.key.in_(keys)
    connection.execute(delete(tags).where(*own))
    connection.execute(delete(mapping_runs).where(runs))


def lost_commits(connection: Connection, dataset: Dataset, above: int, again: Sequence[RecordedBatch]) -> list[Commits]:
    """Return the ranges of commit numbers above `above` whose batches are neither waiting nor in `again`."""
    last = connection.execute(select(journal_head.c.commit).where(journal_head.c.dataset_id == dataset.id)).scalar()
    waiting = connection.execute(
        select(journal_batches.c.commit).where(
            journal_batches.c.dataset_id == dataset.id,
            journal_batches.c.state == COMMITTED,
            ~journal_batches.c.is_stage,
            journal_batches.c.commit > above,
        )
    ).scalars()
    present = sorted({*waiting, *(batch.commit for batch in again if batch.commit is not None)})
    lost: list[Commits] = []
    first = above + 1
    for number in [*present, (last or 0) + 1]:
        if number > first:
            lost.append(Commits(first=first, last=number - 1))
        first = number + 1
    return lost


def unknown(connection: Connection, dataset: Dataset, batches_included: Sequence[IncludedBatch]) -> list[RecordedBatch]:
    """Return those of a snapshot's batches that are not in the journal."""
    uids = [batch.id for batch in batches_included]
    present: set[str] = set()
    for start in range(0, len(uids), IDS_PER_QUERY):
        own = journal_batches.c.dataset_id == dataset.id, journal_batches.c.uid.in_(uids[start : start + IDS_PER_QUERY])
        present |= set(connection.execute(select(journal_batches.c.uid).where(*own)).scalars())
    return [
        RecordedBatch(
            id=batch.id,
            tenant=batch.tenant,
            origin=None,
            commit=batch.commit,
            entities=batch.entities,
            rows=batch.rows,
            message=batch.message,
        )
        for batch in batches_included
        if batch.id not in present
    ]


def waiting_batches(connection: Connection, dataset_id: str) -> list[RecordedBatch]:
    """Return the batches of a dataset that are committed and not flushed."""
    own = journal_batches.c.dataset_id == dataset_id, journal_batches.c.state == COMMITTED, ~journal_batches.c.is_stage
    return [
        known(row) for row in connection.execute(select(journal_batches).where(*own).order_by(journal_batches.c.id))
    ]


def known(row: Row[Any]) -> RecordedBatch:
    return RecordedBatch(
        id=row.uid,
        tenant=row.tenant,
        origin=row.origin,
        commit=row.commit,
        entities=row.entities,
        rows=row.rows,
        message=row.message,
    )


def _passed(dataset: Dataset, segment: int) -> tuple[Any, ...]:
    of = journal_batches.c
    return of.dataset_id == dataset.id, of.state == COMMITTED, ~of.is_stage, of.segment <= segment


def _done_after(dataset: Dataset, segment: int) -> tuple[Any, ...]:
    of = journal_batches.c
    return of.dataset_id == dataset.id, of.state == DONE, ~of.is_stage, of.segment > segment
