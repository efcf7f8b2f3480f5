"""Deletion of a dataset's journal and related SQL rows."""

from sqlalchemy import Connection, delete, select, update

from tarn.datasets.registry import JobHeartbeat
from tarn.db.engine import Database
from tarn.db.tables import (
    export_leases,
    exports,
    journal_batches,
    journal_head,
    journal_rejected,
    leases,
    mapping_runs,
    refs,
    snapshots,
    tags,
)
from tarn.journal import batch_contents, batches
from tarn.journal.batch_contents import PURGE_ROWS
from tarn.journal.batches import ABORTED

BATCHES_PER_TRANSACTION = 500
"""Maximum batches deleted in one transaction."""


def remove_journal(database: Database, dataset_id: str, hold: JobHeartbeat) -> None:
    """Delete head, tags, batches and rows of a dataset that is being deleted, in short transactions.

    The head is deleted first: no batch can be opened or committed without it, and one opened just before expires and
    is swept. The quota of batches that never committed is released. Idempotent: resumes after a crash.
    """
    with database.write() as connection:
        hold(connection, None)
        connection.execute(delete(journal_head).where(journal_head.c.dataset_id == dataset_id))
        # Not `snapshot_heads`: a later dataset of the same name continues its sequence numbers.
        for table in (tags, leases, refs, snapshots, journal_rejected, exports, export_leases, mapping_runs):
            connection.execute(delete(table).where(table.c.dataset_id == dataset_id))
        batches.mark_aborted(connection, journal_batches.c.dataset_id == dataset_id)
    has_more = True
    while has_more:
        with database.write() as connection:
            hold(connection, None)
            has_more, large = _remove_some(connection, dataset_id)
        if large is not None:
            batches.purge(database, large)


def _remove_some(connection: Connection, dataset_id: str) -> tuple[bool, int | None]:
    """Delete the next few batches. Return whether there were any, and the id of the first if it is too large for one
    transaction."""
    next_batches = connection.execute(
        select(journal_batches.c.id, journal_batches.c.rows)
        .where(journal_batches.c.dataset_id == dataset_id)
        .order_by(journal_batches.c.is_stage, journal_batches.c.id)  # batches of a stage before the stage
        .limit(BATCHES_PER_TRANSACTION)
    ).all()
    if next_batches and next_batches[0].rows > PURGE_ROWS:
        connection.execute(
            update(journal_batches).where(journal_batches.c.id == next_batches[0].id).values(state=ABORTED)
        )
        return True, next_batches[0].id
    ids: list[int] = []
    rows = 0
    for batch in next_batches:
        rows += batch.rows
        if rows > PURGE_ROWS:
            break
        ids.append(batch.id)
    batch_contents.delete_all(connection, ids)
    connection.execute(delete(journal_batches).where(journal_batches.c.id.in_(ids)))
    return bool(next_batches), None
