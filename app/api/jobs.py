"""Jobs: long work, to be waited for or looked at."""

import time
from typing import Annotated

from anyio import sleep
from fastapi import Query, Response
from starlette.concurrency import run_in_threadpool

from app.api.access import Caller, CallerDep
from app.api.paging import Page, PagingDep
from app.api.problems import raises
from app.api.routing import IdParam, router
from app.api.services import Services, ServicesDep
from app.db import jobs
from app.errors import JobNotFound
from app.model.job import Job

routes = router("/v1/jobs", "jobs")

WaitParam = Annotated[float, Query(ge=0, le=300, description="Seconds to wait for the job to be over.")]

FIRST_LOOK, LAST_LOOK = 0.02, 0.5
"""Seconds between two looks at a job that is waited for: quick at first, then seldom."""


class JobPage(Page[Job]):
    """Jobs, newest first."""


@routes.get("")
def list_jobs(house: ServicesDep, caller: CallerDep, paging: PagingDep) -> JobPage:
    """List the caller's jobs; the lake's administrator sees everybody's."""
    tenant = None if caller.identity.administers_lake else caller.identity.tenant
    with house.database.read() as connection:
        found = jobs.newest(connection, tenant, paging.after, paging.fetch)
    results, cursor = paging.cut(found, lambda job: job.id)
    return JobPage(results=results, next=cursor)


@routes.get("/{job}", responses=raises(JobNotFound))
async def get_job(house: ServicesDep, caller: CallerDep, job: IdParam, wait: WaitParam = 0) -> Job:
    """Show a job, at once or when it is over."""
    found = await run_in_threadpool(_visible, house, caller, job)
    return await over(house, found, wait)


async def over(house: Services, job: Job, wait: float) -> Job:
    """The job when it is over, or as it is when the wait is, or when the server stops."""
    deadline, pause = time.monotonic() + wait, FIRST_LOOK
    while not job.state.over and time.monotonic() < deadline and not house.stopping.is_set():
        await sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(LAST_LOOK, pause * 1.5)
        job = await run_in_threadpool(_read, house, job.id)
    return job


async def job_answer(house: Services, job: Job, wait: float, response: Response) -> Job:
    """Long work's answer: 202 and where to look, or 200 if it was over within the wait."""
    job = await over(house, job, wait)
    response.status_code = 200 if job.state.over else 202
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job


def _visible(house: Services, caller: Caller, job_id: str) -> Job:
    job = _read(house, job_id)
    if job.tenant != caller.identity.tenant and not caller.identity.administers_lake:
        raise _missing(job_id)
    return job


def _read(house: Services, job_id: str) -> Job:
    with house.database.read() as connection:
        job = jobs.find(connection, job_id)
    if job is None:
        raise _missing(job_id)
    return job


def _missing(job_id: str) -> JobNotFound:
    return JobNotFound(f"there is no job {job_id!r}")
