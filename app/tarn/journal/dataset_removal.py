"""What the journal holds of a dataset, removed with it."""

from sqlalchemy import Connection, delete, select, update

from tarn.datasets.registry import Hold
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
from tarn.journal import batch_contents as contents
from tarn.journal import batches
from tarn.journal.batch_contents import PURGE_ROWS
from tarn.journal.batches import ABORTED

AT_ONCE = 500
"""Batches that one transaction deletes at most."""


def remove_journal(database: Database, dataset_id: str, hold: Hold) -> None:
    """Delete head, tags, batches and rows of a dataset that is being deleted, in short transactions.

    The head goes first: nothing can be begun or committed without it, and what was begun a moment before expires and
    is swept. Quota of what was never committed is given back. Run again after a crash it goes on where it was.
    """
    with database.write() as connection:
        hold(connection, None)
        connection.execute(delete(journal_head).where(journal_head.c.dataset_id == dataset_id))
        # Not the recorded head: its number goes on.
        for table in (tags, leases, refs, snapshots, journal_rejected, exports, export_leases, mapping_runs):
            connection.execute(delete(table).where(table.c.dataset_id == dataset_id))
        batches.mark_aborted(connection, journal_batches.c.dataset_id == dataset_id)
    left = True
    while left:
        with database.write() as connection:
            hold(connection, None)
            left, large = _remove_some(connection, dataset_id)
        if large is not None:
            batches.purge(database, large)


def _remove_some(connection: Connection, dataset_id: str) -> tuple[bool, int | None]:
    """Delete the next few batches. Returns whether there were any, and the first if it is too large to go at once."""
    found = connection.execute(
        select(journal_batches.c.id, journal_batches.c.rows)
        .where(journal_batches.c.dataset_id == dataset_id)
        .order_by(journal_batches.c.is_stage, journal_batches.c.id)  # a stage outlives what was sent to it
        .limit(AT_ONCE)
    ).all()
    if found and found[0].rows > PURGE_ROWS:
        connection.execute(update(journal_batches).where(journal_batches.c.id == found[0].id).values(state=ABORTED))
        return True, found[0].id
    ids: list[int] = []
    rows = 0
    for batch in found:
        rows += batch.rows
        if rows > PURGE_ROWS:
            break
        ids.append(batch.id)
    contents.delete_all(connection, ids)
    connection.execute(delete(journal_batches).where(journal_batches.c.id.in_(ids)))
    return bool(found), None
