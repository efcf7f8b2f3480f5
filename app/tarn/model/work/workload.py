"""Workload overview for operators: workers, journal backlog, running jobs and job counts."""

from datetime import datetime

from pydantic import BaseModel, Field

from tarn.model.names import DatasetName
from tarn.model.work.job import Job, JobState, Operation


class WorkerSeen(BaseModel):
    """A worker process and its last heartbeat."""

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
