"""The jobs table: how the API hands long work to the workers, and how several workers share it."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, bindparam, case, delete, func, insert, or_, select, update

from tarn.db import outbox as events
from tarn.db.tables import datasets, jobs
from tarn.errors import Internal, JobConflict, JobNotFound, Unavailable
from tarn.model.event import EventKind
from tarn.model.ids import new_id, now
from tarn.model.job import MOST_ATTEMPTS, Job, JobState, Operation, Progress

MAX_CLAIMED = 250
"""Jobs that are claimed at once; what is more waits for the next time."""

KNOWN_OPERATIONS = frozenset(Operation)
"""While versions run side by side there may be others: those are left to processes that know them."""

PROGRESS_EVENT_INTERVAL = timedelta(seconds=1)
"""Between two events that say how far a job is."""


def enqueue(
    connection: Connection,
    operation: Operation,
    dataset_id: str | None,
    tenant: str,
    request: str,
    arguments: dict[str, Any] | None = None,
) -> Job:
    """Add a job in the caller's transaction: it exists exactly if what asked for it does."""
    job_id = new_id()
    connection.execute(
        insert(jobs).values(
            id=job_id,
            operation=operation,
            dataset_id=dataset_id,
            arguments=arguments or {},
            tenant=tenant,
            request=request,
            state=JobState.QUEUED,
            created=now(),
            attempts=0,
        )
    )
    return _record_state(connection, job_id)


def get(connection: Connection, job_id: str) -> Job:
    """Raises JobNotFound, and Unavailable for a job that only a newer version of Tarn knows."""
    job = find(connection, job_id)
    if job is None:
        raise JobNotFound(f"there is no job {job_id!r}")
    return job


def find(connection: Connection, job_id: str) -> Job | None:
    row = connection.execute(_select().where(jobs.c.id == job_id)).first()
    if row is not None and row.operation not in KNOWN_OPERATIONS:
        raise Unavailable(f"the job {job_id} is of a newer version of Tarn, which this process is not", retry_after=2)
    return None if row is None else _job(row)


def newest(connection: Connection, tenant: str | None, before: str | None, limit: int) -> list[Job]:
    """Jobs of one tenant, or of all, newest first; but for what only a newer version of Tarn does."""
    query = _select().where(jobs.c.operation.in_(KNOWN_OPERATIONS)).order_by(jobs.c.id.desc()).limit(limit)
    if tenant is not None:
        query = query.where(jobs.c.tenant == tenant)
    if before is not None:
        query = query.where(jobs.c.id < before)
    return [_job(row) for row in connection.execute(query)]


def has_open(connection: Connection, dataset_id: str, operations: Collection[Operation]) -> bool:
    """Whether a job of one of these operations waits or runs for a dataset."""
    found = select(jobs.c.id).where(
        jobs.c.dataset_id == dataset_id,
        jobs.c.operation.in_(operations),
        jobs.c.state.in_((JobState.QUEUED, JobState.RUNNING)),
    )
    return connection.execute(found.limit(1)).first() is not None


def delete_finished(connection: Connection, before: datetime) -> None:
    """Delete jobs that were over before a moment. Their records in the lake stay."""
    over = [state for state in JobState if state.over]
    connection.execute(delete(jobs).where(jobs.c.state.in_(over), jobs.c.finished < before))


# What a caller does with a job


def cancel(connection: Connection, job_id: str) -> Job:
    """Give a job up: one that waits is over at once, one that runs when its worker next looks, one that is over stays.

    Raises JobNotFound, and JobConflict for a job that must come to its end.
    """
    job = get(connection, job_id)
    if job.operation.never_given_up and not job.state.over:
        raise JobConflict(f"a {job.operation} that has begun must come to its end", state=job.state)
    moment = now()
    waits = jobs.c.state == JobState.QUEUED
    connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id, jobs.c.state.in_((JobState.QUEUED, JobState.RUNNING)))
        .values(
            state=case((waits, JobState.CANCELLED), else_=jobs.c.state),
            finished=case((waits, moment), else_=None),
            cancelled=moment,
            not_before=None,
        )
    )
    given_up = get(connection, job_id)
    if given_up.state is not job.state:
        _record_state(connection, job_id)
    return given_up


