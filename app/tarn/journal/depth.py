"""How much waits in the journal."""

from sqlalchemy import Connection, func, select

from tarn.datasets.registry import Dataset
from tarn.db.tables import journal_batches, journal_head
from tarn.errors import DatasetNotFound
from tarn.journal.batches import COMMITTED
from tarn.model.journal import Depth, SegmentDepth


def depth(connection: Connection, dataset: Dataset) -> Depth:
    """What is committed and in no snapshot yet, by segment. Raises DatasetNotFound."""
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
