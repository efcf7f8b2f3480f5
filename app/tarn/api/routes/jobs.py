"""Job routes: list, get, wait for, retry and cancel jobs."""

from typing import Annotated

from fastapi import Query, Response

from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.polling import wait_until
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep
from tarn.api.http.routing import IdParam, router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.errors import Forbidden, JobConflict, JobNotFound
from tarn.model.work.job import Job

routes = router("/v1/jobs", "jobs")

WaitParam = Annotated[float, Query(ge=0, le=300, description="Seconds to wait for the job to end.")]


class JobPage(Page[Job]):
    """Jobs, newest first."""


@routes.get("")
def list_jobs(services: ServicesDep, caller: CallerDep, paging: PagingDep) -> JobPage:
    """List the caller's jobs; an administrator of the lake sees those of all tenants."""
    tenant = None if caller.identity.administers_lake else caller.identity.tenant
    jobs = services.jobs.page(tenant, paging.after, paging.fetch)
    results, cursor = paging.cut(jobs, lambda job: job.id)
    return JobPage(results=results, next=cursor)


@routes.get("/{job}", responses=raises(JobNotFound))
async def get_job(services: ServicesDep, caller: CallerDep, job: IdParam, wait: WaitParam = 0) -> Job:
    """Get a job, now or once it has ended."""
    current = await run_in_threadpool(services.jobs.get_visible, job, caller.identity)
    return await wait_for_job(services, current, wait)


@routes.post(
    "/{job}/retry",
    status_code=202,
    responses={
        200: {"model": Job, "description": "The job ended within the wait"},
        **raises(JobNotFound, JobConflict, Forbidden),
    },
)
async def retry_job(
    services: ServicesDep, caller: CallerDep, job: IdParam, response: Response, wait: WaitParam = 0
) -> Job:
    """Retry a job that failed or was cancelled; the caller must still have the level that its operation requires."""

    def retry() -> Job:
        return services.jobs.retry(services.jobs.get_visible(job, caller.identity), caller.require, caller.act)

    return await job_response(services, await run_in_threadpool(retry), wait, response)


@routes.delete(
    "/{job}",
    status_code=202,
    responses={200: {"model": Job, "description": "The job ended within the wait"}, **raises(JobNotFound, JobConflict)},
)
async def cancel_job(
    services: ServicesDep, caller: CallerDep, job: IdParam, response: Response, wait: WaitParam = 0
) -> Job:
    """Cancel a job: immediately if it is queued, at its next step if it is running. An ended job is unchanged."""

    def cancel() -> Job:
        return services.jobs.cancel(services.jobs.get_visible(job, caller.identity), caller.act)

    return await job_response(services, await run_in_threadpool(cancel), wait, response)


async def wait_for_job(services: Services, job: Job, wait: float) -> Job:
    """Wait for a job to end and return its state. Returns early after `wait` seconds, or when the server shuts down."""
    if job.state.over or not wait:
        return job

    def check() -> Job | None:
        nonlocal job
        job = services.jobs.get(job.id)
        return job if job.state.over else None

    await wait_until(services, wait, services.jobs.topics(job), lambda: run_in_threadpool(check))
    return job


async def job_response(services: Services, job: Job, wait: float, response: Response) -> Job:
    """Set the response of a job: 202 and its location, or 200 if it ended within the wait."""
    job = await wait_for_job(services, job, wait)
    response.status_code = 200 if job.state.over else 202
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job
