"""Stages: the bulk writer."""

from typing import Annotated

from fastapi import Depends, Header, Request, Response

from tarn.api.http.commit_wait import Commit, CommitParam, accepted_response, wait_for_snapshot
from tarn.api.http.ingest import RECORDS_RAISE, HowToReadDep, KeyHeader, WriteRequest, Written
from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import Caller, CallerDep, DatasetDep
from tarn.api.http.routing import IdParam, records_body, router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.api.routes.statements import StatementsDep
from tarn.datasets.registry import Dataset
from tarn.errors import Backpressure, PreconditionFailed, StageClosed, StageNotFound
from tarn.journal import stages
from tarn.journal.formats import ENTITY_TYPES, STATEMENT_TYPES
from tarn.model.names import Origin
from tarn.model.stage import NewStage, Stage, StageCommit

routes = router("/v1/datasets/{dataset}/stages", "stages")

IfMatch = Annotated[str | None, Header(max_length=1000, description="The snapshot that must be the head.")]


def _staging(
    request: Request,
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    stage: IdParam,
    key: KeyHeader = None,
) -> WriteRequest:
    with house.database.read() as connection:
        row = stages.find(connection, dataset, caller.identity.tenant, stage)
    origin = None if row.origin is None else Origin(row.origin)
    return WriteRequest(request, house, caller, dataset, origin, "auto", key, row.id)


StagingDep = Annotated[WriteRequest, Depends(_staging)]


class StagePage(Page[Stage]):
    """The caller's stages, oldest first."""


@routes.post("", status_code=201, responses=raises(Backpressure))
def create_stage(house: ServicesDep, caller: CallerDep, dataset: DatasetDep, new: NewStage) -> Stage:
    """Open a stage, to be filled by many requests and committed by one."""
    with house.database.write() as connection:
        stage = stages.create(connection, house.settings, dataset, caller.identity.tenant, new)
        caller.act.done(connection, target=f"{caller.act.target}/{stage.id}")
    return stage


@routes.get("")
def list_stages(house: ServicesDep, caller: CallerDep, dataset: DatasetDep, paging: PagingDep) -> StagePage:
    """List the caller's stages."""
    with house.database.read() as connection:
        found = stages.page(connection, dataset, caller.identity.tenant, paging.after, paging.fetch)
    results, cursor = paging.cut(found, lambda stage: stage.id)
    return StagePage(results=results, next=cursor)


@routes.post("/commit", responses={**accepted_response(Written), **raises(StageNotFound, StageClosed)})
async def commit_stages(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    body: StageCommit,
    response: Response,
    commit: CommitParam = "auto",
) -> Written:
    """Commit several stages as one: all of them become visible at once, or none."""
    note = NewStage(message=body.message, metadata=body.metadata)
    written = await run_in_threadpool(_commit, house, caller, dataset, sorted(set(body.stages)), note)
    return await _awaited(house, caller, dataset, written, commit, response)


@routes.get("/{stage}", responses=raises(StageNotFound))
def get_stage(house: ServicesDep, caller: CallerDep, dataset: DatasetDep, stage: IdParam) -> Stage:
    """Show a stage and what was sent to it."""
    with house.database.read() as connection:
        return stages.get(connection, dataset, caller.identity.tenant, stage)


@routes.post(
    "/{stage}/entities",
    responses=raises(*RECORDS_RAISE, StageNotFound),
    openapi_extra=records_body(ENTITY_TYPES),
    response_model=Written,
)
async def stage_entities(staging: StagingDep, reading: HowToReadDep) -> Response:
    """Send entities to a stage: kept when answered, seen when it commits."""
    return await staging.take_entities(reading)


@routes.post(
    "/{stage}/statements",
    responses=raises(*RECORDS_RAISE, StageNotFound),
    openapi_extra=records_body(STATEMENT_TYPES),
    response_model=Written,
)
async def stage_statements(staging: StagingDep, reading: StatementsDep) -> Response:
    """Send statements to a stage: kept when answered, seen when it commits."""
    return await staging.take_statements(reading)


@routes.post(
    "/{stage}/commit",
    responses={**accepted_response(Written), **raises(StageNotFound, StageClosed, PreconditionFailed)},
)
async def commit_stage(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    stage: IdParam,
    response: Response,
    commit: CommitParam = "auto",
    if_match: IfMatch = None,
) -> Written:
    """Make everything that was sent to a stage visible, in one transaction.

    With `If-Match` it becomes a snapshot of its own, which is waited for, or nothing happens.
    """
    written = await run_in_threadpool(_commit, house, caller, dataset, [stage], None, if_match)
    return await _awaited(house, caller, dataset, written, commit if if_match is None else "force", response)


@routes.delete("/{stage}", status_code=204, responses=raises(StageNotFound, StageClosed))
def abort_stage(house: ServicesDep, caller: CallerDep, dataset: DatasetDep, stage: IdParam) -> None:
    """Give a stage up, with everything that was sent to it."""
    stages.abort(house.database, dataset, caller.identity.tenant, stage, caller.act)


def _commit(
    house: Services,
    caller: Caller,
    dataset: Dataset,
    uids: list[str],
    note: NewStage | None,
    expected: str | None = None,
) -> Written:
    tenant = caller.identity.tenant
    with house.database.write() as connection:
        commit, entities, rows = stages.commit(connection, dataset, tenant, uids, caller.act, note, expected)
    return Written(entities=entities, statements=rows, rejected=0, commit=commit)


async def _awaited(
    house: Services, caller: Caller, dataset: Dataset, written: Written, commit: Commit, response: Response
) -> Written:
    """What was written, with its snapshot where that is waited for; a stage without rows becomes none."""
    number = written.commit if written.statements else None
    waited = await wait_for_snapshot(house, caller, dataset, number, commit)
    response.status_code = waited.status
    return written.model_copy(update={"snapshot": waited.shown})
