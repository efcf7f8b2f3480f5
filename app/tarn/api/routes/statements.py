"""Statements, written."""

from typing import Annotated

from fastapi import Depends, Path, Query, Response

from tarn.api.http.ingest import (
    Deleted,
    HowToRead,
    OnErrorParam,
    ValuesParam,
    WritingDep,
    Written,
    record_responses,
    write_responses,
)
from tarn.api.http.routing import records_body, router
from tarn.errors import QueryTimeout
from tarn.journal.event_buffer import Events
from tarn.journal.formats import STATEMENT_TYPES
from tarn.model.names import Origin
from tarn.query import delete_counts as counts

routes = router("/v1/datasets", "statements")

StatementId = Annotated[str, Path(pattern=r"^[0-9a-f]{40}$")]
StrictParam = Annotated[
    bool,
    Query(
        description="Refuse a statement whose own id or dataset is another one, and any value that would be left out."
    ),
]


async def how_to_read_statements(
    on_error: OnErrorParam = "abort", values: ValuesParam = None, strict: StrictParam = False
) -> HowToRead:
    return HowToRead(on_error=on_error, values=values, strict=strict)


StatementsDep = Annotated[HowToRead, Depends(how_to_read_statements)]


@routes.post(
    "/{dataset}/statements",
    responses=record_responses(Written),
    openapi_extra=records_body(STATEMENT_TYPES),
    response_model=Written,
)
async def add_statements(writing: WritingDep, reading: StatementsDep) -> Response:
    """Write statements: durable when answered, all or nothing. Ids are computed under this dataset."""
    return await writing.take_statements(reading)


@routes.delete(
    "/{dataset}/statements/{statement}", responses=write_responses(Deleted, QueryTimeout), response_model=Deleted
)
async def delete_statement(writing: WritingDep, statement: StatementId) -> Response:
    """Delete one statement, of one origin or of every one. What is not there is 0 tombstones."""

    wanted = bytes.fromhex(statement)
    found = await writing.query(lambda reading: counts.of_statement(reading, writing.dataset, wanted, writing.origin))
    events = Events()
    for place in found:
        events.delete(wanted, place.entity_id, place.origin)
    return await writing.write(events, Deleted(tombstones=len(events)))


@routes.delete("/{dataset}/origins/{name}", responses=write_responses(Deleted, QueryTimeout), response_model=Deleted)
async def delete_origin(writing: WritingDep, name: Origin) -> Response:
    """Delete everything that one origin says, as one event."""
    events = Events()
    events.erase(None, name)
    tombstones = await writing.query(lambda reading: counts.of_origin(reading, writing.dataset, name))
    answer = Deleted(tombstones=tombstones)
    return await writing.write(events, answer)
