"""What SQL holds of a dataset's queue and locks, removed with it."""

from sqlalchemy import delete, select

from tarn.datasets.registry import Hold
from tarn.db.engine import Database
from tarn.db.tables import locks, queue, queue_heads, queue_leases

AT_ONCE = 2000
"""Rows that one transaction deletes at most."""


def remove_queue(database: Database, dataset_id: str, hold: Hold) -> None:
    """Delete items and locks of a dataset that is being deleted, in short transactions.

    Nothing is added any more: whoever does holds the dataset's row, and found it active. Run again after a crash it
    goes on where it was.
    """
    with database.write() as connection:
        hold(connection, None)
        for table in (locks, queue_heads, queue_leases):
            connection.execute(delete(table).where(table.c.dataset_id == dataset_id))
    left = True
    while left:
        with database.write() as connection:
            hold(connection, None)
            some = select(queue.c.id).where(queue.c.dataset_id == dataset_id).limit(AT_ONCE)
            found = connection.execute(some).scalars().all()
            connection.execute(delete(queue).where(queue.c.id.in_(found)))
        left = len(found) == AT_ONCE
