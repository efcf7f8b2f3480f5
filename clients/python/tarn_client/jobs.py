"""Waiting for background jobs."""

import math
import time
from typing import TYPE_CHECKING, Any

from tarn_client.errors import JobCancelled, Problem
from tarn_client.paths import path_of

if TYPE_CHECKING:
    from tarn_client.connection import Connection

JOBS = "/v1/jobs"

LONGEST_WAIT = 30.0
"""Seconds that one request waits for a job: some proxies close connections that are idle for longer."""


def wait_for_job(connection: "Connection", job_id: str, seconds: float = math.inf) -> dict[str, Any]:
    """Return the job when it has finished, or in its current state after this many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        remaining = max(0.0, deadline - time.monotonic())
        job = connection.read(path_of(JOBS, job_id), {"wait": min(remaining, LONGEST_WAIT)})
        if job["finished"] is not None or remaining <= LONGEST_WAIT:
            return job


def require_success(job: dict[str, Any]) -> dict[str, Any]:
    """Return a finished job that succeeded. Raises its Problem, or JobCancelled."""
    if job["state"] == "cancelled":
        raise JobCancelled(f"the job {job['id']} was cancelled")
    if job["problem"] is not None:
        raise Problem(job["problem"])
    return job
