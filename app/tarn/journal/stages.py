"""Stages: many requests, one commit."""

from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from tarn.access.audit import AuditedAction
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import journal_batches, journal_head
from tarn.db.tables import snapshots as history
from tarn.errors import PreconditionFailed, StageClosed, StageNotFound
from tarn.journal import batches
from tarn.journal import head as heads
from tarn.journal.batches import ABORTED, COMMITTED, DONE, OPEN, STAGED
from tarn.lake import snapshots
from tarn.model.ids import new_id, now
from tarn.model.stage import NewStage, Stage, StageState
from tarn.settings import Settings

STATES = {
    OPEN: StageState.OPEN,
    COMMITTED: StageState.COMMITTED,
    DONE: StageState.COMMITTED,
    ABORTED: StageState.ABORTED,
}


def create(connection: Connection, settings: Settings, dataset: Dataset, tenant: str, new: NewStage) -> Stage:
    moment = now()
    uid = new_id()
    heads.check_pressure(connection, dataset, settings)
    connection.execute(
        insert(journal_batches).values(
            uid=uid,
            dataset_id=dataset.id,
            tenant=tenant,
            origin=new.origin,
            state=OPEN,
            is_stage=True,
            entities=0,
            rows=0,
            size=0,
            reserved=0,
            message=new.message,
            metadata=new.metadata or {},
            created=moment,
            expires=moment + timedelta(seconds=settings.stage_expiry),
        )
    )
    return get(connection, dataset, tenant, uid)


def get(connection: Connection, dataset: Dataset, tenant: str, uid: str) -> Stage:
    """A stage of this tenant. Raises StageNotFound."""
    row = find(connection, dataset, tenant, uid)
    return _stage(row, *_sums(connection, row))


def find(connection: Connection, dataset: Dataset, tenant: str, uid: str) -> Row[Any]:
    row = connection.execute(_stages(dataset, tenant).where(journal_batches.c.uid == uid)).first()
    if row is None:
        raise StageNotFound(f"there is no stage {uid!r}")
    return row


def page(connection: Connection, dataset: Dataset, tenant: str, after: str | None, limit: int) -> list[Stage]:
    """Stages of this tenant that have not been swept, oldest first."""
    query = _stages(dataset, tenant).order_by(journal_batches.c.uid).limit(limit)
    if after is not None:
        query = query.where(journal_batches.c.uid > after)
    return [_stage(row, *_sums(connection, row)) for row in connection.execute(query).all()]


def commit(
    connection: Connection,
    dataset: Dataset,
    tenant: str,
    uids: list[str],
    act: AuditedAction,
    note: NewStage | None = None,
    expected: str | None = None,
) -> tuple[int, int, int]:
    """Make what was sent to these stages visible, all in one transaction: the last commit number, entities, rows.

    With an expected snapshot (`If-Match`) they are a segment of their own, and so a snapshot of their own, or nothing
    happens. A request that is still being sent to one of them is not part of it, and fails. Raises StageNotFound,
    StageClosed, PreconditionFailed.
    """
    if expected is not None:
        _require_unmoved(connection, dataset, expected)
    found = [find(connection, dataset, tenant, uid) for uid in uids]
    stage_ids = [row.id for row in found]
    closed = connection.execute(
        update(journal_batches)
        .where(journal_batches.c.id.in_(stage_ids), journal_batches.c.state == OPEN)
        .values(state=COMMITTED)
    )
    if closed.rowcount != len(stage_ids):
        raise StageClosed("the stage is committed, aborted or expired")
    parts = connection.execute(
        select(journal_batches.c.id, journal_batches.c.rows, journal_batches.c.size, journal_batches.c.entities)
        .where(journal_batches.c.stage.in_(stage_ids), journal_batches.c.state == STAGED)
        .order_by(journal_batches.c.id)
    ).all()
    rows, entities = sum(part.rows for part in parts), sum(part.entities for part in parts)
    more = heads.AddedSize(rows, sum(part.size for part in parts))
    taken = heads.take(connection, dataset, max(1, len(parts)), more, now())
    for place, part in enumerate(parts):
        connection.execute(
            update(journal_batches)
            .where(journal_batches.c.id == part.id)
            .values(state=COMMITTED, commit=taken.first + place, segment=taken.segment)
        )
    last = taken.first + max(1, len(parts)) - 1
    # What was sent to it is deleted once it is flushed; what it came to stays known.
    stamped: dict[str, Any] = {"commit": last, "segment": taken.segment}
    for row in found:
        sums = _sums(connection, row)
        connection.execute(
            update(journal_batches).where(journal_batches.c.id == row.id).values(entities=sums[0], rows=sums[1])
        )
    if note is not None:
        stamped |= {"message": note.message, "metadata": note.metadata or {}}
    connection.execute(update(journal_batches).where(journal_batches.c.id.in_(stage_ids)).values(**stamped))
    if expected is not None:
        heads.rotate(connection, dataset.id)
    act.done(connection, stages=uids, rows=rows)
    return last, entities, rows


