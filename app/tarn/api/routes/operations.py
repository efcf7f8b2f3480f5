"""Operations: long work that a caller asks for, done by a job."""

from fastapi import Response
from pydantic import BaseModel

from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.problems import Responses
from tarn.api.http.route_access import Caller, CallerDep, DatasetDep
from tarn.api.http.routing import router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.api.routes.jobs import WaitParam, job_response
from tarn.datasets import registry as datasets
from tarn.datasets.registry import Dataset
from tarn.db import jobs
from tarn.model.job import (
    CompactOptions,
    CrawlOptions,
    ExportOptions,
    FlushOptions,
    Job,
    MakeOptions,
    Operation,
    OptimizeOptions,
    PurgeOptions,
    RevertOptions,
    VacuumOptions,
    VerifyOptions,
)

routes = router("/v1/datasets/{dataset}/operations", "operations")
lake_routes = router("/v1/operations", "operations")

NO_OPTIONS = FlushOptions()
"""A body that may be left out is not one that may be null: generated clients stumble over that."""

OVER: Responses = {200: {"model": Job, "description": "Over within the wait"}}


@routes.post("/flush", status_code=202, responses=OVER)
async def flush_dataset(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: FlushOptions = NO_OPTIONS,
    wait: WaitParam = 0,
) -> Job:
    """Flush what waits in the dataset's journal into a snapshot."""
    return await _enqueued(house, caller, dataset, Operation.FLUSH, options, wait, response)


@routes.post("/compact", status_code=202, responses=OVER)
async def compact_dataset(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: CompactOptions = CompactOptions(),  # noqa: B008 - the same for all
    wait: WaitParam = 0,
) -> Job:
    """Fold fresh files, and what happened to older ones, into sorted runs. What is visible stays the same."""
    return await _enqueued(house, caller, dataset, Operation.COMPACT, options, wait, response)


@routes.post("/optimize", status_code=202, responses=OVER)
async def optimize_dataset(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: OptimizeOptions = OptimizeOptions(),  # noqa: B008 - the same for all
    wait: WaitParam = 0,
) -> Job:
    """Pack small files into larger ones, with the same rows."""
    return await _enqueued(house, caller, dataset, Operation.OPTIMIZE, options, wait, response)


@routes.post("/vacuum", status_code=202, responses=OVER)
async def vacuum_dataset(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: VacuumOptions = VacuumOptions(),  # noqa: B008 - the same for all
    wait: WaitParam = 0,
) -> Job:
    """Give up snapshots that are older than the policy keeps, and delete what nothing needs any more."""
    return await _enqueued(house, caller, dataset, Operation.VACUUM, options, wait, response)


@routes.post("/verify", status_code=202, responses=OVER)
async def verify_dataset(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: VerifyOptions = VerifyOptions(),  # noqa: B008 - the same for all
    wait: WaitParam = 0,
) -> Job:
    """Look whether everything that the dataset consists of is there and fits together."""
    return await _enqueued(house, caller, dataset, Operation.VERIFY, options, wait, response)


@routes.post("/revert", status_code=202, responses=OVER)
async def revert_dataset(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: RevertOptions,
    wait: WaitParam = 0,
) -> Job:
    """Make a snapshot whose state is an older one's, or the present one without what a snapshot did."""
    return await _enqueued(house, caller, dataset, Operation.REVERT, options, wait, response)


@routes.post("/purge", status_code=202, responses=OVER)
async def purge_dataset(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: PurgeOptions,
    wait: WaitParam = 0,
) -> Job:
    """Erase entities for good: from every file, with every older snapshot."""
    return await _enqueued(house, caller, dataset, Operation.PURGE, options, wait, response)


@routes.post("/export", status_code=202, responses=OVER)
async def export_dataset(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: ExportOptions,
    wait: WaitParam = 0,
) -> Job:
    """Flush, and make some exports of the head, where they are not fresh."""
    return await _enqueued(house, caller, dataset, Operation.EXPORT, options, wait, response)


@routes.post("/make", status_code=202, responses=OVER)
async def make_dataset(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: MakeOptions = MakeOptions(),  # noqa: B008 - the same for all
    wait: WaitParam = 0,
) -> Job:
    """Flush, and make every export that is not fresh."""
    return await _enqueued(house, caller, dataset, Operation.MAKE, options, wait, response)


@routes.post("/crawl", status_code=202, responses=OVER)
async def crawl_dataset(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: CrawlOptions,
    wait: WaitParam = 0,
) -> Job:
    """Take the files below a folder, a store's prefix or an index page into the archive, with their Documents."""
    house.fetcher.check(options.uri)
    return await _enqueued(house, caller, dataset, Operation.CRAWL, options, wait, response)


@lake_routes.post("/flush", status_code=202, responses=OVER)
async def flush_datasets(
    house: ServicesDep,
    caller: CallerDep,
    response: Response,
    options: FlushOptions = NO_OPTIONS,  # noqa: ARG001 - there are none yet, and what is sent is refused
    wait: WaitParam = 0,
) -> Job:
    """Flush every dataset that the caller may maintain, as of now."""
    job = await run_in_threadpool(_flush_all, house, caller)
    return await job_response(house, job, wait, response)


async def _enqueued(
    house: Services,
    caller: Caller,
    dataset: Dataset,
    operation: Operation,
    options: BaseModel,
    wait: float,
    response: Response,
) -> Job:
    def enqueue() -> Job:
        arguments = options.model_dump(mode="json", exclude_unset=True)
        with house.database.write() as connection:
            job = jobs.enqueue(connection, operation, dataset.id, caller.identity.tenant, caller.act.request, arguments)
            # What is to be erased is not to be kept here.
            told = {name: value for name, value in arguments.items() if name != "entity_ids"}
            if "uri" in told:
                told["uri"] = told["uri"].partition("?")[0]  # the query may hold a signature
            caller.act.done(connection, job=job.id, **told)
        return job

    return await job_response(house, await run_in_threadpool(enqueue), wait, response)


def _flush_all(house: Services, caller: Caller) -> Job:
    def maintained(name: str) -> bool:
        held = caller.identity.level_on(name)
        return held is not None and held.allows(Operation.FLUSH.level)

    with house.database.write() as connection:
        found = datasets.page(connection, maintained, None, None)
        arguments = {"dataset_ids": [dataset.id for dataset in found]}
        tenant, request = caller.identity.tenant, caller.act.request
        job = jobs.enqueue(connection, Operation.FLUSH, None, tenant, request, arguments)
        caller.act.done(connection, job=job.id, datasets=len(found))
    return job