def retry(connection: Connection, job_id: str) -> Job:
    """Queue a job again that failed or was cancelled, as if it had never been begun.

    Its problem stays until it is over. Raises JobNotFound, and JobConflict for a job in any other state.
    """
    again = connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id, jobs.c.state.in_((JobState.FAILED, JobState.CANCELLED)))
        .values(**_queued(None), attempts=0, cancelled=None, started=None, finished=None, progress=None)
    )
    job = get(connection, job_id)
    if again.rowcount != 1:
        raise JobConflict(
            f"the job is {job.state}: only one that failed or was cancelled is tried again", state=job.state
        )
    return _record_state(connection, job_id)


# What a worker does with it


def is_any_free(
    connection: Connection, silent_after: float, among: Collection[Operation], without: Collection[str] = ()
) -> bool:
    """Whether there may be something to claim: a look that writes nothing, for those who look often."""
    moment = now()
    free = and_(_is_claimable(moment, silent_after, among, without), _is_free(moment, silent_after))
    return connection.execute(select(jobs.c.id).where(free).limit(1)).first() is not None


def claim(
    connection: Connection,
    worker: str,
    silent_after: float,
    among: Collection[Operation],
    running: Mapping[str, int] | None = None,
    without: Collection[str] = (),
) -> Job | None:
    """Take a job that nobody works on: a queued one whose time has come, or one whose worker fell silent.

    The tenant with the fewest jobs that are `running` is next; among equals the one that was served the longest time
    ago, with its oldest job. Operations that are not `among` these are left alone, and so are the jobs of tenants that
    are to go `without`, and those of a dataset that another job is at work on. Of several workers one gets it. A job
    that was taken over is `disturbed`: its former worker may not know yet.
    """
    before = jobs.alias()
    served = select(func.max(before.c.started)).where(before.c.tenant == jobs.c.tenant).scalar_subquery()
    order: list[ColumnElement[Any]] = [served.asc().nulls_first()]
    if running:
        order.insert(0, case(*((jobs.c.tenant == tenant, count) for tenant, count in running.items()), else_=0))
    which = _is_claimable(now(), silent_after, among, without)
    found = _claim(connection, worker, silent_after, which, most=1, order=order)
    return found[0] if found else None


def claim_all(connection: Connection, worker: str, operation: Operation, silent_after: float) -> list[Job]:
    """Take every job of one operation that nobody works on, up to a sensible number.

    The oldest one of each tenant comes first, then the second of each: whoever waits with a thousand of them keeps
    nobody waiting who has one.
    """
    return _claim(connection, worker, silent_after, jobs.c.operation == operation, most=MAX_CLAIMED)


def _claim(
    connection: Connection,
    worker: str,
    silent_after: float,
    which: ColumnElement[bool],
    most: int,
    order: Sequence[ColumnElement[Any]] = (),
) -> list[Job]:
    """The update is conditional on each row being as it was found, so that nobody else has it."""
    moment = now()
    abandoned = and_(jobs.c.operation.in_(KNOWN_OPERATIONS), _is_abandoned(moment, silent_after))
    _end_cancelled(connection, abandoned, moment)
    _fail_exhausted(connection, and_(abandoned, jobs.c.attempts >= MOST_ATTEMPTS), moment)
    free = and_(which, _is_free(moment, silent_after))
    turn = func.row_number().over(partition_by=jobs.c.tenant, order_by=jobs.c.id)
    turns = select(jobs.c.id, turn.label("turn")).where(free).subquery()
    oldest = select(jobs.c.id).join(turns, turns.c.id == jobs.c.id).where(free)
    oldest = oldest.order_by(*order, turns.c.turn, jobs.c.id).limit(most)
    if connection.dialect.name == "postgresql":
        oldest = oldest.with_for_update(skip_locked=True, of=jobs)
    # Not as a subquery, which PostgreSQL may run more than once, each time skipping what it locked before.
    found = connection.execute(oldest).scalars().all()
    taken = connection.execute(
        update(jobs)
        .where(jobs.c.id.in_(found), free)
        .values(
            state=JobState.RUNNING,
            worker=worker,
            heartbeat=moment,
            started=moment,
            attempts=jobs.c.attempts + 1,
            not_before=None,
            disturbed=case((jobs.c.state == JobState.RUNNING, moment), else_=jobs.c.disturbed),
        )
        .returning(jobs.c.id)
    ).scalars()
    claimed = _select().where(jobs.c.id.in_(taken.all())).order_by(jobs.c.id)
    begun = [_job(row) for row in connection.execute(claimed)]
    for job in begun:
        _record(connection, job)
    return begun


