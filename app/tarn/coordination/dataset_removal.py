"""Deletion of a dataset's queue items and locks from SQL."""

from sqlalchemy import delete, select

from tarn.datasets.registry import JobHeartbeat
from tarn.db.engine import Database
from tarn.db.tables import locks, queue, queue_heads, queue_leases

DELETE_BATCH = 2000
"""Maximum number of rows that one transaction deletes."""


def remove_queue(database: Database, dataset_id: str, heartbeat: JobHeartbeat) -> None:
    """Delete items and locks of a dataset that is being deleted, in short transactions.

    No items are added concurrently, because adding requires the dataset's row to be active. Idempotent: resumes after
    a crash.
    """
    with database.write() as connection:
        heartbeat(connection, None)
        for table in (locks, queue_heads, queue_leases):
            connection.execute(delete(table).where(table.c.dataset_id == dataset_id))
    has_more = True
    while has_more:
        with database.write() as connection:
            heartbeat(connection, None)
            batch = select(queue.c.id).where(queue.c.dataset_id == dataset_id).limit(DELETE_BATCH)
            ids = connection.execute(batch).scalars().all()
            connection.execute(delete(queue).where(queue.c.id.in_(ids)))
        has_more = len(ids) == DELETE_BATCH
