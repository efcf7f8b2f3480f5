"""Exports: what can be fetched, the files themselves, and what is fresh."""

from datetime import datetime
from typing import Annotated

from fastapi import Path, Request, Response
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from app.api.access import DatasetDep
from app.api.problems import Responses, raises
from app.api.routing import router
from app.api.sending import SENT, sent
from app.api.services import Services, ServicesDep
from app.errors import DocumentInvalid, ExportMissing, RangeNotSatisfiable
from app.lake import datasets, exports
from app.lake.datasets import Dataset
from app.lake.exports import Asked, State
from app.model.export import DELTA_INDEX, Export, Freshness, Kind, Made, media_type
from app.storage.store import Missing

routes = router("/v1/datasets/{dataset}", "exports")

NameParam = Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

FILE: Responses = {**SENT, **raises(ExportMissing, RangeNotSatisfiable)}


class ExportList(BaseModel):
    """Every export that was made, in the order in which they are made."""

    results: list[Export]


class Report(BaseModel):
    """When what happened last, and what is fresh."""

    tags: dict[str, datetime] = Field(description="The core's own tags.")
    waiting: int = Field(description="Rows that wait in the journal, and so are in no export.")
    exports: list[Freshness]


@routes.get("/exports", responses=raises(DocumentInvalid))
def list_exports(house: ServicesDep, dataset: DatasetDep) -> ExportList:
    """List what was exported, of which snapshot, and whether it is fresh."""
    state, asked = _looked(house, dataset)
    return ExportList(results=[_shown(made, state.stale(kind, asked)) for kind, made in state.made.items()])


@routes.get("/exports/{name}", response_class=Response, responses=FILE)
async def get_export(house: ServicesDep, dataset: DatasetDep, name: NameParam, request: Request) -> Response:
    """Get an export: the whole file, or the part that `Range` asks for."""
    return await _sent(house, dataset, name, request)


@routes.head("/exports/{name}", response_class=Response, responses=FILE)
async def head_export(house: ServicesDep, dataset: DatasetDep, name: NameParam, request: Request) -> Response:
    """Look what an export is like, without its bytes."""
    return await _sent(house, dataset, name, request)


@routes.get("/exports/delta/{name}", response_class=Response, responses=FILE)
async def get_export_delta(house: ServicesDep, dataset: DatasetDep, name: NameParam, request: Request) -> Response:
    """Get one of the deltas that `delta.json` tells of."""
    return await _sent_delta(house, dataset, name, request)


@routes.head("/exports/delta/{name}", response_class=Response, responses=FILE)
async def head_export_delta(house: ServicesDep, dataset: DatasetDep, name: NameParam, request: Request) -> Response:
    """Look what a delta is like, without its bytes."""
    return await _sent_delta(house, dataset, name, request)


@routes.get("/freshness", responses=raises(DocumentInvalid))
def get_freshness(house: ServicesDep, dataset: DatasetDep) -> Report:
    """Show the core's tags, which exports are not fresh, and why."""
    state, asked = _looked(house, dataset)
    found = []
    for kind in Kind:
        reason = state.stale(kind, asked)
        at = state.tags.get(kind.form.tag)
        found.append(Freshness(kind=kind, tag=kind.form.tag, at=at, fresh=reason is None, reason=reason))
    return Report(tags=dict(sorted(state.tags.items())), waiting=state.waiting, exports=found)


def _looked(house: Services, dataset: Dataset) -> tuple[State, Asked]:
    config, tag = datasets.read(house.store, dataset)
    with house.database.read() as connection:
        return exports.state(connection, dataset), Asked(config.compression, tag)


def _shown(made: Made, reason: str | None) -> Export:
    return Export(
        kind=made.kind,
        name=made.name,
        media_type=media_type(made.kind, made.name),
        snapshot=made.snapshot,
        seq=made.seq,
        made=made.made,
        size=made.size,
        checksum=made.sha1,
        version=made.version,
        fresh=reason is None,
        reason=reason,
    )


async def _sent(house: Services, dataset: Dataset, name: str, request: Request) -> Response:
    def find() -> dict[str, Made]:
        with house.database.read() as connection:
            return {made.name: made for made in exports.made_of(connection, dataset).values()}

    found = await run_in_threadpool(find)
    delta = Kind.DELTA in {made.kind for made in found.values()}
    try:
        if name in found:
            kind = found[name].kind
            return await sent(house.store, request, dataset.layout.export(kind, name), media_type(kind, name), name)
        if name == DELTA_INDEX and delta:
            return await sent(house.store, request, dataset.layout.delta_index, "application/json", name)
    except Missing:
        pass
    known = sorted({*found, *([DELTA_INDEX] if delta else [])})
    raise ExportMissing(f"there is no export {name!r} of {dataset.name!r}; there is {', '.join(known) or 'none'}")


async def _sent_delta(house: Services, dataset: Dataset, name: str, request: Request) -> Response:
    try:
        return await sent(house.store, request, dataset.layout.export_delta(name), media_type(Kind.DELTA, name), name)
    except Missing:
        raise ExportMissing(f"there is no delta {name!r} of {dataset.name!r}; delta.json tells of all") from None
