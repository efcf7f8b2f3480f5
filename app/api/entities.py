"""Entities, written."""

from typing import Annotated

from fastapi import Path, Response
from orjson import JSONDecodeError, loads

from app.api.bodies import LIMIT
from app.api.ingest import (
    Deleted,
    OnErrorParam,
    Writing,
    WritingDep,
    Written,
    moment_now,
    record_answers,
    write_answers,
)
from app.api.routing import records_body, router
from app.errors import EmptyBody, Fault, InvalidFormat, SchemaViolation
from app.journal.events import Events
from app.journal.formats import ENTITY_TYPES
from app.journal.intake import DEFAULT_ORIGIN
from app.model.entity import Exploded
from app.model.statement import LONGEST_ID, Invalid, checked_id
from app.query import counts

routes = router("/v1/datasets", "entities")

EntityId = Annotated[str, Path(min_length=1, max_length=LONGEST_ID)]


@routes.post(
    "/{dataset}/entities",
    responses=record_answers(Written),
    openapi_extra=records_body(ENTITY_TYPES),
    response_model=Written,
)
async def add_entities(writing: WritingDep, on_error: OnErrorParam = "abort") -> Response:
    """Write entities: durable when answered, all or nothing."""
    return await writing.take_entities(on_error == "skip")


@routes.put(
    "/{dataset}/entities/{entity}",
    responses=write_answers(Written),
    openapi_extra=records_body(("application/json",)),
    response_model=Written,
)
async def put_entity(writing: WritingDep, entity: EntityId) -> Response:
    """Make what this origin says of the entity exactly this."""
    writing.request.scope[LIMIT] = writing.house.settings.max_record_bytes
    body = await writing.request.body()
    if not body.strip():
        raise EmptyBody("this route needs an entity")
    exploded = _entity(writing, entity, body)
    said_by = writing.origin or DEFAULT_ORIGIN
    events = Events()
    events.erase(entity, said_by)
    events.add_entity(exploded, said_by, moment_now())
    answer = Written(entities=1, statements=events.statements, rejected=0)
    return await writing.write(events, answer, body)


@routes.delete("/{dataset}/entities/{entity}", responses=write_answers(Deleted), response_model=Deleted)
async def delete_entity(writing: WritingDep, entity: EntityId) -> Response:
    """Delete what an origin, or every one, says of the entity. What is not there is 0 tombstones."""
    _checked(entity)
    events = Events()
    events.erase(entity, writing.origin)
    tombstones = await writing.look(lambda reading: counts.of_entity(reading, writing.dataset, entity, writing.origin))
    answer = Deleted(tombstones=tombstones)
    return await writing.write(events, answer)


def _checked(entity: str) -> None:
    try:
        checked_id(entity, "path.entity")
    except Invalid as error:
        raise SchemaViolation(
            f"{error.field} {error.reason}", errors=[Fault(field=error.field, reason=error.reason)]
        ) from None


def _entity(writing: Writing, entity: str, body: bytes) -> Exploded:
    """The entity in a body, which must be the one in the path. Raises InvalidFormat, SchemaViolation."""
    try:
        data = loads(body)
    except JSONDecodeError as error:
        fault = Fault(line=error.lineno, reason=error.msg)
        raise InvalidFormat(f"the body is not valid JSON: {error.msg}", errors=[fault]) from None
    try:
        if type(data) is dict and data.setdefault("id", entity) != entity:
            raise Invalid("id", f"is not the one in the path, {entity!r}")  # noqa: TRY301 - answered like the others
        return writing.house.exploder.explode(writing.dataset.name, data)
    except Invalid as error:
        fault = Fault(line=1, field=error.field, reason=error.reason)
        raise SchemaViolation(f"{error.field or 'the entity'}: {error.reason}", errors=[fault]) from None
