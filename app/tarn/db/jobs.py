"""The job queue in SQL: the API enqueues long-running work, workers claim it, send heartbeats and finish it.

The times of a job are those of the database's clock: processes with different clocks write them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, bindparam, case, delete, func, insert, or_, select, update

from tarn.db import outbox
from tarn.db.database_clock import database_time
from tarn.db.lease import LeaseColumns
from tarn.db.tables import datasets, jobs
from tarn.errors import Internal, JobConflict, JobNotFound, Unavailable
from tarn.model.ids import new_id, now
from tarn.model.work.event import EventKind
from tarn.model.work.job import MOST_ATTEMPTS, Job, JobState, Operation, Progress

MAX_CLAIMED = 250
"""Maximum number of jobs per claim."""

KNOWN_OPERATIONS = frozenset(Operation)
"""Operations of this version. During a rolling upgrade there may be others: processes of that version run them."""

LEASE = LeaseColumns(holder=jobs.c.worker, expires=jobs.c.heartbeat, number=jobs.c.attempts)
"""A running job is leased to its worker. `heartbeat` is when the lease was last renewed: the
workers that may take the job over decide how long the lease lasts, and compare it with a time that many seconds ago."""

PROGRESS_EVENT_INTERVAL = timedelta(seconds=1)
"""Minimum interval between two progress events of a job."""


def enqueue(
    connection: Connection,
    operation: Operation,
    dataset_id: str | None,
    tenant: str,
    request: str,
    arguments: dict[str, Any] | None = None,
) -> Job:
    """Add a job in the caller's transaction: both are committed or neither is."""
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
            created=database_time(connection),
            attempts=0,
        )
    )
    return _record_state(connection, job_id)


def get(connection: Connection, job_id: str) -> Job:
    """Return a job. Raises JobNotFound, and Unavailable for a job that only a newer version of Tarn knows."""
    job = find(connection, job_id)
    if job is None:
        raise JobNotFound(f"there is no job {job_id!r}")
    return job


def find(connection: Connection, job_id: str) -> Job | None:
    """Return a job, or None. Raises Unavailable for a job that only a newer version of Tarn knows."""
    row = connection.execute(_select().where(jobs.c.id == job_id)).first()
    if row is not None and row.operation not in KNOWN_OPERATIONS:
        raise Unavailable(f"the job {job_id} belongs to a newer version of Tarn than this process", retry_after=2)
    return None if row is None else _job(row)


def newest(connection: Connection, tenant: str | None, before: str | None, limit: int) -> list[Job]:
    """Return jobs of one tenant or of all, newest first, without operations that only a newer version knows."""
    query = _select().where(jobs.c.operation.in_(KNOWN_OPERATIONS)).order_by(jobs.c.id.desc()).limit(limit)
    if tenant is not None:
        query = query.where(jobs.c.tenant == tenant)
    if before is not None:
        query = query.where(jobs.c.id < before)
    return [_job(row) for row in connection.execute(query)]


def has_open(connection: Connection, dataset_id: str, operations: Collection[Operation]) -> bool:
    """Return whether a job of one of these operations is queued or running for a dataset."""
    query = select(jobs.c.id).where(
        jobs.c.dataset_id == dataset_id,
        jobs.c.operation.in_(operations),
        jobs.c.state.in_((JobState.QUEUED, JobState.RUNNING)),
    )
    return connection.execute(query.limit(1)).first() is not None


def delete_finished(connection: Connection, before: datetime) -> None:
    """Delete jobs that finished before a point in time. Their run records in the lake stay."""
    over = [state for state in JobState if state.over]
    connection.execute(delete(jobs).where(jobs.c.state.in_(over), jobs.c.finished < before))


# For callers of the API


