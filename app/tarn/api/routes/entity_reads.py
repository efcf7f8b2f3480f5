"""Entity read routes: get, list, query, stream and aggregate entities."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import orjson
from fastapi import Depends, Query, Request, Response
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.paging import Paging, PagingDep, foreign_cursor, paging
from tarn.api.http.problems import Responses
from tarn.api.http.reads.read_requests import HEADERS, ReadRequest, ReadRequestDep, read_problems, snapshot_header
from tarn.api.http.route_access import Caller, DatasetDep
from tarn.api.http.routing import JSON, router
from tarn.api.http.services.container import Services
from tarn.api.http.streaming.row_formats import preferred
from tarn.api.http.streaming.stream_response import Chunks, EndParam, StreamPiece, stream_response
from tarn.api.routes.entities import EntityId
from tarn.datasets import registry
from tarn.datasets.registry import Dataset
from tarn.errors import EntityNotFound, FieldError, NotAcceptable, SchemaViolation
from tarn.model.ftm.query import And, Comparison, EntityAggregate, EntityQuery, Facet, Node, Op, require_unique
from tarn.model.ftm.query_fields import FieldName, SortKey
from tarn.model.names import DatasetPattern, Origin
from tarn.query import entities
from tarn.query.entities import EntityLines, Line, LookupResult, Neighbour, NeighbourKey
from tarn.query.reader import Reading
from tarn.query.sorting import EntityPosition, InvalidPosition, Sorting

routes = router("/v1/datasets/{dataset}/entities", "entities")
lake_routes = router("/v1/entities", "entities")

NDJSON = "application/x-ndjson"
MOST_DATASETS = 100
"""Maximum number of datasets in one query."""

Ids = Annotated[list[str], Query(max_length=1000, description="Entity ids, canonical ids or referents; repeatable.")]
CanonicalIds = Annotated[list[str], Query(max_length=1000, description="Canonical ids; repeatable.")]
Schemata = Annotated[list[str], Query(max_length=100, description="Schema names, matched exactly; repeatable.")]
Kinds = Annotated[
    list[str], Query(max_length=100, description="Schema names, including their descendants; repeatable.")
]
Origins = Annotated[list[Origin], Query(max_length=100, description="Origins of the entity's statements; repeatable.")]
Sort = Annotated[
    list[SortKey],
    AfterValidator(require_unique),
    Query(max_length=3, description="Sort keys `[-]field`, such as `-prop:date`; repeatable."),
]


NONE: list[Any] = []
"""Default of list parameters. FastAPI copies defaults, so it is not shared between requests."""

STREAM: Responses = {
    200: {
        "description": "One JSON line per record",
        "headers": HEADERS,
        "content": {NDJSON: {"schema": {"type": "string", "format": "binary"}}},
    }
}


class Entity(BaseModel):
    """An FtM entity, assembled from its live statements."""

    id: str
    caption: str
    schema_: str = Field(alias="schema")
    properties: dict[str, list[str]]
    datasets: list[str]
    referents: list[str] = Field(description="Ids that were merged into this entity.")
    origin: list[str] = Field(description="Origins of its statements.")
    first_seen: datetime | None
    last_seen: datetime | None
    last_change: datetime | None


class InvalidEntity(BaseModel):
    """An entity whose statements do not assemble, because their schemata are incompatible."""

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
    origins: int = Field(description="The number of origins with statements about it.")


class InvalidEntityPage(BaseModel):
    """One page of the entities that do not assemble, sorted by canonical id."""

    results: list[InvalidEntityDetail]
    next: str | None


class EntityPage(BaseModel):
    """One page of entities. Those that do not assemble are in `invalid` instead of `results`."""

    results: list[Entity]
    invalid: list[InvalidEntity]
    next: str | None


class Adjacent(BaseModel):
    """An entity that is adjacent to another."""

    property: str = Field(description="The property that links them, as seen from the requested entity.")
    outgoing: bool = Field(
        description="True: the requested entity has the property; false: the other entity has its reverse."
    )
    id: str
    entity: Entity | None = Field(description="Null if the entity does not exist or does not assemble.")


class AdjacentPage(BaseModel):
    """One page of adjacent entities. Those that do not assemble are also in `invalid`."""

    results: list[Adjacent]
    invalid: list[InvalidEntity]
    next: str | None


class Facets(BaseModel):
    """The largest groups of an aggregation."""

    results: list[Facet]


class DatasetsQuery(EntityQuery):
    """A query over several datasets: those of these names and patterns that the caller may read."""

    datasets: Annotated[list[DatasetPattern], Field(min_length=1, max_length=100)]


class DatasetsAggregate(EntityAggregate):
    """An aggregation over several datasets: those of these names and patterns that the caller may read."""

    datasets: Annotated[list[DatasetPattern], Field(min_length=1, max_length=100)]


async def _filters(
    id: Ids = NONE,
    canonical_id: CanonicalIds = NONE,
    schema: Schemata = NONE,
    schemata: Kinds = NONE,
    origin: Origins = NONE,
) -> Node | None:
    """Return the query parameters of a list as a query condition."""
    filters: dict[str, Sequence[str]] = {
        "id": id, "canonical_id": canonical_id, "schema": schema, "schemata": schemata, "origin": origin
    }  # fmt: skip
    parts = [_among(name, values) for name, values in filters.items() if values]
    return And(and_=[*parts]) if parts else None


WhereDep = Annotated[Node | None, Depends(_filters)]


def _among(name: str, values: Sequence[str]) -> Comparison:
    try:
        return Comparison(field=FieldName(name), op=Op.IN, value=[str(value) for value in values])
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]["msg"].removeprefix("Value error, ")
        raise SchemaViolation(f"{name}: {reason}", errors=[FieldError(field=f"query.{name}", reason=reason)]) from None


async def _form(request: Request) -> str:
    return preferred(request.headers.get("accept"), (NDJSON,))


@routes.get("/stream", response_class=Response, responses={**STREAM, **read_problems(NotAcceptable)})
async def stream_entities(
    read_request: ReadRequestDep,
    dataset: DatasetDep,
    where: WhereDep,
    form: Annotated[str, Depends(_form)],
    end: EndParam = False,
) -> Response:
    """Stream the matching entities as JSON lines, sorted by canonical id.

    An entity that does not assemble is a line `{"$invalid": {"id", "reason", "schemata"}}` in its place.
    """

    def begin(reading: Reading) -> Chunks:
        snapshot, pieces = entities.stream(reading, dataset, read_request.state, where)
        return Chunks(snapshot, map(StreamPiece._make, pieces), of_entities=True)

    return await stream_response(read_request, [dataset], form, end, begin)


@routes.get("/invalid", response_model=InvalidEntityPage, responses={200: {"headers": HEADERS}, **read_problems()})
async def list_invalid_entities(read_request: ReadRequestDep, dataset: DatasetDep, page: PagingDep) -> Response:
    """List the entities whose statements do not assemble, with the schemata of each origin and the reason.

    They are not exported, and other reads list them in `invalid` or `$invalid`. To read an entity whose id is
    `invalid`, use `GET …/entities?id=invalid`.
    """
    snapshot, reports = await read_request.read(
        [dataset], lambda reading: entities.invalid(reading, dataset, read_request.state, page.after, page.fetch)
    )
    results, cursor = page.cut(reports, lambda report: report.id)
    shown = [
        orjson.dumps(
            {
                **report._asdict(),
                "by_origin": [{"origin": origin, "schemata": names} for origin, names in report.by_origin],
            }
        )
        for report in results
    ]
    return _answer({"results": shown}, cursor, snapshot)


@routes.get("", response_model=EntityPage, responses={200: {"headers": HEADERS}, **read_problems()})
async def list_entities(
    read_request: ReadRequestDep, dataset: DatasetDep, where: WhereDep, page: PagingDep, sort: Sort = NONE
) -> Response:
    """List entities, sorted by canonical id unless `sort` is given."""
    return await _page(read_request, [dataset], where, sort, page)


@routes.post("/query", response_model=EntityPage, responses={200: {"headers": HEADERS}, **read_problems()})
async def query_entities(
    request: Request, read_request: ReadRequestDep, dataset: DatasetDep, query: EntityQuery
) -> Response:
    """List the entities that match a condition."""
    return await _page(read_request, [dataset], query.where, query.sort, _paging(request, query))


@lake_routes.post("/query", response_model=EntityPage, responses=read_problems())
async def query_datasets(request: Request, read_request: ReadRequestDep, query: DatasetsQuery) -> Response:
    """List the entities that match a condition in several datasets; `at` is a time, or a ref that all of them have."""
    readable = await run_in_threadpool(_readable, read_request.services, read_request.caller, query.datasets)
    return await _page(read_request, readable, query.where, query.sort, _paging(request, query))


@routes.post("/aggregate", response_model=Facets, responses={200: {"headers": HEADERS}, **read_problems()})
async def aggregate_entities(read_request: ReadRequestDep, dataset: DatasetDep, query: EntityAggregate) -> Response:
    """Aggregate the entities that match a condition: counts and measures by group."""
    return await _facets(read_request, [dataset], query)


@lake_routes.post("/aggregate", response_model=Facets, responses=read_problems())
async def aggregate_datasets(read_request: ReadRequestDep, query: DatasetsAggregate) -> Response:
    """Aggregate the entities that match a condition in several datasets: counts and measures by group."""
    readable = await run_in_threadpool(_readable, read_request.services, read_request.caller, query.datasets)
    return await _facets(read_request, readable, query)


@routes.get("/{entity}", response_model=Entity, responses={200: {"headers": HEADERS}, **read_problems(EntityNotFound)})
async def get_entity(
    read_request: ReadRequestDep,
    dataset: DatasetDep,
    entity: EntityId,
    origin: Annotated[Origin | None, Query(description="Use only the statements of this origin.")] = None,
) -> Response:
    """Get an entity by its canonical id, an entity id or a referent."""
    result = await read_request.look_up(
        [dataset], lambda reading: entities.one(reading, dataset, read_request.state, entity, origin)
    )
    return Response(_shown(result.line, dataset, entity), headers=snapshot_header(result.snapshot), media_type=JSON)


@routes.get(
    "/{entity}/adjacent",
    response_model=AdjacentPage,
    responses={200: {"headers": HEADERS}, **read_problems(EntityNotFound)},
)
async def list_adjacent(
    read_request: ReadRequestDep, dataset: DatasetDep, entity: EntityId, page: PagingDep
) -> Response:
    """List the entities that an entity refers to and those that refer to it, by property."""
    after = None if page.after is None else _neighbour(page.after)

    def read(reading: Reading) -> tuple[LookupResult, list[Neighbour]]:
        return entities.adjacent(reading, dataset, read_request.state, entity, after, page.fetch)

    entity_line, neighbours = await read_request.read([dataset], read)
    _shown(entity_line.line, dataset, entity)
    results, cursor = page.cut(neighbours, lambda each: orjson.dumps([each.property, each.id, each.outgoing]).decode())
    shown = [
        orjson.dumps({"property": each.property, "outgoing": each.outgoing, "id": each.id})[:-1]
        + b',"entity":'
        + (b"null" if each.line is None or each.line.invalid else each.line.json.strip())
        + b"}"
        for each in results
    ]
    lines = {each.line.json: _report(each.line) for each in results if each.line is not None and each.line.invalid}
    return _answer({"results": shown, "invalid": list(lines.values())}, cursor, entity_line.snapshot)


async def _page(
    read_request: ReadRequest, searched: Sequence[Dataset], where: Node | None, sort: Sequence[SortKey], page: Paging
) -> Response:
    after = None if page.after is None else _position(page.after, sort)

    def read(reading: Reading) -> EntityLines:
        return entities.page(reading, searched, read_request.state, where, sort, after, page.limit)

    result = await read_request.read(searched, read) if searched else EntityLines([], None, None)
    results = [line.json.strip() for line in result.lines if not line.invalid]
    invalid = [_report(line) for line in result.lines if line.invalid]
    return _answer({"results": results, "invalid": invalid}, page.cursor(result.following), result.snapshot)


async def _facets(read_request: ReadRequest, searched: Sequence[Dataset], query: EntityAggregate) -> Response:
    def read(reading: Reading) -> tuple[str | None, list[Facet]]:
        return entities.aggregate(reading, searched, read_request.state, query)

    snapshot, groups = await read_request.read(searched, read) if searched else (None, [])
    body = orjson.dumps({"results": [facet.model_dump() for facet in groups]})
    return Response(body, headers=snapshot_header(snapshot), media_type=JSON)


def _answer(lists: dict[str, list[bytes]], cursor: str | None, snapshot: str | None) -> Response:
    """Return a response of lists whose records are JSON already."""
    parts = [orjson.dumps(name) + b":[" + b",".join(records) + b"]" for name, records in lists.items()]
    body = b"{" + b",".join([*parts, b'"next":' + orjson.dumps(cursor)]) + b"}"
    return Response(body, headers=snapshot_header(snapshot), media_type=JSON)


def _report(line: Line) -> bytes:
    """Return the content of a `$invalid` line."""
    return orjson.dumps(orjson.loads(line.json)["$invalid"])


def _shown(line: Line | None, dataset: Dataset, entity: str) -> bytes:
    if line is None:
        raise EntityNotFound(f"there is no entity {entity!r} in {dataset.name!r}")
    if line.invalid:
        reason = orjson.loads(line.json)["$invalid"]["reason"]
        raise SchemaViolation(
            f"the statements of entity {entity!r} do not assemble: {reason}", errors=[FieldError(reason=reason)]
        )
    return line.json.strip()


def _paging(request: Request, query: EntityQuery) -> Paging:
    read_request = query.model_dump(mode="json", exclude={"limit", "cursor"})
    return paging(request, query.limit, query.cursor, read_request)


def _position(text: str, sort: Sequence[SortKey]) -> EntityPosition:
    try:
        return Sorting(tuple(sort)).decode(text)
    except InvalidPosition:
        raise foreign_cursor() from None


def _neighbour(text: str) -> NeighbourKey:
    try:
        prop, name, outgoing = orjson.loads(text)
    except (ValueError, TypeError):
        raise foreign_cursor() from None
    if type(prop) is not str or type(name) is not str or type(outgoing) is not bool:
        raise foreign_cursor()
    return prop, name, outgoing


def _readable(services: Services, caller: Caller, patterns: Sequence[DatasetPattern]) -> list[Dataset]:
    """Return the datasets that match and that the caller may read. Raises SchemaViolation if there are too many."""

    def is_readable(name: str) -> bool:
        return caller.identity.level_on(name) is not None and any(pattern.matches(name) for pattern in patterns)

    datasets = registry.readable_page(services.database, is_readable, None, MOST_DATASETS + 1)
    if len(datasets) > MOST_DATASETS:
        reason = f"match more than {MOST_DATASETS} datasets"
        raise SchemaViolation(f"the patterns {reason}", errors=[FieldError(field="datasets", reason=reason)])
    return datasets
