"""Entities, read."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import orjson
from fastapi import Depends, Query, Request, Response
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.paging import Paging, PagingDep, foreign_cursor, paging
from tarn.api.http.problems import Responses
from tarn.api.http.reads.read_requests import HEADERS, AskedDep, ReadRequest, read_problems, snapshot_header
from tarn.api.http.route_access import Caller, DatasetDep
from tarn.api.http.routing import JSON, router
from tarn.api.http.services.container import Services
from tarn.api.http.streaming.row_formats import preferred
from tarn.api.http.streaming.stream_response import Chunks, EndParam, StreamPiece
from tarn.api.http.streaming.stream_response import stream_response as streamed
from tarn.api.routes.entities import EntityId
from tarn.datasets import registry as datasets
from tarn.datasets.registry import Dataset
from tarn.errors import EntityNotFound, Fault, NotAcceptable, SchemaViolation
from tarn.model.names import DatasetPattern, Origin
from tarn.model.query import And, Comparison, EntityAggregate, EntityQuery, Facet, Node, Op, require_unique
from tarn.model.query_fields import FieldName, SortKey
from tarn.query import entities
from tarn.query.entities import EntityLines, Line, LookupResult, Neighbour, NeighbourPlace
from tarn.query.reader import Reading
from tarn.query.sorting import EntityPosition, InvalidPosition, Sorting

routes = router("/v1/datasets/{dataset}/entities", "entities")
lake_routes = router("/v1/entities", "entities")

NDJSON = "application/x-ndjson"
MOST_DATASETS = 100
"""Datasets that one query may cover."""

Ids = Annotated[list[str], Query(max_length=1000, description="Entity ids, canonical ids or referents; repeatable.")]
CanonicalIds = Annotated[list[str], Query(max_length=1000, description="Canonical ids; repeatable.")]
Schemata = Annotated[list[str], Query(max_length=100, description="Schemata, exactly; repeatable.")]
Kinds = Annotated[list[str], Query(max_length=100, description="Schemata and all that are one of them; repeatable.")]
Origins = Annotated[list[Origin], Query(max_length=100, description="Origins that say something of it; repeatable.")]
Sort = Annotated[
    list[SortKey],
    AfterValidator(require_unique),
    Query(max_length=3, description="`[-]field`, such as `-prop:date`; repeatable."),
]


NONE: list[Any] = []
"""FastAPI copies a default before anybody can change it."""

STREAM: Responses = {
    200: {
        "description": "A line a record",
        "headers": HEADERS,
        "content": {NDJSON: {"schema": {"type": "string", "format": "binary"}}},
    }
}


class Entity(BaseModel):
    """An FtM entity, put together from its live statements."""

    id: str
    caption: str
    schema_: str = Field(alias="schema")
    properties: dict[str, list[str]]
    datasets: list[str]
    referents: list[str] = Field(description="Ids of entities that are part of this one.")
    origin: list[str] = Field(description="Who says something of it.")
    first_seen: datetime | None
    last_seen: datetime | None
    last_change: datetime | None


class InvalidEntity(BaseModel):
    """An entity whose statements are of schemata that have nothing in common."""

    id: str
    reason: str
    schemata: list[str]


class OriginSchemata(BaseModel):
    """The schemata that one origin uses for an entity."""

    origin: str
    schemata: list[str]


class InvalidEntityDetail(InvalidEntity):
    """An entity that does not assemble, and which origins disagree about it."""

    by_origin: list[OriginSchemata] = Field(description="The first hundred origins, sorted by name.")
    origins: int = Field(description="How many origins have statements about it.")


class InvalidEntityPage(BaseModel):
    """A part of the list of entities that do not assemble, by canonical id."""

    results: list[InvalidEntityDetail]
    next: str | None


class EntityPage(BaseModel):
    """A part of a list. Entities that cannot be put together are in `invalid`, in place of a result."""

    results: list[Entity]
    invalid: list[InvalidEntity]
    next: str | None


class Adjacent(BaseModel):
    """An entity beside another."""

    property: str = Field(description="The property that leads there, seen from the entity that was asked for.")
    outgoing: bool = Field(description="Whether that entity has the property, or the other side of one.")
    id: str
    entity: Entity | None = Field(description="Null if there is no such entity, or it cannot be put together.")


class AdjacentPage(BaseModel):
    """A part of what is beside an entity. Entities of it that cannot be put together are also in `invalid`."""

    results: list[Adjacent]
    invalid: list[InvalidEntity]
    next: str | None


class Facets(BaseModel):
    """The largest groups."""

    results: list[Facet]


class DatasetsQuery(EntityQuery):
    """The same over several datasets: those of these names and patterns that the caller may read."""

    datasets: Annotated[list[DatasetPattern], Field(min_length=1, max_length=100)]


class DatasetsAggregate(EntityAggregate):
    """The same over several datasets: those of these names and patterns that the caller may read."""

    datasets: Annotated[list[DatasetPattern], Field(min_length=1, max_length=100)]


async def _filters(
    id: Ids = NONE,
    canonical_id: CanonicalIds = NONE,
    schema: Schemata = NONE,
    schemata: Kinds = NONE,
    origin: Origins = NONE,
) -> Node | None:
    """What the parameters of a list ask for, in the language of queries."""
    given: dict[str, Sequence[str]] = {
        "id": id, "canonical_id": canonical_id, "schema": schema, "schemata": schemata, "origin": origin
    }  # fmt: skip
    parts = [_among(name, values) for name, values in given.items() if values]
    return And(and_=[*parts]) if parts else None


WhereDep = Annotated[Node | None, Depends(_filters)]


def _among(name: str, values: Sequence[str]) -> Comparison:
    try:
        return Comparison(field=FieldName(name), op=Op.IN, value=[str(value) for value in values])
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]["msg"].removeprefix("Value error, ")
        raise SchemaViolation(f"{name}: {reason}", errors=[Fault(field=f"query.{name}", reason=reason)]) from None


async def _form(request: Request) -> str:
    return preferred(request.headers.get("accept"), (NDJSON,))


@routes.get("/stream", response_class=Response, responses={**STREAM, **read_problems(NotAcceptable)})
async def stream_entities(
    asked: AskedDep,
    dataset: DatasetDep,
    where: WhereDep,
    form: Annotated[str, Depends(_form)],
    end: EndParam = False,
) -> Response:
    """Stream the entities that match, a line each, by canonical id. One that cannot be put together is `$invalid`.

    Its line is `{"$invalid": {"id", "reason", "schemata"}}`, in the place that the entity would have.
    """

    def begin(reading: Reading) -> Chunks:
        snapshot, pieces = entities.stream(reading, dataset, asked.state, where)
        return Chunks(snapshot, map(StreamPiece._make, pieces), of_entities=True)

    return await streamed(asked, [dataset], form, end, begin)


@routes.get("/invalid", response_model=InvalidEntityPage, responses={200: {"headers": HEADERS}, **read_problems()})
async def list_invalid_entities(asked: AskedDep, dataset: DatasetDep, page: PagingDep) -> Response:
    """List the entities whose statements do not assemble, with the schemata of each origin and the reason.

    They are in no export, and in `invalid` or `$invalid` of other reads. An entity whose id is `invalid` is read by
    `GET …/entities?id=invalid`.
    """
    snapshot, found = await asked.read(
        [dataset], lambda reading: entities.invalid(reading, dataset, asked.state, page.after, page.fetch)
    )
    results, cursor = page.cut(found, lambda one: one.id)
    shown = [
        orjson.dumps(
            {**one._asdict(), "by_origin": [{"origin": origin, "schemata": names} for origin, names in one.by_origin]}
        )
        for one in results
    ]
    return _answer({"results": shown}, cursor, snapshot)


@routes.get("", response_model=EntityPage, responses={200: {"headers": HEADERS}, **read_problems()})
async def list_entities(
    asked: AskedDep, dataset: DatasetDep, where: WhereDep, page: PagingDep, sort: Sort = NONE
) -> Response:
    """List entities, by canonical id unless another order is asked for."""
    return await _page(asked, [dataset], where, sort, page)


@routes.post("/query", response_model=EntityPage, responses={200: {"headers": HEADERS}, **read_problems()})
async def query_entities(request: Request, asked: AskedDep, dataset: DatasetDep, query: EntityQuery) -> Response:
    """List the entities that match a condition."""
    return await _page(asked, [dataset], query.where, query.sort, _paging(request, query))


@lake_routes.post("/query", response_model=EntityPage, responses=read_problems())
async def query_datasets(request: Request, asked: AskedDep, query: DatasetsQuery) -> Response:
    """List the entities that match a condition in several datasets; `at` is a moment, or a ref of all."""
    wanted = await run_in_threadpool(_readable, asked.house, asked.caller, query.datasets)
    return await _page(asked, wanted, query.where, query.sort, _paging(request, query))


@routes.post("/aggregate", response_model=Facets, responses={200: {"headers": HEADERS}, **read_problems()})
async def aggregate_entities(asked: AskedDep, dataset: DatasetDep, query: EntityAggregate) -> Response:
    """Count and measure the entities that match a condition, in groups."""
    return await _facets(asked, [dataset], query)


@lake_routes.post("/aggregate", response_model=Facets, responses=read_problems())
async def aggregate_datasets(asked: AskedDep, query: DatasetsAggregate) -> Response:
    """Count and measure the entities that match a condition in several datasets, in groups."""
    wanted = await run_in_threadpool(_readable, asked.house, asked.caller, query.datasets)
    return await _facets(asked, wanted, query)


@routes.get("/{entity}", response_model=Entity, responses={200: {"headers": HEADERS}, **read_problems(EntityNotFound)})
async def get_entity(
    asked: AskedDep,
    dataset: DatasetDep,
    entity: EntityId,
    origin: Annotated[Origin | None, Query(description="Only what this origin says of it.")] = None,
) -> Response:
    """Show an entity, by its canonical id, an entity id or a referent."""
    found = await asked.look([dataset], lambda reading: entities.one(reading, dataset, asked.state, entity, origin))
    return Response(_shown(found.line, dataset, entity), headers=snapshot_header(found.snapshot), media_type=JSON)


@routes.get(
    "/{entity}/adjacent",
    response_model=AdjacentPage,
    responses={200: {"headers": HEADERS}, **read_problems(EntityNotFound)},
)
async def list_adjacent(asked: AskedDep, dataset: DatasetDep, entity: EntityId, page: PagingDep) -> Response:
    """List the entities that it refers to and that refer to it, by property."""
    after = None if page.after is None else _neighbour(page.after)

    def read(reading: Reading) -> tuple[LookupResult, list[Neighbour]]:
        return entities.adjacent(reading, dataset, asked.state, entity, after, page.fetch)

    found, beside = await asked.read([dataset], read)
    _shown(found.line, dataset, entity)
    results, cursor = page.cut(beside, lambda one: orjson.dumps([one.property, one.id, one.outgoing]).decode())
    shown = [
        orjson.dumps({"property": one.property, "outgoing": one.outgoing, "id": one.id})[:-1]
        + b',"entity":'
        + (b"null" if one.line is None or one.line.invalid else one.line.json.strip())
        + b"}"
        for one in results
    ]
    lines = {one.line.json: _report(one.line) for one in results if one.line is not None and one.line.invalid}
    return _answer({"results": shown, "invalid": list(lines.values())}, cursor, found.snapshot)


async def _page(
    asked: ReadRequest, wanted: Sequence[Dataset], where: Node | None, sort: Sequence[SortKey], page: Paging
) -> Response:
    after = None if page.after is None else _position(page.after, sort)

    def read(reading: Reading) -> EntityLines:
        return entities.page(reading, wanted, asked.state, where, sort, after, page.limit)

    found = await asked.read(wanted, read) if wanted else EntityLines([], None, None)
    results = [line.json.strip() for line in found.lines if not line.invalid]
    invalid = [_report(line) for line in found.lines if line.invalid]
    return _answer({"results": results, "invalid": invalid}, page.cursor(found.following), found.snapshot)


async def _facets(asked: ReadRequest, wanted: Sequence[Dataset], query: EntityAggregate) -> Response:
    def read(reading: Reading) -> tuple[str | None, list[Facet]]:
        return entities.aggregate(reading, wanted, asked.state, query)

    snapshot, found = await asked.read(wanted, read) if wanted else (None, [])
    body = orjson.dumps({"results": [facet.model_dump() for facet in found]})
    return Response(body, headers=snapshot_header(snapshot), media_type=JSON)


def _answer(lists: dict[str, list[bytes]], cursor: str | None, snapshot: str | None) -> Response:
    """JSON around records that are JSON already."""
    parts = [orjson.dumps(name) + b":[" + b",".join(records) + b"]" for name, records in lists.items()]
    body = b"{" + b",".join([*parts, b'"next":' + orjson.dumps(cursor)]) + b"}"
    return Response(body, headers=snapshot_header(snapshot), media_type=JSON)


def _report(line: Line) -> bytes:
    """The content of a `$invalid` line."""
    return orjson.dumps(orjson.loads(line.json)["$invalid"])


def _shown(line: Line | None, dataset: Dataset, entity: str) -> bytes:
    if line is None:
        raise EntityNotFound(f"there is no entity {entity!r} in {dataset.name!r}")
    if line.invalid:
        reason = orjson.loads(line.json)["$invalid"]["reason"]
        raise SchemaViolation(f"the entity {entity!r} cannot be put together: {reason}", errors=[Fault(reason=reason)])
    return line.json.strip()


def _paging(request: Request, query: EntityQuery) -> Paging:
    asked = query.model_dump(mode="json", exclude={"limit", "cursor"})
    return paging(request, query.limit, query.cursor, asked)


def _position(text: str, sort: Sequence[SortKey]) -> EntityPosition:
    try:
        return Sorting(tuple(sort)).decode(text)
    except InvalidPosition:
        raise foreign_cursor() from None


def _neighbour(text: str) -> NeighbourPlace:
    try:
        prop, name, outgoing = orjson.loads(text)
    except (ValueError, TypeError):
        raise foreign_cursor() from None
    if type(prop) is not str or type(name) is not str or type(outgoing) is not bool:
        raise foreign_cursor()
    return prop, name, outgoing


def _readable(house: Services, caller: Caller, patterns: Sequence[DatasetPattern]) -> list[Dataset]:
    """The datasets that match and that the caller may read. Raises SchemaViolation if they are too many."""

    def wanted(name: str) -> bool:
        return caller.identity.level_on(name) is not None and any(pattern.matches(name) for pattern in patterns)

    with house.database.read() as connection:
        found = datasets.page(connection, wanted, None, MOST_DATASETS + 1)
    if len(found) > MOST_DATASETS:
        reason = f"match more than {MOST_DATASETS} datasets"
        raise SchemaViolation(f"the patterns {reason}", errors=[Fault(field="datasets", reason=reason)])
    return found