def _is_claimable(
    moment: datetime, silent_after: float, among: Collection[Operation], without: Collection[str]
) -> ColumnElement[bool]:
    """Whether a job is of these operations, of a tenant that may have one more, on a dataset without a running one."""
    other = jobs.alias()
    is_alive = other.c.heartbeat >= moment - timedelta(seconds=silent_after)
    at_work = select(other.c.id).where(
        other.c.dataset_id == jobs.c.dataset_id,
        other.c.id != jobs.c.id,
        other.c.state == JobState.RUNNING,
        other.c.operation.in_(set(among) - {Operation.FLUSH}),  # flushes of a dataset are done in one round
        is_alive,
    )
    return and_(jobs.c.operation.in_(among), jobs.c.tenant.not_in(without), ~at_work.exists())


def _is_free(moment: datetime, silent_after: float) -> ColumnElement[bool]:
    due = or_(jobs.c.not_before.is_(None), jobs.c.not_before <= moment)
    return or_(and_(jobs.c.state == JobState.QUEUED, due), _is_abandoned(moment, silent_after))


def _is_abandoned(moment: datetime, silent_after: float) -> ColumnElement[bool]:
    return and_(jobs.c.state == JobState.RUNNING, jobs.c.heartbeat < moment - timedelta(seconds=silent_after))


def _end_cancelled(connection: Connection, abandoned: ColumnElement[bool], moment: datetime) -> None:
    """End jobs whose worker fell silent after somebody asked for them to be given up."""
    over = {"state": JobState.CANCELLED, "finished": moment, "disturbed": moment}
    left = update(jobs).where(abandoned, jobs.c.cancelled.is_not(None)).values(**over).returning(jobs.c.id)
    for job_id in connection.execute(left).scalars().all():
        _record_state(connection, job_id)


def _fail_exhausted(connection: Connection, used_up: Any, moment: datetime) -> None:
    """End jobs whose worker fell silent once too often; what must be done some time waits long for its next try."""
    for row in connection.execute(select(jobs.c.id, jobs.c.operation, jobs.c.attempts).where(used_up)).all():
        problem = Internal(f"{row.attempts} workers fell silent over this job").problem(instance=f"/v1/jobs/{row.id}")
        again = Operation(row.operation).next_try(row.attempts, retryable=False, moment=moment)
        values = _broken_off(problem.model_dump(mode="json"), again)
        if connection.execute(update(jobs).where(jobs.c.id == row.id, used_up).values(**values)).rowcount == 1:
            _record_state(connection, row.id)


def beat(connection: Connection, job_id: str, worker: str, progress: Progress | None) -> bool:
    """Say that the job is being worked on. False if it is not to be: another worker has it, or it was cancelled."""
    return bool(beat_all(connection, [job_id], worker, None if progress is None else {job_id: progress}))


def is_held(connection: Connection, job_id: str, worker: str) -> bool:
    """Whether a job is still to be worked on, without a word of it."""
    return bool(held(connection, [job_id], worker))


def held(connection: Connection, job_ids: Collection[str], worker: str) -> set[str]:
    """Those of a worker's jobs that are still to be worked on. Writes nothing."""
    found = select(jobs.c.id).where(jobs.c.id.in_(job_ids), *_held_by(worker), jobs.c.cancelled.is_(None))
    return set(connection.execute(found).scalars())


def beat_all(
    connection: Connection, job_ids: Collection[str], worker: str, progress: Mapping[str, Progress] | None = None
) -> set[str]:
    """Say that these jobs are being worked on, and how far some of them are; returns those that are to be."""
    if progress:
        one = update(jobs).where(jobs.c.id == bindparam("job"), *_held_by(worker))
        reached = [{"job": job_id, "reached": each.model_dump()} for job_id, each in progress.items()]
        connection.execute(one.values(progress=bindparam("reached")), reached)
        _record_progress(connection, progress.keys(), worker)
    beaten = connection.execute(
        update(jobs)
        .where(jobs.c.id.in_(job_ids), *_held_by(worker))
        .values(heartbeat=now())
        .returning(jobs.c.id, jobs.c.cancelled)
    )
    return {row.id for row in beaten if row.cancelled is None}


