"""Stage routes: bulk writes over many requests, committed at once."""

from typing import Annotated

from fastapi import Depends, Header, Request, Response

from tarn.api.http.commit_wait import Commit, CommitParam, accepted_response, wait_for_snapshot
from tarn.api.http.ingest import RECORDS_RAISE, KeyHeader, ParseOptionsDep, WriteRequest, Written
from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import Caller, CallerDep, DatasetDep
from tarn.api.http.routing import IdParam, records_body, router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.api.routes.statements import StatementsDep
from tarn.datasets.registry import Dataset
from tarn.errors import Backpressure, PreconditionFailed, StageClosed, StageNotFound
from tarn.journal.formats import ENTITY_TYPES, STATEMENT_TYPES
from tarn.model.datasets.stage import NewStage, Stage, StageCommit

routes = router("/v1/datasets/{dataset}/stages", "stages")

IfMatch = Annotated[
    str | None, Header(max_length=1000, description="The id of the snapshot that must be the head; else 412.")
]


def _staging(
    request: Request,
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    stage: IdParam,
    key: KeyHeader = None,
) -> WriteRequest:
    target = services.stages.target(dataset, caller.identity.tenant, stage)
    return WriteRequest(request, services, caller, dataset, target.origin, "auto", key, target.batch)


StagingDep = Annotated[WriteRequest, Depends(_staging)]


class StagePage(Page[Stage]):
    """The caller's stages, oldest first."""


@routes.post("", status_code=201, responses=raises(Backpressure))
def create_stage(services: ServicesDep, caller: CallerDep, dataset: DatasetDep, new: NewStage) -> Stage:
    """Create a stage, to be filled by many requests and committed by one."""
    return services.stages.create(dataset, caller.identity.tenant, new, caller.act)


@routes.get("")
def list_stages(services: ServicesDep, caller: CallerDep, dataset: DatasetDep, paging: PagingDep) -> StagePage:
    """List the caller's stages."""
    stages = services.stages.page(dataset, caller.identity.tenant, paging.after, paging.fetch)
    results, cursor = paging.cut(stages, lambda stage: stage.id)
    return StagePage(results=results, next=cursor)


@routes.post("/commit", responses={**accepted_response(Written), **raises(StageNotFound, StageClosed)})
async def commit_stages(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    body: StageCommit,
    response: Response,
    commit: CommitParam = "auto",
) -> Written:
    """Commit several stages atomically: all of them become visible at once, or none."""
    note = NewStage(message=body.message, metadata=body.metadata)
    written = await run_in_threadpool(_commit, services, caller, dataset, sorted(set(body.stages)), note)
    return await _awaited(services, caller, dataset, written, commit, response)


@routes.get("/{stage}", responses=raises(StageNotFound))
def get_stage(services: ServicesDep, caller: CallerDep, dataset: DatasetDep, stage: IdParam) -> Stage:
    """Get a stage and the number of records sent to it."""
    return services.stages.get(dataset, caller.identity.tenant, stage)


@routes.post(
    "/{stage}/entities",
    responses=raises(*RECORDS_RAISE, StageNotFound),
    openapi_extra=records_body(ENTITY_TYPES),
    response_model=Written,
)
async def stage_entities(staging: StagingDep, options: ParseOptionsDep) -> Response:
    """Add entities to a stage: durable on return, visible once the stage is committed."""
    return await staging.write_entities(options)


@routes.post(
    "/{stage}/statements",
    responses=raises(*RECORDS_RAISE, StageNotFound),
    openapi_extra=records_body(STATEMENT_TYPES),
    response_model=Written,
)
async def stage_statements(staging: StagingDep, options: StatementsDep) -> Response:
    """Add statements to a stage: durable on return, visible once the stage is committed."""
    return await staging.write_statements(options)


@routes.post(
    "/{stage}/commit",
    responses={**accepted_response(Written), **raises(StageNotFound, StageClosed, PreconditionFailed)},
)
async def commit_stage(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    stage: IdParam,
    response: Response,
    commit: CommitParam = "auto",
    if_match: IfMatch = None,
) -> Written:
    """Commit a stage: everything sent to it becomes visible in one transaction.

    With `If-Match` it becomes a snapshot of its own, which the response waits for, or nothing happens.
    """
    written = await run_in_threadpool(_commit, services, caller, dataset, [stage], None, if_match)
    return await _awaited(services, caller, dataset, written, commit if if_match is None else "force", response)


@routes.delete("/{stage}", status_code=204, responses=raises(StageNotFound, StageClosed))
def abort_stage(services: ServicesDep, caller: CallerDep, dataset: DatasetDep, stage: IdParam) -> None:
    """Abort a stage and discard everything sent to it."""
    services.stages.abort(dataset, caller.identity.tenant, stage, caller.act)


def _commit(
    services: Services,
    caller: Caller,
    dataset: Dataset,
    uids: list[str],
    note: NewStage | None,
    expected: str | None = None,
) -> Written:
    tenant = caller.identity.tenant
    commit, entities, rows = services.stages.commit(dataset, tenant, uids, caller.act, note, expected)
    return Written(entities=entities, statements=rows, rejected=0, commit=commit)


async def _awaited(
    services: Services, caller: Caller, dataset: Dataset, written: Written, commit: Commit, response: Response
) -> Written:
    """Return the result with its snapshot, if `commit` waits for it. A stage without rows gets no snapshot."""
    number = written.commit if written.statements else None
    waited = await wait_for_snapshot(services, caller, dataset, number, commit)
    response.status_code = waited.status
    return written.model_copy(update={"snapshot": waited.shown})
