"""Sweep of expired journal state: stalled uploads, abandoned stages and old idempotency keys."""

from datetime import datetime, timedelta

import structlog
from sqlalchemy import Connection, delete, select
from sqlalchemy.orm import aliased

from tarn.db import idempotency
from tarn.db.engine import Database
from tarn.db.tables import journal_batches
from tarn.journal import batches
from tarn.journal.batches import ABORTED, DONE, OPEN
from tarn.model.ids import now
from tarn.settings import Settings

log = structlog.get_logger(__name__)


def _delete_flushed_stages(connection: Connection, cutoff: datetime) -> None:
    """Delete stages that are flushed and expired before `cutoff`; until then clients may query their state."""
    sent = aliased(journal_batches)
    connection.execute(
        delete(journal_batches).where(
            journal_batches.c.state == DONE,
            journal_batches.c.is_stage,
            journal_batches.c.expires < cutoff,
            ~select(sent.c.id).where(sent.c.stage == journal_batches.c.id).exists(),
        )
    )


def sweep(database: Database, settings: Settings) -> int:
    """Abort expired batches and stages and delete aborted ones. Return the number of deleted batches.

    Every chunk that arrives renews its batch. Aborting is conditional on the batch being open and expired, and
    committing on its being open, so a slow upload is never partly deleted.
    """
    moment = now()
    with database.write() as connection:
        expired = (journal_batches.c.state == OPEN, journal_batches.c.expires < moment)
        aborted = batches.mark_aborted(connection, *expired)
        batches.mark_aborted(connection, journal_batches.c.stage.in_(aborted))
        idempotency.expire(connection, timedelta(hours=settings.idempotency_hours))
        _delete_flushed_stages(connection, moment - timedelta(seconds=settings.stage_expiry))
    with database.read() as connection:
        children_first = journal_batches.c.is_stage, journal_batches.c.id
        cutoff = moment - timedelta(seconds=settings.stage_expiry)
        deletable = connection.execute(
            select(journal_batches.c.id)
            .where(
                journal_batches.c.state == ABORTED,
                ~journal_batches.c.is_stage | (journal_batches.c.expires < cutoff),
            )
            .order_by(*children_first)
        ).scalars()
        batch_ids = list(deletable)
    for batch_id in batch_ids:
        batches.purge(database, batch_id)
    if batch_ids:
        log.info("expired batches deleted", batches=len(batch_ids))
    return len(batch_ids)