def cancel(connection: Connection, job_id: str) -> Job:
    """Cancel a job: a queued one ends immediately, a running one at its worker's next heartbeat, a finished one stays.

    Raises JobNotFound, and JobConflict for an operation that cannot be cancelled.
    """
    job = get(connection, job_id)
    if job.operation.never_given_up and not job.state.over:
        raise JobConflict(f"a {job.operation} cannot be cancelled: it must run to its end", state=job.state)
    moment = database_time(connection)
    is_queued = jobs.c.state == JobState.QUEUED
    connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id, jobs.c.state.in_((JobState.QUEUED, JobState.RUNNING)))
        .values(
            state=case((is_queued, JobState.CANCELLED), else_=jobs.c.state),
            finished=case((is_queued, moment), else_=None),
            cancelled=moment,
            not_before=None,
        )
    )
    cancelled = get(connection, job_id)
    if cancelled.state is not job.state:
        _record_state(connection, job_id)
    return cancelled


def retry(connection: Connection, job_id: str) -> Job:
    """Queue a failed or cancelled job again, with its attempts reset.

    Its problem is kept until it finishes. Raises JobNotFound, and JobConflict for a job in any other state.
    """
    requeued = connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id, jobs.c.state.in_((JobState.FAILED, JobState.CANCELLED)))
        .values(**_queued(None), attempts=0, cancelled=None, started=None, finished=None, progress=None)
    )
    job = get(connection, job_id)
    if requeued.rowcount != 1:
        raise JobConflict(f"the job is {job.state}: only a failed or cancelled job can be retried", state=job.state)
    return _record_state(connection, job_id)


# For workers


def is_any_free(
    connection: Connection, silent_after: float, among: Collection[Operation], without: Collection[str] = ()
) -> bool:
    """Return whether there may be a job to claim. Only reads, so that it is cheap to poll."""
    moment = database_time(connection)
    free = and_(_is_claimable(moment, silent_after, among, without), _is_free(moment, silent_after))
    return connection.execute(select(jobs.c.id).where(free).limit(1)).first() is not None


def seconds_until_retry(connection: Connection) -> float:
    """Return the seconds until a queued job may be claimed that may not be claimed yet; infinite if there is none."""
    moment = database_time(connection)
    waiting = jobs.c.state == JobState.QUEUED, jobs.c.not_before > moment
    retry_at = connection.execute(select(func.min(jobs.c.not_before)).where(*waiting)).scalar()
    return math.inf if retry_at is None else (retry_at - moment).total_seconds()


def claim(
    connection: Connection,
    worker: str,
    silent_after: float,
    among: Collection[Operation],
    running: Mapping[str, int] | None = None,
    without: Collection[str] = (),
) -> Job | None:
    """Claim one job: a queued one that is due, or a running one whose worker's heartbeat is too old.

    1. Only operations in `among`; no tenants in `without`; no dataset that another job is running on.
    2. The tenant with the fewest `running` jobs comes first, then the one that was served longest ago; its oldest job.
    3. Of several workers exactly one gets the job.
    4. A job taken over from another worker is marked `disturbed`: that worker may still be running it.
    """
    before = jobs.alias()
    served = select(func.max(before.c.started)).where(before.c.tenant == jobs.c.tenant).scalar_subquery()
    order: list[ColumnElement[Any]] = [served.asc().nulls_first()]
    if running:
        order.insert(0, case(*((jobs.c.tenant == tenant, count) for tenant, count in running.items()), else_=0))
    moment = database_time(connection)
    condition = _is_claimable(moment, silent_after, among, without)
    claimed = _claim(connection, worker, moment, silent_after, condition, limit=1, order=order)
    return claimed[0] if claimed else None


def claim_all(connection: Connection, worker: str, operation: Operation, silent_after: float) -> list[Job]:
    """Claim every free job of one operation, up to MAX_CLAIMED.

    The oldest job of each tenant comes first, then the second of each: a tenant with a thousand jobs does not delay a
    tenant with one.
    """
    condition = jobs.c.operation == operation
    return _claim(connection, worker, database_time(connection), silent_after, condition, limit=MAX_CLAIMED)


