"""A job: long work that the API hands to a worker."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from app.errors import Problem
from app.model.names import DatasetName


class Operation(StrEnum):
    """What a job does."""

    DELETE = "delete"


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        return self in (JobState.DONE, JobState.FAILED)


class Progress(BaseModel):
    """How far a job is; `total` is absent while it is not known."""

    done: int
    total: int | None = None
    unit: str


class Job(BaseModel):
    """One job, as its row has it."""

    id: str
    operation: Operation
    dataset: DatasetName
    dataset_id: str
    tenant: str
    state: JobState
    attempts: int
    created: datetime
    started: datetime | None
    finished: datetime | None
    progress: Progress | None
    result: dict[str, Any] | None
    problem: Problem | None
