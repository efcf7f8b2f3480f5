"""A job: long work that the API hands to a worker."""

import random
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice
from typing import Any

from pydantic import BaseModel, Field

from app.errors import Problem
from app.model.backoff import delays
from app.model.names import DatasetName

MOST_ATTEMPTS = 20
"""How often a job is begun before it counts as one that cannot be done, or that ends every worker it meets."""

RETRY_BASE, RETRY_CAP = 5.0, 300.0
"""Seconds of back-off between attempts: the first bound, and the last. Half of each is waited at least."""

LONG_WAIT = timedelta(hours=1)
"""Between two tries of what must be done some time, and cannot be done soon."""


def _upper_half(_: float, bound: float) -> float:
    return random.uniform(bound / 2, bound)  # noqa: S311 - it spreads load, it guards nothing


class NotYet(Exception):
    """A job has done what it could, and is to go on at a later moment."""

    def __init__(self, until: datetime) -> None:
        super().__init__(f"goes on at {until}")
        self.until = until


class Operation(StrEnum):
    """What a job does."""

    DELETE = "delete"

    @property
    def never_given_up(self) -> bool:
        """Whether it must end well some time: a dataset half deleted is hidden, and keeps its name from everybody."""
        return self is Operation.DELETE

    def next_try(self, attempts: int, retryable: bool, moment: datetime) -> datetime | None:
        """When to try again after this many attempts, the last of which failed at `moment`; None: not at all."""
        if retryable and attempts < MOST_ATTEMPTS:
            waits = delays(RETRY_BASE, RETRY_CAP, draw=_upper_half)
            return moment + timedelta(seconds=next(islice(waits, attempts - 1, None)))
        return moment + LONG_WAIT if self.never_given_up else None


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
    problem: Problem | None = Field(description="Why it failed; of a job that is to be tried again, the last time.")
    not_before: datetime | None = Field(description="When it is to be tried again.")
    disturbed: datetime | None = Field(exclude=True)
    """When an attempt last ended otherwise than by its worker's own will: its last request may still be under way."""
