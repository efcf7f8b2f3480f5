"""What was left behind: uploads that stand still, stages left alone, answers too old to be asked for again."""

from datetime import datetime, timedelta

import structlog
from sqlalchemy import Connection, delete, select
from sqlalchemy.orm import aliased

from tarn.db.engine import Database
from tarn.db.tables import idempotency, journal_batches
from tarn.journal import batches
from tarn.journal.batches import ABORTED, DONE, OPEN
from tarn.model.ids import now
from tarn.settings import Settings

log = structlog.get_logger(__name__)


def _forget_stages(connection: Connection, settled: datetime) -> None:
    """Delete stages whose rows are in a snapshot, once nobody is likely to ask for them any more."""
    sent = aliased(journal_batches)
    connection.execute(
        delete(journal_batches).where(
            journal_batches.c.state == DONE,
            journal_batches.c.is_stage,
            journal_batches.c.expires < settled,
            ~select(sent.c.id).where(sent.c.stage == journal_batches.c.id).exists(),
        )
    )


def sweep(database: Database, settings: Settings) -> int:
    """Abort what has expired and delete what was aborted. Returns how many batches went.

    Aborting is conditional on the batch being open and expired at that moment, as every chunk that arrives renews it,
    and committing is conditional on its being open: a slow upload is never half swept.
    """
    moment = now()
    with database.write() as connection:
        expired = (journal_batches.c.state == OPEN, journal_batches.c.expires < moment)
        ended = batches.mark_aborted(connection, *expired)
        batches.mark_aborted(connection, journal_batches.c.stage.in_(ended))
        old = moment - timedelta(hours=settings.idempotency_hours)
        connection.execute(delete(idempotency).where(idempotency.c.created < old))
        _forget_stages(connection, moment - timedelta(seconds=settings.stage_expiry))
    with database.read() as connection:
        children_first = journal_batches.c.is_stage, journal_batches.c.id
        settled = moment - timedelta(seconds=settings.stage_expiry)
        left = connection.execute(
            select(journal_batches.c.id)
            .where(
                journal_batches.c.state == ABORTED,
                ~journal_batches.c.is_stage | (journal_batches.c.expires < settled),
            )
            .order_by(*children_first)
        ).scalars()
        gone = list(left)
    for batch_id in gone:
        batches.purge(database, batch_id)
    if gone:
        log.info("batches swept", batches=len(gone))
    return len(gone)
