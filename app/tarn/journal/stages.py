"""Stages: batches of many requests, committed together in one transaction."""

from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, insert, select, update

from tarn.access.audit import AuditedAction
from tarn.datasets.head import recorded_head
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import journal_batches, journal_head
from tarn.db.tables import snapshots as history
from tarn.errors import PreconditionFailed, StageClosed, StageNotFound
from tarn.journal import batches
from tarn.journal import head as heads
from tarn.journal.batches import ABORTED, COMMITTED, DONE, OPEN, STAGED
from tarn.model.datasets.stage import NewStage, Stage, StageState
from tarn.model.ids import new_id, now
from tarn.model.names import Origin, TenantName
from tarn.settings import Settings


class StageTarget(NamedTuple):
    """The batch of a stage, to which requests write, and the stage's origin."""

    batch: int
    origin: Origin | None


STATES = {
    OPEN: StageState.OPEN,
    COMMITTED: StageState.COMMITTED,
    DONE: StageState.COMMITTED,
    ABORTED: StageState.ABORTED,
}


class StageService:
    """Creates, reads, commits and aborts stages. Each change and its audit record are one transaction."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    def page(self, dataset: Dataset, tenant: TenantName, after: str | None, limit: int) -> list[Stage]:
        """Return a tenant's stages that have not been deleted by the sweep, oldest first."""
        query = _stages(dataset, tenant).order_by(journal_batches.c.uid).limit(limit)
        if after is not None:
            query = query.where(journal_batches.c.uid > after)
        with self._database.read() as connection:
            return [_stage(row, *_sums(connection, row)) for row in connection.execute(query).all()]

    def get(self, dataset: Dataset, tenant: TenantName, uid: str) -> Stage:
        """Return a tenant's stage. Raises StageNotFound."""
        with self._database.read() as connection:
            return get(connection, dataset, tenant, uid)

    def target(self, dataset: Dataset, tenant: TenantName, uid: str) -> StageTarget:
        """Return what a request that writes to a stage needs. Raises StageNotFound."""
        with self._database.read() as connection:
            row = find(connection, dataset, tenant, uid)
        return StageTarget(row.id, None if row.origin is None else Origin(row.origin))

    def create(self, dataset: Dataset, tenant: TenantName, new: NewStage, act: AuditedAction) -> Stage:
        """Create a stage. Raises Backpressure."""
        with self._database.write() as connection:
            stage = create(connection, self._settings, dataset, tenant, new)
            act.done(connection, target=f"{act.target}/{stage.id}")
        return stage

    def commit(
        self,
        dataset: Dataset,
        tenant: TenantName,
        uids: list[str],
        act: AuditedAction,
        note: NewStage | None = None,
        expected: str | None = None,
    ) -> tuple[int, int, int]:
        """Commit stages in one transaction. Return the last commit number, and the counts of entities and rows.

        With an expected snapshot (`If-Match`) the stages become a snapshot of their own, or nothing is committed.
        Raises StageNotFound, StageClosed, PreconditionFailed.
        """
        with self._database.write() as connection:
            return commit(connection, dataset, tenant, uids, act, note, expected)

    def abort(self, dataset: Dataset, tenant: TenantName, uid: str, act: AuditedAction) -> None:
        """Abort a stage and delete its batches. Idempotent. Raises StageNotFound, and StageClosed after its commit."""
        with self._database.write() as connection:
            row = find(connection, dataset, tenant, uid)
            if row.state in (COMMITTED, DONE):
                raise StageClosed("the stage is committed")
            aborted = mark_aborted(connection, row.id)
            act.done(connection)
        for batch_id in aborted:
            if batch_id != row.id:
                batches.purge(self._database, batch_id)


def create(connection: Connection, settings: Settings, dataset: Dataset, tenant: str, new: NewStage) -> Stage:
    """Create a stage in the caller's transaction. Raises Backpressure."""
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
    """Return a stage of this tenant. Raises StageNotFound."""
    row = find(connection, dataset, tenant, uid)
    return _stage(row, *_sums(connection, row))


def find(connection: Connection, dataset: Dataset, tenant: str, uid: str) -> Row[Any]:
    """Return the row of a stage of this tenant. Raises StageNotFound."""
    row = connection.execute(_stages(dataset, tenant).where(journal_batches.c.uid == uid)).first()
    if row is None:
        raise StageNotFound(f"there is no stage {uid!r}")
    return row


def commit(
    connection: Connection,
    dataset: Dataset,
    tenant: str,
    uids: list[str],
    act: AuditedAction,
    note: NewStage | None = None,
    expected: str | None = None,
) -> tuple[int, int, int]:
    """Commit stages in one transaction. Return the last commit number, and the counts of entities and rows.

    With an expected snapshot (`If-Match`) the stages become a segment, and so a snapshot, of their own, or nothing is
    committed. A request that is still being sent to one of them is not included, and fails.

    Raises StageNotFound, StageClosed, PreconditionFailed.
    """
    if expected is not None:
        _require_unmoved(connection, dataset, expected)
    stages = [find(connection, dataset, tenant, uid) for uid in uids]
    stage_ids = [row.id for row in stages]
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
    commits = heads.take(connection, dataset, max(1, len(parts)), more, now())
    for position, part in enumerate(parts):
        connection.execute(
            update(journal_batches)
            .where(journal_batches.c.id == part.id)
            .values(state=COMMITTED, commit=commits.first + position, segment=commits.segment)
        )
    last = commits.first + max(1, len(parts)) - 1
    # Batches of a stage are deleted after the flush, so their sums are stored in the stage.
    stamped: dict[str, Any] = {"commit": last, "segment": commits.segment}
    for row in stages:
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
    """Raise PreconditionFailed unless the head has the content of the expected snapshot and no committed batch waits.

    Locks the journal's head until the commit: concurrent writers, and flushes that record a snapshot, wait for it.
    """
    connection.execute(
        select(journal_head.c.commit).where(journal_head.c.dataset_id == dataset.id).with_for_update()
    ).first()
    head = recorded_head(connection, dataset)
    snapshot_ids = [part.strip().strip('"') for part in expected.split(",")]
    content = connection.execute(
        select(history.c.content).where(history.c.dataset_id == dataset.id, history.c.id.in_(snapshot_ids))
    ).scalars()
    matches_any = expected.strip() == "*" and head.id is not None
    if not matches_any and head.content not in set(content):
        reason = "the dataset has no snapshot yet" if head.id is None else "the data has changed since that snapshot"
        raise PreconditionFailed(reason, expected=expected, head=head.id)
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
        raise PreconditionFailed(
            "there are later writes that are not in a snapshot yet", expected=expected, head=head.id
        )


def mark_aborted(connection: Connection, stage_id: int) -> list[int]:
    """Mark a stage and its batches as aborted and return their ids."""
    of_stage = (journal_batches.c.id == stage_id) | (journal_batches.c.stage == stage_id)
    return batches.mark_aborted(connection, of_stage)


def _stages(dataset: Dataset, tenant: str) -> Any:
    return select(journal_batches).where(
        journal_batches.c.dataset_id == dataset.id, journal_batches.c.tenant == tenant, journal_batches.c.is_stage
    )


def _sums(connection: Connection, stage: Row[Any]) -> tuple[int, int]:
    """Return the numbers of entities and rows that were sent to a stage."""
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
