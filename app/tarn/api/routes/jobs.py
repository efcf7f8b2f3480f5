"""Jobs: long work, to be waited for or looked at."""

from typing import Annotated

from fastapi import Query, Response

from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.polling import poll_intervals
from tarn.api.http.problems import raises
from tarn.api.http.route_access import Caller, CallerDep
from tarn.api.http.routing import IdParam, router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.datasets import registry as datasets
from tarn.db import jobs
from tarn.errors import Forbidden, JobConflict, JobNotFound
from tarn.model.job import Job

routes = router("/v1/jobs", "jobs")

WaitParam = Annotated[float, Query(ge=0, le=300, description="Seconds to wait for the job to be over.")]


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
    found = await run_in_threadpool(visible, house, caller, job)
    return await wait_for_job(house, found, wait)


@routes.post(
    "/{job}/retry",
    status_code=202,
    responses={200: {"model": Job, "description": "Over"}, **raises(JobNotFound, JobConflict, Forbidden)},
)
async def retry_job(
    house: ServicesDep, caller: CallerDep, job: IdParam, response: Response, wait: WaitParam = 0
) -> Job:
    """Try a job again that failed or was cancelled; what it does must still be allowed."""
    again = await run_in_threadpool(_retry, house, caller, job)
    return await job_response(house, again, wait, response)


@routes.delete(
    "/{job}",
    status_code=202,
    responses={200: {"model": Job, "description": "Over"}, **raises(JobNotFound, JobConflict)},
)
async def cancel_job(
    house: ServicesDep, caller: CallerDep, job: IdParam, response: Response, wait: WaitParam = 0
) -> Job:
    """Give a job up: at once if it waits, at its next step if it runs. What is over stays as it is."""
    asked = await run_in_threadpool(_cancel, house, caller, job)
    return await job_response(house, asked, wait, response)


async def wait_for_job(house: Services, job: Job, wait: float) -> Job:
    """The job when it is over, or as it is when the wait is, or when the server stops."""
    if not job.state.over:
        async for _ in poll_intervals(house, wait):
            job = await run_in_threadpool(_read, house, job.id)
            if job.state.over:
                break
    return job


async def job_response(house: Services, job: Job, wait: float, response: Response) -> Job:
    """Long work's answer: 202 and where to look, or 200 if it was over within the wait."""
    job = await wait_for_job(house, job, wait)
    response.status_code = 200 if job.state.over else 202
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job


def visible(house: Services, caller: Caller, job_id: str) -> Job:
    """A job that is the caller's to look at. Raises JobNotFound."""
    job = _read(house, job_id)
    if job.tenant != caller.identity.tenant and not caller.identity.administers_lake:
        raise JobNotFound(f"there is no job {job_id!r}")
    return job


def _retry(house: Services, caller: Caller, job_id: str) -> Job:
    job = visible(house, caller, job_id)
    with house.database.write() as connection:
        for dataset in datasets.page(connection, lambda _: True, None, None):
            if dataset.id in job.dataset_ids:
                caller.require(dataset.name, job.operation.level)
        again = jobs.retry(connection, job_id)
        caller.act.done(connection)
    return again


def _cancel(house: Services, caller: Caller, job_id: str) -> Job:
    visible(house, caller, job_id)
    with house.database.write() as connection:
        cancelled = jobs.cancel(connection, job_id)
        caller.act.done(connection)
    return cancelled


def _read(house: Services, job_id: str) -> Job:
    with house.database.read() as connection:
        return jobs.get(connection, job_id)
