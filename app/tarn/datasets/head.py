"""The head of a dataset as SQL records it: the newest snapshot that readers see."""

from sqlalchemy import Connection, select

from tarn.datasets.registry import ACTIVE, Dataset
from tarn.db.tables import datasets, snapshot_heads
from tarn.errors import DatasetNotFound
from tarn.model.datasets.snapshot import Head


def recorded_head(connection: Connection, dataset: Dataset) -> Head:
    """Return the recorded head. Raises DatasetNotFound, also for a dataset that is being deleted."""
    row = connection.execute(
        select(snapshot_heads)
        .join(datasets, datasets.c.id == snapshot_heads.c.dataset_id)
        .where(snapshot_heads.c.dataset_id == dataset.id, datasets.c.state == ACTIVE)
    ).first()
    if row is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
    return Head(seq=row.seq, id=row.snapshot, content=row.content, segment=row.segment)
