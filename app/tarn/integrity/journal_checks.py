"""Checks of the journal in one transaction: segments in sequence, correct counts, complete batches, unique commits."""

from typing import Any

from sqlalchemy import Connection, Row, func, select

from tarn.datasets.registry import Dataset
from tarn.db.tables import journal_batches, journal_head
from tarn.integrity.findings import Findings
from tarn.journal import batch_contents
from tarn.journal.batches import COMMITTED
from tarn.journal.packs import DamagedPack
from tarn.model.datasets.finding import FindingKind
from tarn.model.datasets.snapshot import Head

UNFLUSHED = (journal_batches.c.state == COMMITTED, ~journal_batches.c.is_stage)


def check(connection: Connection, dataset: Dataset, head: Head | None, findings: Findings) -> int | None:
    """Add a finding for every problem of the journal. Return the last assigned commit number, or None if unknown."""
    own = journal_batches.c.dataset_id == dataset.id
    row = connection.execute(select(journal_head).where(journal_head.c.dataset_id == dataset.id)).first()
    if row is None:
        findings.add(FindingKind.JOURNAL_MISCOUNTED, "the journal has no head")
        return None
    done = 0 if head is None else head.segment
    if row.segment <= done:
        findings.add(FindingKind.SEGMENT_WRONG, f"segment {row.segment} is open, but segment {done} is in a snapshot")
    newest = connection.execute(select(func.max(journal_batches.c.segment)).where(own, *UNFLUSHED)).scalar()
    if newest is not None and newest > row.segment:
        findings.add(FindingKind.SEGMENT_WRONG, f"segment {row.segment} is open, but a batch is in segment {newest}")
    passed = select(journal_batches).where(own, *UNFLUSHED, journal_batches.c.segment <= done)
    for batch in connection.execute(passed.order_by(journal_batches.c.id)):
        findings.add(
            FindingKind.SEGMENT_PASSED, f"batch {batch.uid} is unflushed in segment {batch.segment}, which is done"
        )
    _check_counts(connection, dataset, row, findings)
    _check_rows(connection, own, findings)
    _check_commits(connection, own, row.commit, findings)
    last: int = row.commit
    return last


def waiting(connection: Connection, dataset: Dataset) -> tuple[int, int, Any]:
    """Count what waits for a flush, from the batches: rows, size, and creation time of the oldest batch with rows."""
    rows, size, oldest = connection.execute(
        select(
            func.coalesce(func.sum(journal_batches.c.rows), 0),
            func.coalesce(func.sum(journal_batches.c.size), 0),
            func.min(journal_batches.c.created, type_=journal_batches.c.created.type).filter(
                journal_batches.c.rows > 0
            ),
        ).where(journal_batches.c.dataset_id == dataset.id, *UNFLUSHED)
    ).one()
    return int(rows), int(size), oldest


def _check_counts(connection: Connection, dataset: Dataset, head: Row[Any], findings: Findings) -> None:
    rows, size, oldest = waiting(connection, dataset)
    if (head.rows, head.size) != (rows, size):
        detail = f"{head.rows} rows of size {head.size} are recorded as waiting instead of {rows} of size {size}"
        findings.add(FindingKind.JOURNAL_MISCOUNTED, detail)
    elif (head.oldest is None) != (oldest is None):
        detail = f"the oldest batch is recorded as waiting since {head.oldest} instead of {oldest}"
        findings.add(FindingKind.JOURNAL_MISCOUNTED, detail)


def _check_rows(connection: Connection, own: Any, findings: Findings) -> None:
    """Check that all rows of committed batches exist and can be read. Rows of done batches may be deleted already."""
    counted = (
        select(journal_batches.c.uid, journal_batches.c.rows, batch_contents.event_count().label("there"))
        .where(own, *UNFLUSHED)
        .order_by(journal_batches.c.id)
    )
    for batch in connection.execute(counted):
        if batch.there != batch.rows:
            detail = f"{batch.there} of the {batch.rows} rows of batch {batch.uid} exist"
            findings.add(FindingKind.JOURNAL_ROWS, detail)
    for _, pack in batch_contents.packs(connection, batch_contents.packs_of(own, *UNFLUSHED)):
        try:
            pack.decode()
        except DamagedPack as error:
            findings.add(FindingKind.JOURNAL_ROWS, str(error))


def _check_commits(connection: Connection, own: Any, last: int, findings: Findings) -> None:
    """Check commit numbers: unique, and none above the last assigned one. A stage repeats that of its last batch."""
    numbered = (own, ~journal_batches.c.is_stage, journal_batches.c.commit.is_not(None))
    twice = (
        select(journal_batches.c.commit)
        .where(*numbered)
        .group_by(journal_batches.c.commit)
        .having(func.count() > 1)
        .order_by(journal_batches.c.commit)
    )
    for (commit,) in connection.execute(twice):
        findings.add(FindingKind.COMMIT_NUMBERS, f"commit number {commit} was assigned twice")
    most = connection.execute(select(func.max(journal_batches.c.commit)).where(*numbered)).scalar()
    if most is not None and most > last:
        findings.add(
            FindingKind.COMMIT_NUMBERS, f"a batch has commit number {most}, but the last assigned one is {last}"
        )
