"""Workload overview for operators: workers, journal backlog, running jobs and job counts."""

from datetime import datetime

from sqlalchemy import Connection, func, select

from tarn.db import jobs, worker_heartbeats
from tarn.db.engine import Database
from tarn.db.tables import datasets, exports, journal_head, snapshot_heads, workers
from tarn.db.tables import jobs as jobs_table
from tarn.model.work.job import JobState
from tarn.model.work.workload import Done, Waiting, Work, WorkerSeen

MOST_SHOWN = 100
"""Maximum number of journals and of running jobs in an overview."""


class WorkloadReader:
    """Reads the workload and the heartbeats of the workers."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def workload(self) -> Work:
        """Return the workers, the journal backlog, the running jobs and the number of jobs by state."""
        with self._database.read() as connection:
            worker_rows = connection.execute(select(workers).order_by(workers.c.started)).all()
            is_known = jobs_table.c.operation.in_(jobs.KNOWN_OPERATIONS)
            is_running = jobs_table.c.state == JobState.RUNNING
            running = select(jobs_table.c.id).where(is_known, is_running).order_by(jobs_table.c.id).limit(MOST_SHOWN)
            return Work(
                workers=[WorkerSeen.model_validate(row._mapping) for row in worker_rows],
                journal=waiting(connection)[:MOST_SHOWN],
                running=[jobs.get(connection, job_id) for job_id in connection.execute(running).scalars().all()],
                jobs=done(connection),
            )

    def last_heartbeat(self) -> datetime | None:
        """Return the time of the latest heartbeat of any worker."""
        with self._database.read() as connection:
            return worker_heartbeats.last_seen(connection)


def waiting(connection: Connection) -> list[Waiting]:
    """Return the backlog of every journal, the oldest first."""
    rows = connection.execute(
        select(datasets.c.name.label("dataset"), journal_head.c.rows, journal_head.c.size, journal_head.c.oldest)
        .join(datasets, datasets.c.id == journal_head.c.dataset_id)
        .where(datasets.c.state == "active", journal_head.c.rows > 0)
        .order_by(journal_head.c.oldest)
    )
    return [Waiting.model_validate(row._mapping) for row in rows]


def oldest_stale(connection: Connection) -> dict[str, datetime]:
    """Return, for each kind of export that is stale in some dataset, when the oldest stale one was made."""
    rows = connection.execute(
        select(exports.c.kind, func.min(exports.c.made, type_=exports.c.made.type).label("made"))
        .join(snapshot_heads, snapshot_heads.c.dataset_id == exports.c.dataset_id)
        .join(datasets, datasets.c.id == exports.c.dataset_id)
        .where(datasets.c.state == "active", exports.c.content != snapshot_heads.c.content)
        .group_by(exports.c.kind)
    )
    return {row.kind: row.made for row in rows}


def done(connection: Connection) -> list[Done]:
    """Return the number of jobs by operation and state."""
    rows = connection.execute(
        select(
            jobs_table.c.operation,
            jobs_table.c.state,
            func.count().label("jobs"),
            func.max(jobs_table.c.finished, type_=jobs_table.c.finished.type).label("last"),
        )
        .where(jobs_table.c.operation.in_(jobs.KNOWN_OPERATIONS))
        .group_by(jobs_table.c.operation, jobs_table.c.state)
        .order_by(jobs_table.c.operation, jobs_table.c.state)
    )
    return [Done.model_validate(row._mapping) for row in rows]