def _require_unmoved(connection: Connection, dataset: Dataset, expected: str) -> None:
    """Raise PreconditionFailed unless what is visible is what the named snapshot shows, and nothing waits above it.

    Holds the journal's head from here to the commit: whoever writes or records a snapshot meanwhile waits.
    """
    connection.execute(
        select(journal_head.c.commit).where(journal_head.c.dataset_id == dataset.id).with_for_update()
    ).first()
    head = snapshots.recorded(connection, dataset)
    named = [part.strip().strip('"') for part in expected.split(",")]
    content = connection.execute(
        select(history.c.content).where(history.c.dataset_id == dataset.id, history.c.id.in_(named))
    ).scalars()
    any_one = expected.strip() == "*" and head.id is not None
    if not any_one and head.content not in set(content):
        why = "the dataset has no snapshot yet" if head.id is None else "the data has changed since that snapshot"
        raise PreconditionFailed(why, expected=expected, head=head.id)
    waiting = connection.execute(
        select(journal_batches.c.id)
        .where(
            journal_batches.c.dataset_id == dataset.id,
            journal_batches.c.state == COMMITTED,
            journal_batches.c.rows > 0,
        )
        .limit(1)
    ).first()
    if waiting is not None:
        raise PreconditionFailed("writes that no snapshot holds yet came after it", expected=expected, head=head.id)


def abort(database: Database, dataset: Dataset, tenant: str, uid: str, act: AuditedAction) -> None:
    """Give a stage up. Doing it again is fine. Raises StageNotFound, and StageClosed after its commit."""
    with database.write() as connection:
        row = find(connection, dataset, tenant, uid)
        if row.state in (COMMITTED, DONE):
            raise StageClosed("the stage is committed")
        ended = mark_aborted(connection, row.id)
        act.done(connection)
    for batch_id in ended:
        if batch_id != row.id:
            batches.purge(database, batch_id)


def mark_aborted(connection: Connection, stage_id: int) -> list[int]:
    """Abort a stage and what was sent to it; returns the ids of all of them."""
    of_stage = (journal_batches.c.id == stage_id) | (journal_batches.c.stage == stage_id)
    return batches.mark_aborted(connection, of_stage)


def _stages(dataset: Dataset, tenant: str) -> Any:
    return select(journal_batches).where(
        journal_batches.c.dataset_id == dataset.id, journal_batches.c.tenant == tenant, journal_batches.c.is_stage
    )


def _sums(connection: Connection, stage: Row[Any]) -> tuple[int, int]:
    """Entities and rows that were sent to a stage."""
    if stage.state in (COMMITTED, DONE):
        return stage.entities, stage.rows
    parts = connection.execute(
        select(journal_batches.c.entities, journal_batches.c.rows).where(
            journal_batches.c.stage == stage.id, journal_batches.c.state.in_((STAGED, COMMITTED))
        )
    ).all()
    return sum(part.entities for part in parts), sum(part.rows for part in parts)


def _stage(row: Row[Any], entities: int, rows: int) -> Stage:
    return Stage(
        id=row.uid,
        state=STATES[row.state],
        origin=row.origin,
        message=row.message,
        metadata=row.metadata,
        entities=entities,
        statements=rows,
        created=row.created,
        expires=row.expires,
        commit=row.commit,
    )