def _claim(
    connection: Connection,
    worker: str,
    moment: datetime,
    silent_after: float,
    condition: ColumnElement[bool],
    limit: int,
    order: Sequence[ColumnElement[Any]] = (),
) -> list[Job]:
    """Claim jobs. The update repeats the condition of the select, so that no job is claimed twice."""
    abandoned = and_(jobs.c.operation.in_(KNOWN_OPERATIONS), _is_abandoned(moment, silent_after))
    _end_cancelled(connection, abandoned, moment)
    _fail_exhausted(connection, and_(abandoned, jobs.c.attempts >= MOST_ATTEMPTS), moment)
    free = and_(condition, _is_free(moment, silent_after))
    rank = func.row_number().over(partition_by=jobs.c.tenant, order_by=jobs.c.id)
    ranked = select(jobs.c.id, rank.label("rank")).where(free).subquery()
    oldest = select(jobs.c.id).join(ranked, ranked.c.id == jobs.c.id).where(free)
    oldest = oldest.order_by(*order, ranked.c.rank, jobs.c.id).limit(limit)
    if connection.dialect.name == "postgresql":
        oldest = oldest.with_for_update(skip_locked=True, of=jobs)
    # Not as a subquery: PostgreSQL may run it more than once, each time skipping the rows it has locked.
    candidates = connection.execute(oldest).scalars().all()
    taken = connection.execute(
        LEASE.acquire(worker, moment - timedelta(seconds=silent_after), until=moment)
        .where(jobs.c.id.in_(candidates), free)
        .values(
            state=JobState.RUNNING,
            started=moment,
            not_before=None,
            disturbed=case((jobs.c.state == JobState.RUNNING, moment), else_=jobs.c.disturbed),
        )
        .returning(jobs.c.id)
    ).scalars()
    claimed = _select().where(jobs.c.id.in_(taken.all())).order_by(jobs.c.id)
    started_jobs = [_job(row) for row in connection.execute(claimed)]
    for job in started_jobs:
        _record(connection, job)
    return started_jobs


def _is_claimable(
    moment: datetime, silent_after: float, among: Collection[Operation], without: Collection[str]
) -> ColumnElement[bool]:
    """Condition: of these operations, not of an excluded tenant, on a dataset without another running job."""
    other = jobs.alias()
    is_alive = other.c.heartbeat > moment - timedelta(seconds=silent_after)
    running_jobs = select(other.c.id).where(
        other.c.dataset_id == jobs.c.dataset_id,
        other.c.id != jobs.c.id,
        other.c.state == JobState.RUNNING,
        other.c.operation.in_(set(among) - {Operation.FLUSH}),  # flushes of a dataset are done in one round
        is_alive,
    )
    return and_(jobs.c.operation.in_(among), jobs.c.tenant.not_in(without), ~running_jobs.exists())


def _is_free(moment: datetime, silent_after: float) -> ColumnElement[bool]:
    is_due = or_(jobs.c.not_before.is_(None), jobs.c.not_before <= moment)
    return or_(and_(jobs.c.state == JobState.QUEUED, is_due), _is_abandoned(moment, silent_after))


def _is_abandoned(moment: datetime, silent_after: float) -> ColumnElement[bool]:
    return and_(jobs.c.state == JobState.RUNNING, LEASE.is_abandoned(moment - timedelta(seconds=silent_after)))


def _end_cancelled(connection: Connection, abandoned: ColumnElement[bool], moment: datetime) -> None:
    """End cancelled jobs whose worker has no recent heartbeat."""
    over = {"state": JobState.CANCELLED, "finished": moment, "disturbed": moment}
    ended = update(jobs).where(abandoned, jobs.c.cancelled.is_not(None)).values(**over).returning(jobs.c.id)
    for job_id in connection.execute(ended).scalars().all():
        _record_state(connection, job_id)


