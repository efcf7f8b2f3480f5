"""Journal depth: batches and rows of a dataset that wait to be flushed, and the positions of commits."""

from sqlalchemy import Connection, func, select

from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import journal_batches, journal_head
from tarn.errors import DatasetNotFound
from tarn.journal.batches import COMMITTED, segment_of
from tarn.journal.overlay import present
from tarn.model.datasets.journal import Depth, SegmentDepth


class JournalService:
    """Reads the depth of journals and the positions of commits."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def depth(self, dataset: Dataset) -> Depth:
        """Return what is committed and in no snapshot yet, by segment. Raises DatasetNotFound."""
        with self._database.read() as connection:
            return depth(connection, dataset)

    def last_commit(self, dataset: Dataset) -> int | None:
        """Return the last commit number, or None if no row waits to be flushed."""
        with self._database.read() as connection:
            state = present(connection, dataset)
        return state.commit if state.waiting else None

    def segment_of(self, dataset: Dataset, commit: int) -> int | None:
        """Return the segment of a commit, or None if its batch is no longer recorded."""
        with self._database.read() as connection:
            return segment_of(connection, dataset, commit)


def depth(connection: Connection, dataset: Dataset) -> Depth:
    """Return what is committed and in no snapshot yet, by segment. Raises DatasetNotFound."""
    head = connection.execute(select(journal_head).where(journal_head.c.dataset_id == dataset.id)).first()
    if head is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
    rows = connection.execute(
        select(
            journal_batches.c.segment,
            func.count().label("batches"),
            func.sum(journal_batches.c.rows).label("rows"),
        )
        .where(
            journal_batches.c.dataset_id == dataset.id,
            journal_batches.c.state == COMMITTED,
            ~journal_batches.c.is_stage,
        )
        .group_by(journal_batches.c.segment)
    )
    waiting = {row.segment: (row.batches, int(row.rows)) for row in rows}
    return Depth(
        segment=head.segment,
        commit=head.commit,
        rows=head.rows,
        oldest=head.oldest,
        segments=[
            SegmentDepth(
                segment=segment, batches=batches, rows=count, state="open" if segment == head.segment else "closed"
            )
            for segment, (batches, count) in sorted({head.segment: (0, 0), **waiting}.items())
        ],
    )
