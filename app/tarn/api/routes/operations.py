"""Operation routes: enqueue jobs for flush, compact, vacuum, export and other operations on a dataset."""

from fastapi import Response
from pydantic import BaseModel

from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.problems import Responses
from tarn.api.http.route_access import Caller, CallerDep, DatasetDep
from tarn.api.http.routing import router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.api.routes.jobs import WaitParam, job_response
from tarn.datasets.registry import Dataset
from tarn.model.work.job import (
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
"""Default of an optional body. Not None: then the body could be null, which generated clients handle badly."""

OVER: Responses = {200: {"model": Job, "description": "The job ended within the wait"}}


@routes.post("/flush", status_code=202, responses=OVER)
async def flush_dataset(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: FlushOptions = NO_OPTIONS,
    wait: WaitParam = 0,
) -> Job:
    """Flush the dataset's journal into a snapshot."""
    return await _enqueued(services, caller, dataset, Operation.FLUSH, options, wait, response)


@routes.post("/compact", status_code=202, responses=OVER)
async def compact_dataset(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: CompactOptions = CompactOptions(),  # noqa: B008 - the same for all
    wait: WaitParam = 0,
) -> Job:
    """Compact a dataset: fold new files and changes of older ones into sorted files that do not overlap.

    The visible state is unchanged.
    """
    return await _enqueued(services, caller, dataset, Operation.COMPACT, options, wait, response)


@routes.post("/optimize", status_code=202, responses=OVER)
async def optimize_dataset(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: OptimizeOptions = OptimizeOptions(),  # noqa: B008 - the same for all
    wait: WaitParam = 0,
) -> Job:
    """Pack small files into larger ones with the same rows."""
    return await _enqueued(services, caller, dataset, Operation.OPTIMIZE, options, wait, response)


@routes.post("/vacuum", status_code=202, responses=OVER)
async def vacuum_dataset(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: VacuumOptions = VacuumOptions(),  # noqa: B008 - the same for all
    wait: WaitParam = 0,
) -> Job:
    """Expire snapshots that the retention policy no longer keeps, and delete unreferenced files."""
    return await _enqueued(services, caller, dataset, Operation.VACUUM, options, wait, response)


@routes.post("/verify", status_code=202, responses=OVER)
async def verify_dataset(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: VerifyOptions = VerifyOptions(),  # noqa: B008 - the same for all
    wait: WaitParam = 0,
) -> Job:
    """Verify that all files of a dataset exist and are consistent."""
    return await _enqueued(services, caller, dataset, Operation.VERIFY, options, wait, response)


@routes.post("/revert", status_code=202, responses=OVER)
async def revert_dataset(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: RevertOptions,
    wait: WaitParam = 0,
) -> Job:
    """Create a snapshot with the state of an older one, or with the current state minus the changes of one snapshot."""
    return await _enqueued(services, caller, dataset, Operation.REVERT, options, wait, response)


@routes.post("/purge", status_code=202, responses=OVER)
async def purge_dataset(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: PurgeOptions,
    wait: WaitParam = 0,
) -> Job:
    """Erase entities permanently, from every file; all older snapshots are deleted."""
    return await _enqueued(services, caller, dataset, Operation.PURGE, options, wait, response)


@routes.post("/export", status_code=202, responses=OVER)
async def export_dataset(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: ExportOptions,
    wait: WaitParam = 0,
) -> Job:
    """Flush, and create the requested exports of the head that are not fresh."""
    return await _enqueued(services, caller, dataset, Operation.EXPORT, options, wait, response)


@routes.post("/make", status_code=202, responses=OVER)
async def make_dataset(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: MakeOptions = MakeOptions(),  # noqa: B008 - the same for all
    wait: WaitParam = 0,
) -> Job:
    """Flush, and create every export that is not fresh."""
    return await _enqueued(services, caller, dataset, Operation.MAKE, options, wait, response)


@routes.post("/crawl", status_code=202, responses=OVER)
async def crawl_dataset(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    options: CrawlOptions,
    wait: WaitParam = 0,
) -> Job:
    """Archive the files below a folder, a storage prefix or an index page, and write their Document entities."""
    services.fetcher.check(options.uri)
    return await _enqueued(services, caller, dataset, Operation.CRAWL, options, wait, response)


@lake_routes.post("/flush", status_code=202, responses=OVER)
async def flush_datasets(
    services: ServicesDep,
    caller: CallerDep,
    response: Response,
    options: FlushOptions = NO_OPTIONS,  # noqa: ARG001 - it has no fields yet; declaring it rejects unknown ones
    wait: WaitParam = 0,
) -> Job:
    """Flush every dataset on which the caller currently holds `maintain`."""

    def is_maintained(name: str) -> bool:
        level = caller.identity.level_on(name)
        return level is not None and level.allows(Operation.FLUSH.level)

    job = await run_in_threadpool(services.jobs.enqueue_flush_of_all, is_maintained, caller.act)
    return await job_response(services, job, wait, response)


async def _enqueued(
    services: Services,
    caller: Caller,
    dataset: Dataset,
    operation: Operation,
    options: BaseModel,
    wait: float,
    response: Response,
) -> Job:
    def enqueue() -> Job:
        arguments = options.model_dump(mode="json", exclude_unset=True)
        # Ids that are to be erased must not stay in the audit log.
        audited = {name: value for name, value in arguments.items() if name != "entity_ids"}
        if "uri" in audited:
            audited["uri"] = audited["uri"].partition("?")[0]  # the query may hold a signature
        return services.jobs.enqueue(operation, dataset, caller.act, arguments, **audited)

    return await job_response(services, await run_in_threadpool(enqueue), wait, response)
