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
    """Unflushed statements in one dataset's journal."""

    dataset: DatasetName
    rows: int
    size: int = Field(description="Characters of their values.")
    oldest: datetime | None


class Done(BaseModel):
    """Number of jobs of one operation in one state, of the jobs that are still stored."""

    operation: Operation
    state: JobState
    jobs: int
    last: datetime | None = Field(description="When the last of them finished.")


class Work(BaseModel):
    """Workers, the datasets with unflushed statements, and jobs."""

    workers: list[WorkerSeen]
    journal: list[Waiting] = Field(description="The datasets whose statements have waited longest, up to a hundred.")
    running: list[Job]
    jobs: list[Done]
