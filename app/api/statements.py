"""Statements, written."""

from typing import Annotated

from fastapi import Path, Query, Response
from starlette.concurrency import run_in_threadpool

from app.api.ingest import RAISES, Deleted, OnErrorParam, WritingDep, Written
from app.api.problems import raises
from app.api.routing import records_body, router
from app.journal.events import Events
from app.journal.formats import STATEMENT_TYPES
from app.journal.overlay import live_of_origin, live_of_statement
from app.model.names import Origin

routes = router("/v1/datasets", "statements")

StatementId = Annotated[str, Path(pattern=r"^[0-9a-f]{40}$")]
StrictParam = Annotated[bool, Query(description="Refuse a statement whose own id or dataset is another one.")]


@routes.post(
    "/{dataset}/statements",
    responses=raises(*RAISES),
    openapi_extra=records_body(STATEMENT_TYPES),
    response_model=Written,
)
async def add_statements(
    writing: WritingDep, on_error: OnErrorParam = "abort", strict: StrictParam = False
) -> Response:
    """Write statements: durable when answered, all or nothing. Ids are computed under this dataset."""
    return await writing.take_statements(on_error == "skip", strict)


@routes.delete("/{dataset}/statements/{statement}", responses=raises(*RAISES), response_model=Deleted)
async def delete_statement(writing: WritingDep, statement: StatementId) -> Response:
    """Delete one statement, of one origin or of every one. What is not there is 0 tombstones."""

    def found() -> Events:
        events = Events()
        with writing.house.database.read() as connection:
            for live in live_of_statement(connection, writing.dataset, bytes.fromhex(statement), writing.origin):
                events.delete(live.id, live.entity_id, live.origin)
        return events

    events = await run_in_threadpool(found)
    return await writing.write(events, Deleted(tombstones=len(events)))


@routes.delete("/{dataset}/origins/{name}", responses=raises(*RAISES), response_model=Deleted)
async def delete_origin(writing: WritingDep, name: Origin) -> Response:
    """Delete everything that one origin says, as one event."""

    def count() -> int:
        with writing.house.database.read() as connection:
            return len(live_of_origin(connection, writing.dataset, name))

    events = Events()
    events.erase(None, name)
    answer = Deleted(tombstones=await run_in_threadpool(count))
    return await writing.write(events, answer)
