"""Statement read routes: list and stream statements."""

from datetime import datetime
from typing import Annotated, Any

import orjson
from fastapi import Depends, Query, Request, Response
from pydantic import BaseModel, Field

from tarn.api.http.paging import PagingDep, foreign_cursor
from tarn.api.http.problems import Responses
from tarn.api.http.reads.read_requests import HEADERS, ReadRequestDep, read_problems, snapshot_header
from tarn.api.http.route_access import DatasetDep
from tarn.api.http.routing import JSON, router
from tarn.api.http.streaming.row_formats import preferred
from tarn.api.http.streaming.stream_response import Chunks, EndParam, StreamPiece, stream_response
from tarn.api.routes.entity_reads import NONE, CanonicalIds, Ids, Kinds, Origins, Schemata
from tarn.errors import FieldError, InvalidFormat, NotAcceptable, SchemaViolation
from tarn.model.ftm.query_fields import property_names, schema_names
from tarn.query import statements
from tarn.query.output.statement_formats import FORMATS, NDJSON
from tarn.query.reader import Reading
from tarn.query.statements import StatementFilter, StatementPosition

routes = router("/v1/datasets/{dataset}/statements", "statements")

Props = Annotated[list[str], Query(max_length=100, description="Property names; repeatable.")]


class StatementRead(BaseModel):
    """An FtM statement."""

    id: str
    entity_id: str
    canonical_id: str
    prop: str
    prop_type: str | None
    schema_: str = Field(alias="schema")
    value: str
    dataset: str
    origin: str
    lang: str | None
    original_value: str | None
    external: bool
    first_seen: datetime
    last_seen: datetime


class StatementPage(BaseModel):
    """One page of statements."""

    results: list[StatementRead]
    next: str | None


async def _filter(
    id: Ids = NONE,
    canonical_id: CanonicalIds = NONE,
    schema: Schemata = NONE,
    schemata: Kinds = NONE,
    origin: Origins = NONE,
    prop: Props = NONE,
) -> StatementFilter:
    for name, values in (("schema", schema), ("schemata", schemata)):
        for value in values:
            if value not in schema_names():
                raise _violation(name, f"{value[:100]!r} is not a schema of FollowTheMoney")
    for name, values in (("id", id), ("canonical_id", canonical_id)):
        if any("\x00" in value for value in values):
            raise _violation(name, "must not have NUL characters")
    for value in prop:
        if value not in property_names():
            raise _violation("prop", f"{value[:100]!r} is not a property of FollowTheMoney")
    return StatementFilter(id, canonical_id, schema, schemata, origin, prop)


def _violation(name: str, reason: str) -> SchemaViolation:
    return SchemaViolation(f"{name}: {reason}", errors=[FieldError(field=f"query.{name}", reason=reason)])


FilterDep = Annotated[StatementFilter, Depends(_filter)]


async def _form(request: Request) -> str:
    return preferred(request.headers.get("accept"), tuple(FORMATS))


STREAM: Responses = {
    200: {
        "description": "Statements in the requested format",
        "headers": HEADERS,
        "content": {form: {"schema": {"type": "string", "format": "binary"}} for form in FORMATS},
    }
}


@routes.get("/stream", response_class=Response, responses={**STREAM, **read_problems(NotAcceptable)})
async def stream_statements(
    read_request: ReadRequestDep,
    dataset: DatasetDep,
    criteria: FilterDep,
    form: Annotated[str, Depends(_form)],
    end: EndParam = False,
) -> Response:
    """Stream the matching statements as NDJSON, FtM CSV, Parquet or Arrow, sorted by canonical id and id."""
    if end and form != NDJSON:
        reason = f"is only supported for {NDJSON}, not for {form}"
        raise InvalidFormat(f"`end` {reason}", errors=[FieldError(field="query.end", reason=reason)])

    def begin(reading: Reading) -> Chunks:
        snapshot, chunks = statements.stream(reading, dataset, read_request.state, criteria, form)
        return Chunks(snapshot, (StreamPiece(chunk, chunk.count(b"\n")) for chunk in chunks))

    return await stream_response(read_request, [dataset], form, end, begin)


@routes.get("", response_model=StatementPage, responses={200: {"headers": HEADERS}, **read_problems()})
async def list_statements(
    read_request: ReadRequestDep, dataset: DatasetDep, criteria: FilterDep, page: PagingDep
) -> Response:
    """List statements, sorted by canonical id and id."""
    after = None if page.after is None else _place(page.after)

    def read(reading: Reading) -> tuple[str | None, list[dict[str, Any]], StatementPosition | None]:
        return statements.page(reading, dataset, read_request.state, criteria, after, page.limit)

    snapshot, rows, last = await read_request.read([dataset], read)
    cursor = page.cursor(None if last is None else _text(last))
    return Response(orjson.dumps({"results": rows, "next": cursor}), headers=snapshot_header(snapshot), media_type=JSON)


def _text(position: StatementPosition) -> str:
    return orjson.dumps([position.canonical_id, position.id.hex(), position.origin]).decode()


def _place(text: str) -> StatementPosition:
    try:
        canonical_id, statement, origin = orjson.loads(text)
        position = StatementPosition(canonical_id, bytes.fromhex(statement), origin)
    except (ValueError, TypeError):
        raise foreign_cursor() from None
    if type(canonical_id) is not str or type(origin) is not str:
        raise foreign_cursor()
    return position
