"""The journal beside a lake of another moment: what is in a snapshot is done, and what no longer is, is not.

Commit numbers and segments only ever rise. So a journal that is older than the lake goes on above what the lake has.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, delete, select, update

from tarn.datasets.registry import Dataset
from tarn.db.tables import idempotency, journal_batches, journal_head, mapping_runs, tags
from tarn.journal import batch_contents as contents
from tarn.journal.batches import COMMITTED, DONE, OPEN, STAGED
from tarn.model.mapping import tag_of
from tarn.model.names import LAKEHOUSE, Checksum
from tarn.model.recovery import Commits, KnownBatch
from tarn.model.snapshot import HeldBatch, Snapshot

AT_ONCE = 500


def last_commit(manifest: Snapshot) -> int:
    """The highest commit number that a snapshot's files speak of, or its batches have."""
    highest = max((batch.commit for batch in manifest.batches), default=0)
    for file in (*manifest.statements.files, *manifest.translog.files):
        bound = file.columns["ord"].max if "ord" in file.columns else None
        if isinstance(bound, int):
            highest = max(highest, bound >> 32)
    return highest


def catch_up(connection: Connection, dataset: Dataset, recorded: Iterable[Snapshot]) -> None:
    """Let the journal go on above snapshots that are about to be recorded.

    A batch that was being sent when the database was saved, and is in one of them, is done.
    """
    commit = segment = 0
    for manifest in recorded:
        commit, segment = max(commit, last_commit(manifest)), max(segment, manifest.segment)
        uids = [batch.id for batch in manifest.batches]
        for start in range(0, len(uids), AT_ONCE):
            own = journal_batches.c.dataset_id == dataset.id, journal_batches.c.uid.in_(uids[start : start + AT_ONCE])
            ended = connection.execute(
                update(journal_batches)
                .where(*own, journal_batches.c.state.in_((OPEN, STAGED)))
                .values(state=DONE, segment=manifest.segment)
                .returning(journal_batches.c.stage)
            )
            stages = {row.stage for row in ended} - {None}
            connection.execute(
                update(journal_batches)
                .where(journal_batches.c.id.in_(stages), journal_batches.c.state == OPEN)
                .values(state=DONE, segment=manifest.segment, commit=max(batch.commit for batch in manifest.batches))
            )
    raise_to(connection, dataset, commit, segment + 1)


def raise_to(connection: Connection, dataset: Dataset, commit: int, segment: int) -> None:
    """Let commit numbers and segments go on from here, if they are below."""
    head = journal_head.c
    own = head.dataset_id == dataset.id
    connection.execute(update(journal_head).where(own, head.commit < commit).values(commit=commit))
    connection.execute(update(journal_head).where(own, head.segment < segment).values(segment=segment))


def skipped_batches(connection: Connection, dataset: Dataset, segment: int) -> list[KnownBatch]:
    """Committed batches in segments that count as done, though no snapshot names them."""
    rows = connection.execute(select(journal_batches).where(*_passed(dataset, segment)).order_by(journal_batches.c.id))
    return [known(row) for row in rows]


def reopen(connection: Connection, dataset: Dataset, segment: int) -> None:
    """Put batches of segments that are done into the open one. Their numbers, and so their places, stay."""
    opened = select(journal_head.c.segment).where(journal_head.c.dataset_id == dataset.id).scalar_subquery()
    connection.execute(update(journal_batches).where(*_passed(dataset, segment)).values(segment=opened))


def unflushed_by_rollback(
    connection: Connection, dataset: Dataset, segment: int
) -> tuple[list[KnownBatch], list[KnownBatch]]:
    """Batches that count as flushed into what came after a segment: those whose rows are all there, and the others."""
    counted = (
        select(journal_batches, contents.counted().label("there"))
        .where(*_done_after(dataset, segment))
        .order_by(journal_batches.c.id)
    )
    whole: list[KnownBatch] = []
    lost: list[KnownBatch] = []
    for row in connection.execute(counted):
        (whole if row.there == row.rows else lost).append(known(row))
    return whole, lost


def roll_back(connection: Connection, dataset: Dataset, again: Sequence[KnownBatch], target: Snapshot | None) -> None:
    """Let what is to be flushed again count as waiting, and forget what was made of data that is gone.

    What was answered under an idempotency key since then may be lost: whoever sends it again must get through. And no
    mapping counts as run.
    """
    uids = [batch.id for batch in again]
    for start in range(0, len(uids), AT_ONCE):
        some = journal_batches.c.uid.in_(uids[start : start + AT_ONCE])
        connection.execute(update(journal_batches).where(some).values(state=COMMITTED))
    since = () if target is None else (idempotency.c.created >= target.created,)
    connection.execute(delete(idempotency).where(*since))
    runs = mapping_runs.c.dataset_id == dataset.id
    hashes = connection.execute(select(mapping_runs.c.content_hash).where(runs)).scalars().all()
    keys = [tag_of(Checksum(one)) for one in hashes]
    own = tags.c.dataset_id == dataset.id, tags.c.tenant == LAKEHOUSE, tags.c.key.in_(keys)
    connection.execute(delete(tags).where(*own))
    connection.execute(delete(mapping_runs).where(runs))


def lost_commits(connection: Connection, dataset: Dataset, above: int, again: Sequence[KnownBatch]) -> list[Commits]:
    """The numbers that were given out above one, and whose batches are neither waiting nor to be flushed again."""
    last = connection.execute(select(journal_head.c.commit).where(journal_head.c.dataset_id == dataset.id)).scalar()
    waiting = connection.execute(
        select(journal_batches.c.commit).where(
            journal_batches.c.dataset_id == dataset.id,
            journal_batches.c.state == COMMITTED,
            ~journal_batches.c.is_stage,
            journal_batches.c.commit > above,
        )
    ).scalars()
    there = sorted({*waiting, *(batch.commit for batch in again if batch.commit is not None)})
    lost: list[Commits] = []
    first = above + 1
    for number in [*there, (last or 0) + 1]:
        if number > first:
            lost.append(Commits(first=first, last=number - 1))
        first = number + 1
    return lost


def unknown(connection: Connection, dataset: Dataset, held: Sequence[HeldBatch]) -> list[KnownBatch]:
    """Those of a snapshot's batches that the journal does not have."""
    uids = [batch.id for batch in held]
    there: set[str] = set()
    for start in range(0, len(uids), AT_ONCE):
        own = journal_batches.c.dataset_id == dataset.id, journal_batches.c.uid.in_(uids[start : start + AT_ONCE])
        there |= set(connection.execute(select(journal_batches.c.uid).where(*own)).scalars())
    return [
        KnownBatch(
            id=batch.id,
            tenant=batch.tenant,
            origin=None,
            commit=batch.commit,
            entities=batch.entities,
            rows=batch.rows,
            message=batch.message,
        )
        for batch in held
        if batch.id not in there
    ]


def waiting_batches(connection: Connection, dataset_id: str) -> list[KnownBatch]:
    """What is committed and not flushed."""
    own = journal_batches.c.dataset_id == dataset_id, journal_batches.c.state == COMMITTED, ~journal_batches.c.is_stage
    return [
        known(row) for row in connection.execute(select(journal_batches).where(*own).order_by(journal_batches.c.id))
    ]


def known(row: Row[Any]) -> KnownBatch:
    return KnownBatch(
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
