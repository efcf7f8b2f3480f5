"""Export routes: list exports and deltas, download them, and report their freshness."""

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
from tarn.datasets.registry import Dataset
from tarn.errors import DocumentInvalid, ExportMissing, RangeNotSatisfiable
from tarn.lake import export_deltas as deltas
from tarn.model.datasets.export import DELTA_INDEX, Export, ExportKind, ExportRecord, Freshness, media_type
from tarn.model.entity_tags import etag, matches_none_match
from tarn.storage.store import ObjectMissing

routes = router("/v1/datasets/{dataset}", "exports")

NameParam = Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

MISSING: Responses = raises(ExportMissing)

UntilParam = Annotated[
    str | None,
    Query(max_length=32, pattern=r"^[0-9]{14}-[a-z0-9]+$", description="The last version to list."),
]

FILE: Responses = {**SENT, **raises(ExportMissing, RangeNotSatisfiable)}


class ExportList(BaseModel):
    """All exports of a dataset, in the order in which they are made."""

    results: list[Export]


class Delta(BaseModel):
    """A delta: one file of changed entities."""

    version: str
    name: str
    from_: str | None = Field(
        alias="from", description="The version of the delta that this one continues; null if none."
    )
    snapshot: str | None
    size: int
    content: int | None = Field(None, description="The `seq` of the snapshot up to which it has changes.")
    restart: bool | None = Field(
        None,
        description="True: the entities were exported since `from`; a client must load that export again before this.",
    )


class DeltaIndex(BaseModel):
    """The available deltas, in the format that yente loads."""

    dataset: str
    updated_at: datetime
    versions: dict[str, str] = Field(description="URLs of the deltas that form an unbroken sequence, by version.")
    deltas: list[Delta]


class Report(BaseModel):
    """When each operation last ran, and which exports are fresh."""

    tags: dict[str, datetime] = Field(description="Tags that Tarn sets itself.")
    waiting: int = Field(description="Rows in the journal, which are in no export yet.")
    exports: list[Freshness]


@routes.get("/exports", responses=raises(DocumentInvalid))
def list_exports(services: ServicesDep, dataset: DatasetDep) -> ExportList:
    """List the exports of a dataset, with their snapshot and whether they are fresh."""
    state, requested = services.exports.state(dataset)
    return ExportList(results=[_shown(export, state.stale(kind, requested)) for kind, export in state.records.items()])


@routes.get(
    f"/exports/{DELTA_INDEX}", responses={304: {"description": "Not modified: the caller has this version"}, **MISSING}
)
async def get_delta_index(
    services: ServicesDep, dataset: DatasetDep, request: Request, until: UntilParam = None
) -> DeltaIndex:
    """List the available deltas with their URLs, up to a version."""
    return await _delta_index(services, dataset, request, until)  # type: ignore[return-value]  # FastAPI passes it on


@routes.head(f"/exports/{DELTA_INDEX}", response_class=Response, responses=MISSING)
async def head_delta_index(
    services: ServicesDep, dataset: DatasetDep, request: Request, until: UntilParam = None
) -> Response:
    """Get the headers of the list of deltas."""
    return await _delta_index(services, dataset, request, until)


@routes.get("/exports/{name}", response_class=Response, responses=FILE)
async def get_export(services: ServicesDep, dataset: DatasetDep, name: NameParam, request: Request) -> Response:
    """Download an export, or the part of it that `Range` asks for."""
    return await _sent(services, dataset, name, request)


@routes.head("/exports/{name}", response_class=Response, responses=FILE)
async def head_export(services: ServicesDep, dataset: DatasetDep, name: NameParam, request: Request) -> Response:
    """Get the headers of an export, without its content."""
    return await _sent(services, dataset, name, request)


@routes.get("/exports/delta/{name}", response_class=Response, responses=FILE)
async def get_export_delta(services: ServicesDep, dataset: DatasetDep, name: NameParam, request: Request) -> Response:
    """Download a delta that `delta.json` lists."""
    return await _sent_delta(services, dataset, name, request)


@routes.head("/exports/delta/{name}", response_class=Response, responses=FILE)
async def head_export_delta(services: ServicesDep, dataset: DatasetDep, name: NameParam, request: Request) -> Response:
    """Get the headers of a delta, without its content."""
    return await _sent_delta(services, dataset, name, request)


@routes.get("/freshness", responses=raises(DocumentInvalid))
def get_freshness(services: ServicesDep, dataset: DatasetDep) -> Report:
    """Show the tags that Tarn sets itself, and for each export whether it is fresh and why not."""
    state, requested = services.exports.state(dataset)
    rows = []
    for kind in ExportKind:
        reason = state.stale(kind, requested)
        at = state.tags.get(kind.form.tag)
        rows.append(Freshness(kind=kind, tag=kind.form.tag, at=at, fresh=reason is None, reason=reason))
    return Report(tags=dict(sorted(state.tags.items())), waiting=state.waiting, exports=rows)


def _shown(export: ExportRecord, reason: str | None) -> Export:
    return Export(
        kind=export.kind,
        name=export.name,
        media_type=media_type(export.kind, export.name),
        snapshot=export.snapshot,
        seq=export.seq,
        made=export.made,
        size=export.size,
        checksum=export.sha1,
        version=export.version,
        invalid=export.invalid,
        fresh=reason is None,
        reason=reason,
    )


async def _sent(services: Services, dataset: Dataset, name: str, request: Request) -> Response:
    records = await run_in_threadpool(services.exports.records, dataset)
    kinds = {record.name: kind for kind, record in records.items()}
    try:
        if name in kinds:
            kind = kinds[name]
            return await file_response(
                services.store, request, dataset.layout.export(kind, name), media_type(kind, name), name
            )
    except ObjectMissing:
        pass
    raise _missing(dataset, name, records.values())


async def _delta_index(services: Services, dataset: Dataset, request: Request, until: str | None) -> Response:
    records = await run_in_threadpool(services.exports.records, dataset)
    if (delta := records.get(ExportKind.DELTA)) is None:
        raise _missing(dataset, DELTA_INDEX, records.values())
    text = orjson.dumps(deltas.index(dataset.name, delta, public_url(services, request), until))
    headers = {"ETag": etag(text), "Content-Length": str(len(text))}
    named = request.headers.get("If-None-Match")
    if named is not None and matches_none_match(named, headers["ETag"]):
        return Response(status_code=304, headers={"ETag": headers["ETag"]})
    content = b"" if request.method == "HEAD" else text
    return Response(content, headers=headers, media_type="application/json")


def _missing(dataset: Dataset, name: str, exports: Iterable[ExportRecord]) -> ExportMissing:
    known = sorted({each.name for each in exports} | {DELTA_INDEX for each in exports if each.kind is ExportKind.DELTA})
    return ExportMissing(
        f"there is no export {name!r} of {dataset.name!r}; existing exports: {', '.join(known) or 'none'}. "
        "POST …/operations/make creates all of them"
    )


async def _sent_delta(services: Services, dataset: Dataset, name: str, request: Request) -> Response:
    try:
        return await file_response(
            services.store, request, dataset.layout.export_delta(name), media_type(ExportKind.DELTA, name), name
        )
    except ObjectMissing:
        raise ExportMissing(
            f"there is no delta {name!r} of {dataset.name!r}; delta.json lists the existing ones"
        ) from None
