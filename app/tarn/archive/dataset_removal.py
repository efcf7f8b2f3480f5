"""Deletion of the SQL rows of a dataset's files, texts, reservations and uploads, when the dataset is deleted."""

from collections import Counter

from sqlalchemy import delete, select, tuple_

from tarn.access import limits
from tarn.archive import uploads
from tarn.datasets.registry import JobHeartbeat
from tarn.db.engine import Database
from tarn.db.tables import file_puts, file_texts, files
from tarn.db.tables import uploads as uploads_table

AT_ONCE = 2000
"""Most rows that one transaction deletes."""


def remove_files(database: Database, dataset_id: str, hold: JobHeartbeat) -> None:
    """Delete the rows of a dataset's files and uploads in short transactions, and release their quota.

    The dataset is being deleted, so nothing is added. Safe to repeat after a crash.
    """
    for table, size, key in (
        (file_puts, file_puts.c.reserved, [file_puts.c.id]),
        (files, files.c.size, [files.c.id]),
        (file_texts, file_texts.c.size, [file_texts.c.checksum, file_texts.c.origin]),
    ):
        has_more = True
        while has_more:
            with database.write() as connection:
                hold(connection, None)
                own = select(table.c.tenant, size, *key).where(table.c.dataset_id == dataset_id).limit(AT_ONCE)
                rows = connection.execute(own).all()
                used: Counter[str] = Counter()
                for row in rows:
                    used[row.tenant] += row[1]
                for tenant, released in sorted(used.items()):
                    limits.release(connection, tenant, size=released)
                conditions = table.c.dataset_id == dataset_id, tuple_(*key).in_([tuple(row[2:]) for row in rows])
                connection.execute(delete(table).where(*conditions))
            has_more = len(rows) == AT_ONCE
    with database.write() as connection:
        hold(connection, None)
        own_uploads = select(uploads_table.c.id).where(uploads_table.c.dataset_id == dataset_id)
        uploads.forget(connection, list(connection.execute(own_uploads).scalars()))
