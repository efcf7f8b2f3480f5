"""The jobs table: how the API hands long work to the workers, and how several workers share it."""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row, and_, case, insert, or_, select, update

from app.db.tables import datasets, jobs
from app.errors import Internal
from app.model.ids import new_id, now
from app.model.job import MOST_ATTEMPTS, Job, JobState, Operation, Progress


def enqueue(connection: Connection, operation: Operation, dataset_id: str, tenant: str, request: str) -> Job:
    """Add a job in the caller's transaction: it exists exactly if what asked for it does."""
    job_id = new_id()
    connection.execute(
        insert(jobs).values(
            id=job_id,
            operation=operation,
            dataset_id=dataset_id,
            tenant=tenant,
            request=request,
            state=JobState.QUEUED,
            created=now(),
            attempts=0,
        )
    )
    job = find(connection, job_id)
    assert job is not None
    return job


def find(connection: Connection, job_id: str) -> Job | None:
    row = connection.execute(_select().where(jobs.c.id == job_id)).first()
    return None if row is None else _job(row)


def newest(connection: Connection, tenant: str | None, before: str | None, limit: int) -> list[Job]:
    """Jobs of one tenant, or of all, newest first."""
    query = _select().order_by(jobs.c.id.desc()).limit(limit)
    if tenant is not None:
        query = query.where(jobs.c.tenant == tenant)
    if before is not None:
        query = query.where(jobs.c.id < before)
    return [_job(row) for row in connection.execute(query)]


def claim(connection: Connection, worker: str, silent_after: float) -> Job | None:
    """Take the oldest job that nobody works on: a queued one whose time has come, or one whose worker fell silent.

    The update is conditional on the row being as it was found, so of two workers one gets it. A job that was taken
    over is `disturbed`: its former worker may not know yet.
    """
    moment = now()
    due = or_(jobs.c.not_before.is_(None), jobs.c.not_before <= moment)
    abandoned = and_(jobs.c.state == JobState.RUNNING, jobs.c.heartbeat < moment - timedelta(seconds=silent_after))
    _give_up(connection, and_(abandoned, jobs.c.attempts >= MOST_ATTEMPTS), moment)
    free = or_(and_(jobs.c.state == JobState.QUEUED, due), abandoned)
    oldest = select(jobs.c.id).where(free).order_by(jobs.c.id).limit(1)
    if connection.dialect.name == "postgresql":
        oldest = oldest.with_for_update(skip_locked=True)
    taken = connection.execute(
        update(jobs)
        .where(jobs.c.id == oldest.scalar_subquery(), free)
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
    ).scalar()
    return None if taken is None else find(connection, taken)


def _give_up(connection: Connection, used_up: Any, moment: datetime) -> None:
    """End jobs whose worker fell silent once too often; what must be done some time waits long for its next try."""
    for row in connection.execute(select(jobs.c.id, jobs.c.operation, jobs.c.attempts).where(used_up)).all():
        problem = Internal(f"{row.attempts} workers fell silent over this job").problem(instance=f"/v1/jobs/{row.id}")
        again = Operation(row.operation).next_try(row.attempts, retryable=False, moment=moment)
        values = _broken_off(problem.model_dump(mode="json"), again)
        connection.execute(update(jobs).where(jobs.c.id == row.id, used_up).values(**values))


def beat(connection: Connection, job_id: str, worker: str, progress: Progress | None) -> bool:
    """Say that the job is being worked on. False if another worker has taken it over."""
    values: dict[str, Any] = {"heartbeat": now()}
    if progress is not None:
        values["progress"] = progress.model_dump()
    return _held(connection, job_id, worker, values)


def finish(connection: Connection, job_id: str, worker: str, result: dict[str, Any]) -> bool:
    values = {"state": JobState.DONE, "finished": now(), "result": result, "problem": None}
    return _held(connection, job_id, worker, values)


def fail(connection: Connection, job_id: str, worker: str, problem: dict[str, Any], again: datetime | None) -> bool:
    """Say why an attempt failed. The job waits for its next try at `again`, or without one is over."""
    return _held(connection, job_id, worker, _broken_off(problem, again))


def hand_back(connection: Connection, job_id: str, worker: str, not_before: datetime | None = None) -> bool:
    """Put a job back that its worker cannot finish now, at shutdown for instance."""
    return _held(connection, job_id, worker, _queued(not_before))


def _broken_off(problem: dict[str, Any], again: datetime | None) -> dict[str, Any]:
    over = {"state": JobState.FAILED, "finished": now()}
    return {"problem": problem, "disturbed": now()} | (over if again is None else _queued(again))


def _queued(not_before: datetime | None) -> dict[str, Any]:
    return {"state": JobState.QUEUED, "worker": None, "heartbeat": None, "not_before": not_before}


def _held(connection: Connection, job_id: str, worker: str, values: dict[str, Any]) -> bool:
    mine = (jobs.c.id == job_id, jobs.c.worker == worker, jobs.c.state == JobState.RUNNING)
    return connection.execute(update(jobs).where(*mine).values(**values)).rowcount == 1


def _select() -> Any:
    return select(jobs, datasets.c.name.label("dataset")).join(datasets, datasets.c.id == jobs.c.dataset_id)


def _job(row: Row[Any]) -> Job:
    return Job.model_validate(dict(row._mapping))