def _fail_exhausted(connection: Connection, condition: Any, moment: datetime) -> None:
    """Fail jobs that have lost too many workers; operations that must be completed wait longer and are retried."""
    for row in connection.execute(select(jobs.c.id, jobs.c.operation, jobs.c.attempts).where(condition)).all():
        problem = Internal(f"{row.attempts} workers stopped sending heartbeats while running this job").problem(
            instance=f"/v1/jobs/{row.id}"
        )
        retry_at = Operation(row.operation).next_try(row.attempts, retryable=False, moment=moment)
        values = _failed_attempt(problem.model_dump(mode="json"), moment, retry_at)
        if connection.execute(update(jobs).where(jobs.c.id == row.id, condition).values(**values)).rowcount == 1:
            _record_state(connection, row.id)


def beat(connection: Connection, job_id: str, worker: str, progress: Progress | None) -> bool:
    """Record a heartbeat of a job. Returns False if the worker must stop: another has the job, or it was cancelled."""
    return bool(beat_all(connection, [job_id], worker, None if progress is None else {job_id: progress}))


def is_held(connection: Connection, job_id: str, worker: str) -> bool:
    """Return whether a worker still holds a job and it is not cancelled. Writes nothing."""
    return bool(held(connection, [job_id], worker))


def held(connection: Connection, job_ids: Collection[str], worker: str) -> set[str]:
    """Return those of a worker's jobs that it still holds and that are not cancelled. Writes nothing."""
    query = select(jobs.c.id).where(jobs.c.id.in_(job_ids), *_held_by(worker), jobs.c.cancelled.is_(None))
    return set(connection.execute(query).scalars())


def beat_all(
    connection: Connection, job_ids: Collection[str], worker: str, progress: Mapping[str, Progress] | None = None
) -> set[str]:
    """Record heartbeats and progress of jobs; return those that are still held and not cancelled."""
    if progress:
        progressed = update(jobs).where(jobs.c.id == bindparam("job"), *_held_by(worker))
        reached = [{"job": job_id, "reached": each.model_dump()} for job_id, each in progress.items()]
        connection.execute(progressed.values(progress=bindparam("reached")), reached)
        _record_progress(connection, progress.keys(), worker)
    beaten = connection.execute(
        LEASE.renew(worker, until=database_time(connection))
        .where(jobs.c.id.in_(job_ids), jobs.c.state == JobState.RUNNING)
        .returning(jobs.c.id, jobs.c.cancelled)
    )
    return {row.id for row in beaten if row.cancelled is None}


def _record_progress(connection: Connection, job_ids: Collection[str], worker: str) -> None:
    """Record progress events, at most one per job and interval: there may be many short steps."""
    moment = now()
    is_due = or_(jobs.c.told.is_(None), jobs.c.told <= moment - PROGRESS_EVENT_INTERVAL, jobs.c.told > moment)
    claimed_jobs = update(jobs).where(jobs.c.id.in_(job_ids), *_held_by(worker), is_due)
    for job_id in connection.execute(claimed_jobs.values(told=moment).returning(jobs.c.id)).scalars().all():
        job = get(connection, job_id)
        _record(connection, job, EventKind.JOB_PROGRESS, progress=job.progress)


def finish(
    connection: Connection, job_id: str, worker: str, result: dict[str, Any], progress: Progress | None = None
) -> bool:
    """Finish a job with its result. Returns False if the worker no longer holds it."""
    values = {"state": JobState.DONE, "finished": database_time(connection), "result": result, "problem": None}
    if progress is not None:
        values["progress"] = progress.model_dump()
    if not _held(connection, job_id, worker, values):
        return False
    _record_state(connection, job_id)
    return True


