"""Exports: what can be fetched, the files themselves, and what is fresh."""

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated

import orjson
from fastapi import Path, Query, Request, Response
from pydantic import BaseModel, Field

from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.problems import Responses, raises
from tarn.api.http.route_access import DatasetDep
from tarn.api.http.routing import router
from tarn.api.http.services.container import Services, ServicesDep, public_url
from tarn.api.http.streaming.file_responses import SENT, file_response
from tarn.datasets import registry as datasets
from tarn.datasets.registry import Dataset
from tarn.errors import DocumentInvalid, ExportMissing, RangeNotSatisfiable
from tarn.lake import export_deltas as deltas
from tarn.lake import export_records as exports
from tarn.lake.export_records import ExportState, RequestedFormat
from tarn.model.dataset import etag, matches_none_match
from tarn.model.export import DELTA_INDEX, Export, ExportRecord, Freshness, Kind, media_type
from tarn.storage.store import Missing

routes = router("/v1/datasets/{dataset}", "exports")

NameParam = Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

MISSING: Responses = raises(ExportMissing)

UntilParam = Annotated[
    str | None,
    Query(max_length=32, pattern=r"^[0-9]{14}-[a-z0-9]+$", description="The last version to list."),
]

FILE: Responses = {**SENT, **raises(ExportMissing, RangeNotSatisfiable)}


class ExportList(BaseModel):
    """Every export that was made, in the order in which they are made."""

    results: list[Export]


class Delta(BaseModel):
    """One file of changed entities."""

    version: str
    name: str
    from_: str | None = Field(alias="from", description="The version of the delta that it follows on; null: of none.")
    snapshot: str | None
    size: int
    content: int | None = Field(None, description="The number of the snapshot whose entities it ends at.")
    restart: bool | None = Field(
        None, description="True: entities were exported since `from`, and who has loaded those must load them again."
    )


class DeltaIndex(BaseModel):
    """The deltas that are kept, as yente loads them."""

    dataset: str
    updated_at: datetime
    versions: dict[str, str] = Field(description="Addresses of those that follow on each other, by version.")
    deltas: list[Delta]


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


@routes.get(f"/exports/{DELTA_INDEX}", responses={304: {"description": "The caller has it already"}, **MISSING})
async def get_delta_index(
    house: ServicesDep, dataset: DatasetDep, request: Request, until: UntilParam = None
) -> DeltaIndex:
    """List the deltas that are kept, with their addresses, up to a version."""
    return await _delta_index(house, dataset, request, until)  # type: ignore[return-value]  # FastAPI passes it on


@routes.head(f"/exports/{DELTA_INDEX}", response_class=Response, responses=MISSING)
async def head_delta_index(
    house: ServicesDep, dataset: DatasetDep, request: Request, until: UntilParam = None
) -> Response:
    """Show the headers of the list of deltas."""
    return await _delta_index(house, dataset, request, until)


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


def _looked(house: Services, dataset: Dataset) -> tuple[ExportState, RequestedFormat]:
    config, tag = datasets.read(house.store, dataset)
    with house.database.read() as connection:
        return exports.state(connection, dataset), RequestedFormat(config.compression, tag)


def _shown(made: ExportRecord, reason: str | None) -> Export:
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
        invalid=made.invalid,
        fresh=reason is None,
        reason=reason,
    )


async def _sent(house: Services, dataset: Dataset, name: str, request: Request) -> Response:
    def find() -> dict[str, ExportRecord]:
        with house.database.read() as connection:
            return {made.name: made for made in exports.made_of(connection, dataset).values()}

    found = await run_in_threadpool(find)
    try:
        if name in found:
            kind = found[name].kind
            return await file_response(
                house.store, request, dataset.layout.export(kind, name), media_type(kind, name), name
            )
    except Missing:
        pass
    raise _missing(dataset, name, found.values())


async def _delta_index(house: Services, dataset: Dataset, request: Request, until: str | None) -> Response:
    def find() -> dict[Kind, ExportRecord]:
        with house.database.read() as connection:
            return exports.made_of(connection, dataset)

    found = await run_in_threadpool(find)
    if (delta := found.get(Kind.DELTA)) is None:
        raise _missing(dataset, DELTA_INDEX, found.values())
    text = orjson.dumps(deltas.index(dataset.name, delta, public_url(house, request), until))
    headers = {"ETag": etag(text), "Content-Length": str(len(text))}
    named = request.headers.get("If-None-Match")
    if named is not None and matches_none_match(named, headers["ETag"]):
        return Response(status_code=304, headers={"ETag": headers["ETag"]})
    content = b"" if request.method == "HEAD" else text
    return Response(content, headers=headers, media_type="application/json")


def _missing(dataset: Dataset, name: str, made: Iterable[ExportRecord]) -> ExportMissing:
    known = sorted({one.name for one in made} | {DELTA_INDEX for one in made if one.kind is Kind.DELTA})
    return ExportMissing(
        f"there is no export {name!r} of {dataset.name!r}; there is {', '.join(known) or 'none'}. "
        "POST …/operations/make makes all of them"
    )


async def _sent_delta(house: Services, dataset: Dataset, name: str, request: Request) -> Response:
    try:
        return await file_response(
            house.store, request, dataset.layout.export_delta(name), media_type(Kind.DELTA, name), name
        )
    except Missing:
        raise ExportMissing(f"there is no delta {name!r} of {dataset.name!r}; delta.json tells of all") from None
