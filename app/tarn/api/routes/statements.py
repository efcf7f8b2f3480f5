"""Statement write routes: add and delete statements, delete an origin."""

from typing import Annotated

from fastapi import Depends, Path, Query, Response

from tarn.api.http.ingest import (
    Deleted,
    OnErrorParam,
    ParseOptions,
    ValuesParam,
    WriteRequestDep,
    Written,
    record_responses,
    write_responses,
)
from tarn.api.http.routing import records_body, router
from tarn.errors import QueryTimeout
from tarn.journal.formats import STATEMENT_TYPES
from tarn.journal.parsing.event_buffer import Events
from tarn.model.names import Origin
from tarn.query import delete_counts

routes = router("/v1/datasets", "statements")

StatementId = Annotated[str, Path(pattern=r"^[0-9a-f]{40}$")]
StrictParam = Annotated[
    bool,
    Query(description="Reject the body if a statement has a different id or dataset, or if a value would be left out."),
]


async def statement_parse_options(
    on_error: OnErrorParam = "abort", values: ValuesParam = None, strict: StrictParam = False
) -> ParseOptions:
    """Return the parse options of the query."""
    return ParseOptions(on_error=on_error, values=values, strict=strict)


StatementsDep = Annotated[ParseOptions, Depends(statement_parse_options)]


@routes.post(
    "/{dataset}/statements",
    responses=record_responses(Written),
    openapi_extra=records_body(STATEMENT_TYPES),
    response_model=Written,
)
async def add_statements(writing: WriteRequestDep, options: StatementsDep) -> Response:
    """Add statements: durable on return, all or nothing. Statement ids are computed for this dataset."""
    return await writing.write_statements(options)


@routes.delete(
    "/{dataset}/statements/{statement}", responses=write_responses(Deleted, QueryTimeout), response_model=Deleted
)
async def delete_statement(writing: WriteRequestDep, statement: StatementId) -> Response:
    """Delete a statement, of one origin or of all. If there is none, `tombstones` is 0."""
    statement_id = bytes.fromhex(statement)
    origins = await writing.query(
        lambda reading: delete_counts.of_statement(reading, writing.dataset, statement_id, writing.origin)
    )
    events = Events()
    for live in origins:
        events.delete(statement_id, live.entity_id, live.origin)
    return await writing.write(events, Deleted(tombstones=len(events)))


@routes.delete("/{dataset}/origins/{name}", responses=write_responses(Deleted, QueryTimeout), response_model=Deleted)
async def delete_origin(writing: WriteRequestDep, name: Origin) -> Response:
    """Delete all statements of an origin, as one event."""
    events = Events()
    events.erase(None, name)
    tombstones = await writing.query(lambda reading: delete_counts.of_origin(reading, writing.dataset, name))
    answer = Deleted(tombstones=tombstones)
    return await writing.write(events, answer)
