"""What SQL holds of a dataset's files, removed with it."""

from collections import Counter

from sqlalchemy import delete, select, tuple_

from tarn.access import limits
from tarn.archive import uploads
from tarn.datasets.registry import Hold
from tarn.db.engine import Database
from tarn.db.tables import file_puts, file_texts, files
from tarn.db.tables import uploads as uploads_table

AT_ONCE = 2000
"""Rows that one transaction deletes at most."""


def remove_files(database: Database, dataset_id: str, hold: Hold) -> None:
    """Delete what is known of a dataset's files and uploads, in short transactions, and give back their quota.

    The dataset is being deleted, so that nothing is added. Run again after a crash it goes on where it was.
    """
    for table, size, key in (
        (file_puts, file_puts.c.reserved, [file_puts.c.id]),
        (files, files.c.size, [files.c.id]),
        (file_texts, file_texts.c.size, [file_texts.c.checksum, file_texts.c.origin]),
    ):
        left = True
        while left:
            with database.write() as connection:
                hold(connection, None)
                own = select(table.c.tenant, size, *key).where(table.c.dataset_id == dataset_id).limit(AT_ONCE)
                found = connection.execute(own).all()
                used: Counter[str] = Counter()
                for row in found:
                    used[row.tenant] += row[1]
                for tenant, given_back in sorted(used.items()):
                    limits.release(connection, tenant, size=given_back)
                same = table.c.dataset_id == dataset_id, tuple_(*key).in_([tuple(row[2:]) for row in found])
                connection.execute(delete(table).where(*same))
            left = len(found) == AT_ONCE
    with database.write() as connection:
        hold(connection, None)
        own_uploads = select(uploads_table.c.id).where(uploads_table.c.dataset_id == dataset_id)
        uploads.forget(connection, list(connection.execute(own_uploads).scalars()))
