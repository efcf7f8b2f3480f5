"""The head of a dataset's journal: one row that gives out commit numbers and says which segment is open.

A batch takes its number by updating that row in the transaction that makes it visible. So numbers rise in the order in
which batches become visible, and a batch is in the segment that was open then: rotation updates the same row.
"""

from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import Connection, exists, func, select, update

from app.db.tables import datasets, journal_head, tags
from app.db.upsert import upsert
from app.errors import Backpressure, DatasetNotFound
from app.lake.datasets import ACTIVE, Dataset
from app.model.ids import now
from app.model.names import LAKEHOUSE
from app.settings import Settings

LAST_UPDATED = "journal/last_updated"
RETRY_SECONDS = 10


class Taken(NamedTuple):
    """Commit numbers from `first` on, and the segment they are in."""

    first: int
    segment: int


def take(connection: Connection, dataset: Dataset, batches: int, rows: int, moment: datetime) -> Taken:
    """Take the next commit numbers, as the last but the stamping in the transaction that uses them.

    Moves `journal/last_updated` in the same transaction. Raises DatasetNotFound if the dataset is being deleted.
    """
    active = exists().where(datasets.c.id == dataset.id, datasets.c.state == ACTIVE)
    row = connection.execute(
        update(journal_head)
        .where(journal_head.c.dataset_id == dataset.id, active)
        .values(
            commit=journal_head.c.commit + batches,
            rows=journal_head.c.rows + rows,
            oldest=func.coalesce(journal_head.c.oldest, moment),
        )
        .returning(journal_head.c.commit, journal_head.c.segment)
    ).first()
    if row is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
    touch(connection, dataset.id, LAST_UPDATED, moment)
    return Taken(row.commit - batches + 1, row.segment)


def rotate(connection: Connection, dataset_id: str) -> int:
    """Close the open segment and return its number; what commits from now on is in the next one."""
    opened: int = connection.execute(
        update(journal_head)
        .where(journal_head.c.dataset_id == dataset_id)
        .values(segment=journal_head.c.segment + 1)
        .returning(journal_head.c.segment)
    ).scalar_one()
    return opened - 1


def check_pressure(connection: Connection, dataset: Dataset, settings: Settings) -> None:
    """Raise Backpressure if more waits to be flushed, or has waited longer, than is healthy."""
    head = connection.execute(select(journal_head).where(journal_head.c.dataset_id == dataset.id)).first()
    if head is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
    oldest = now() - timedelta(seconds=settings.journal_max_age)
    if head.rows >= settings.journal_max_rows or (head.oldest is not None and head.oldest < oldest):
        raise Backpressure(
            f"{head.rows} statements of {dataset.name!r} wait to be flushed, the oldest since {head.oldest}",
            retry_after=RETRY_SECONDS,
        )


def touch(connection: Connection, dataset_id: str, key: str, moment: datetime) -> None:
    """Move one of the core's own tags; it never goes back."""
    values = {"dataset_id": dataset_id, "tenant": LAKEHOUSE, "key": key, "at": moment}
    statement = upsert(connection, tags).values(**values)
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["dataset_id", "tenant", "key"],
            set_={"at": statement.excluded.at},
            where=tags.c.at < statement.excluded.at,
        )
    )