def _record_progress(connection: Connection, job_ids: Collection[str], worker: str) -> None:
    """Tell how far jobs are, those of which nothing was told for a while: steps may be many, and short."""
    moment = now()
    due = or_(jobs.c.told.is_(None), jobs.c.told <= moment - PROGRESS_EVENT_INTERVAL, jobs.c.told > moment)
    mine = update(jobs).where(jobs.c.id.in_(job_ids), *_held_by(worker), due)
    for job_id in connection.execute(mine.values(told=moment).returning(jobs.c.id)).scalars().all():
        job = get(connection, job_id)
        _record(connection, job, EventKind.JOB_PROGRESS, progress=job.progress)


def finish(
    connection: Connection, job_id: str, worker: str, result: dict[str, Any], progress: Progress | None = None
) -> bool:
    values = {"state": JobState.DONE, "finished": now(), "result": result, "problem": None}
    if progress is not None:
        values["progress"] = progress.model_dump()
    if not _held(connection, job_id, worker, values):
        return False
    _record_state(connection, job_id)
    return True


def fail(connection: Connection, job_id: str, worker: str, problem: dict[str, Any], again: datetime | None) -> bool:
    """Say why an attempt failed. The job waits for its next try at `again`; without one, or if it was cancelled, it is
    over."""
    return _end_attempt(connection, job_id, worker, _broken_off(problem, again))


def requeue(connection: Connection, job_id: str, worker: str, not_before: datetime | None = None) -> bool:
    """Put a job back that its worker cannot finish now, at shutdown for instance. One that was cancelled is over."""
    return _end_attempt(connection, job_id, worker, _queued(not_before))


def _end_attempt(connection: Connection, job_id: str, worker: str, values: dict[str, Any]) -> bool:
    if not _held(connection, job_id, worker, values):
        return False
    given_up = (jobs.c.id == job_id, jobs.c.state == JobState.QUEUED, jobs.c.cancelled.is_not(None))
    over = {"state": JobState.CANCELLED, "finished": now(), "not_before": None}
    connection.execute(update(jobs).where(*given_up).values(**over))
    _record_state(connection, job_id)
    return True


def _broken_off(problem: dict[str, Any], again: datetime | None) -> dict[str, Any]:
    over = {"state": JobState.FAILED, "finished": now()}
    return {"problem": problem, "disturbed": now()} | (over if again is None else _queued(again))


def _queued(not_before: datetime | None) -> dict[str, Any]:
    return {"state": JobState.QUEUED, "worker": None, "heartbeat": None, "not_before": not_before}


def _held(connection: Connection, job_id: str, worker: str, values: dict[str, Any]) -> bool:
    held = update(jobs).where(jobs.c.id == job_id, *_held_by(worker)).values(**values)
    return connection.execute(held).rowcount == 1


def _held_by(worker: str) -> tuple[ColumnElement[bool], ...]:
    return jobs.c.worker == worker, jobs.c.state == JobState.RUNNING


# What is told of it

STATE_EVENTS = {
    JobState.QUEUED: EventKind.JOB_QUEUED,
    JobState.RUNNING: EventKind.JOB_STARTED,
    JobState.DONE: EventKind.JOB_DONE,
    JobState.FAILED: EventKind.JOB_FAILED,
    JobState.CANCELLED: EventKind.JOB_CANCELLED,
}


def _record_state(connection: Connection, job_id: str) -> Job:
    """Tell which state a job has come to, in the transaction in which it does."""
    job = get(connection, job_id)
    _record(connection, job)
    return job


def _record(connection: Connection, job: Job, kind: EventKind | None = None, **data: Any) -> None:
    """Tell the job's tenant, on the dataset's stream, or of a job on several on one of its own."""
    kind = kind or STATE_EVENTS[job.state]
    if kind is EventKind.JOB_QUEUED:
        data = {"not_before": job.not_before, "problem": job.problem}
    if kind is EventKind.JOB_FAILED:
        data = {"problem": job.problem}
    said = {"job": job.id, "operation": job.operation, "tenant": job.tenant, "attempts": job.attempts, **data}
    events.record(connection, stream_of(job), kind, audience=[job.tenant], of_job=job.id, **said)


def stream_of(job: Job) -> str:
    """Where a job's events are told."""
    return job.dataset_id or job.id


def _select() -> Any:
    return select(jobs, datasets.c.name.label("dataset")).outerjoin(datasets, datasets.c.id == jobs.c.dataset_id)


def _job(row: Row[Any]) -> Job:
    result = None if row.result is None else {"operation": row.operation} | row.result
    return Job.model_validate(dict(row._mapping) | {"result": result})