def fail(connection: Connection, job_id: str, worker: str, problem: dict[str, Any], retry_at: datetime | None) -> bool:
    """Record why an attempt failed. The job is retried at `retry_at`; without it, or if it was cancelled, it ends.

    `retry_at` is a time of this process's clock, as are those of `requeue`.
    """
    moment = database_time(connection)
    values = _failed_attempt(problem, moment, _in_database_time(moment, retry_at))
    return _end_attempt(connection, job_id, worker, values)


def requeue(connection: Connection, job_id: str, worker: str, not_before: datetime | None = None) -> bool:
    """Requeue a job that its worker cannot finish now, for instance at shutdown. A cancelled one ends."""
    return _end_attempt(connection, job_id, worker, _queued(_in_database_time(database_time(connection), not_before)))


def _end_attempt(connection: Connection, job_id: str, worker: str, values: dict[str, Any]) -> bool:
    if not _held(connection, job_id, worker, values):
        return False
    is_cancelled = (jobs.c.id == job_id, jobs.c.state == JobState.QUEUED, jobs.c.cancelled.is_not(None))
    over = {"state": JobState.CANCELLED, "finished": database_time(connection), "not_before": None}
    connection.execute(update(jobs).where(*is_cancelled).values(**over))
    _record_state(connection, job_id)
    return True


def _in_database_time(moment: datetime, at: datetime | None) -> datetime | None:
    """Return a time of this process's clock as one of the database's, where it is `moment` now."""
    return None if at is None else moment + (at - now())


def _failed_attempt(problem: dict[str, Any], moment: datetime, retry_at: datetime | None) -> dict[str, Any]:
    after = {"state": JobState.FAILED, "finished": moment} if retry_at is None else _queued(retry_at)
    return {"problem": problem, "disturbed": moment, **after}


def _queued(not_before: datetime | None) -> dict[str, Any]:
    """Return the values of a queued job. `not_before` is a time of the database's clock, as claims judge it."""
    return {"state": JobState.QUEUED, "not_before": not_before, **LEASE.released}


def _held(connection: Connection, job_id: str, worker: str, values: dict[str, Any]) -> bool:
    statement = update(jobs).where(jobs.c.id == job_id, *_held_by(worker)).values(**values)
    return connection.execute(statement).rowcount == 1


def _held_by(worker: str) -> tuple[ColumnElement[bool], ...]:
    return LEASE.is_held_by(worker), jobs.c.state == JobState.RUNNING


# Events

STATE_EVENTS = {
    JobState.QUEUED: EventKind.JOB_QUEUED,
    JobState.RUNNING: EventKind.JOB_STARTED,
    JobState.DONE: EventKind.JOB_DONE,
    JobState.FAILED: EventKind.JOB_FAILED,
    JobState.CANCELLED: EventKind.JOB_CANCELLED,
}


def _record_state(connection: Connection, job_id: str) -> Job:
    """Record an event for a job's new state, in the transaction that changes it."""
    job = get(connection, job_id)
    _record(connection, job)
    return job


def _record(connection: Connection, job: Job, kind: EventKind | None = None, **data: Any) -> None:
    """Record an event for the job's tenant: on the dataset's stream, or on the job's own if it concerns several."""
    kind = kind or STATE_EVENTS[job.state]
    if kind is EventKind.JOB_QUEUED:
        data = {"not_before": job.not_before, "problem": job.problem}
    if kind is EventKind.JOB_FAILED:
        data = {"problem": job.problem}
    payload = {"job": job.id, "operation": job.operation, "tenant": job.tenant, "attempts": job.attempts, **data}
    outbox.record(connection, job.event_stream, kind, audience=[job.tenant], of_job=job.id, **payload)


def _select() -> Any:
    return select(jobs, datasets.c.name.label("dataset")).outerjoin(datasets, datasets.c.id == jobs.c.dataset_id)


def _job(row: Row[Any]) -> Job:
    result = None if row.result is None else {"operation": row.operation} | row.result
    return Job.model_validate(dict(row._mapping) | {"result": result})
