"""What the workers have to do and do, for those who watch over them."""

from datetime import datetime

from pydantic import BaseModel, Field
from sqlalchemy import Connection, func, select

from tarn.db import jobs
from tarn.db.tables import datasets, exports, journal_head, snapshot_heads, workers
from tarn.db.tables import jobs as jobs_table
from tarn.model.job import Job, JobState, Operation
from tarn.model.names import DatasetName

MOST_SHOWN = 100


class WorkerSeen(BaseModel):
    """A worker process and its last sign of life."""

    id: str
    host: str
    pid: int
    started: datetime
    seen: datetime


class Waiting(BaseModel):
    """What waits in one dataset's journal."""

    dataset: DatasetName
    rows: int
    size: int = Field(description="Characters of their values.")
    oldest: datetime | None


class Done(BaseModel):
    """Jobs of one operation, by what became of them, as far as they are kept."""

    operation: Operation
    state: JobState
    jobs: int
    last: datetime | None = Field(description="When the last of them was over.")


class Work(BaseModel):
    """Workers, what waits for them, and what they do."""

    workers: list[WorkerSeen]
    journal: list[Waiting] = Field(description="The datasets whose statements have waited longest, up to a hundred.")
    running: list[Job]
    jobs: list[Done]


def at_work(connection: Connection) -> Work:
    """The present state of affairs."""
    seen = connection.execute(select(workers).order_by(workers.c.started)).all()
    known = jobs_table.c.operation.in_(jobs.KNOWN)
    running = select(jobs_table.c.id).where(known, jobs_table.c.state == JobState.RUNNING).order_by(jobs_table.c.id)
    return Work(
        workers=[WorkerSeen.model_validate(row._mapping) for row in seen],
        journal=waiting(connection)[:MOST_SHOWN],
        running=[jobs.get(connection, each) for each in connection.execute(running.limit(MOST_SHOWN)).scalars().all()],
        jobs=done(connection),
    )


def waiting(connection: Connection) -> list[Waiting]:
    """What waits in every journal, the oldest first."""
    rows = connection.execute(
        select(datasets.c.name.label("dataset"), journal_head.c.rows, journal_head.c.size, journal_head.c.oldest)
        .join(datasets, datasets.c.id == journal_head.c.dataset_id)
        .where(datasets.c.state == "active", journal_head.c.rows > 0)
        .order_by(journal_head.c.oldest)
    )
    return [Waiting.model_validate(row._mapping) for row in rows]


def oldest_stale(connection: Connection) -> dict[str, datetime]:
    """Of each kind of export that somewhere is not of the present content: when the oldest of them was made."""
    rows = connection.execute(
        select(exports.c.kind, func.min(exports.c.made, type_=exports.c.made.type).label("made"))
        .join(snapshot_heads, snapshot_heads.c.dataset_id == exports.c.dataset_id)
        .join(datasets, datasets.c.id == exports.c.dataset_id)
        .where(datasets.c.state == "active", exports.c.content != snapshot_heads.c.content)
        .group_by(exports.c.kind)
    )
    return {row.kind: row.made for row in rows}


def done(connection: Connection) -> list[Done]:
    rows = connection.execute(
        select(
            jobs_table.c.operation,
            jobs_table.c.state,
            func.count().label("jobs"),
            func.max(jobs_table.c.finished, type_=jobs_table.c.finished.type).label("last"),
        )
        .where(jobs_table.c.operation.in_(jobs.KNOWN))
        .group_by(jobs_table.c.operation, jobs_table.c.state)
        .order_by(jobs_table.c.operation, jobs_table.c.state)
    )
    return [Done.model_validate(row._mapping) for row in rows]
