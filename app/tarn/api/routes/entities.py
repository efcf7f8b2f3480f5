"""Entities, written."""

from typing import Annotated

from fastapi import Path, Response

from tarn.api.http.ingest import Deleted, HowToReadDep, WritingDep, Written, record_responses, write_responses
from tarn.api.http.routing import records_body, router
from tarn.errors import Fault, QueryTimeout, SchemaViolation
from tarn.journal.event_buffer import Events
from tarn.journal.formats import ENTITY_TYPES
from tarn.model.statement import LONGEST_ID, InvalidRecord, validate_id
from tarn.query import delete_counts as counts
from tarn.query.reader import Reading

routes = router("/v1/datasets", "entities")

EntityId = Annotated[str, Path(min_length=1, max_length=LONGEST_ID)]


@routes.post(
    "/{dataset}/entities",
    responses=record_responses(Written),
    openapi_extra=records_body(ENTITY_TYPES),
    response_model=Written,
)
async def add_entities(writing: WritingDep, reading: HowToReadDep) -> Response:
    """Write entities: durable when answered, all or nothing.

    A record is an entity, also one with others nested in it, or a change: `{"op": "ADD|MOD|DEL", "entity": …}`.
    """
    return await writing.take_entities(reading)


@routes.put(
    "/{dataset}/entities/{entity}",
    responses=write_responses(Written),
    openapi_extra=records_body(("application/json",)),
    response_model=Written,
)
async def put_entity(writing: WritingDep, entity: EntityId, reading: HowToReadDep) -> Response:
    """Make what this origin says of the entity exactly this. Former referents stay until the entity is deleted."""
    return await writing.take_replacement(_checked(entity), reading)


@routes.delete("/{dataset}/entities/{entity}", responses=write_responses(Deleted, QueryTimeout), response_model=Deleted)
async def delete_entity(writing: WritingDep, entity: EntityId) -> Response:
    """Delete what an origin, or every one, says of the entity. What is not there is 0 tombstones."""
    _checked(entity)
    events = Events()
    events.erase(entity, writing.origin)

    def ended(reading: Reading) -> tuple[int, list[counts.Referent]]:
        own = counts.of_entity(reading, writing.dataset, entity, writing.origin)
        return own, counts.referents(reading, writing.dataset, [entity], writing.origin)

    tombstones, referents = await writing.look(ended)
    for referent in referents:
        events.delete(referent.id, referent.entity_id, referent.origin)
    answer = Deleted(tombstones=tombstones + len(referents))
    return await writing.write(events, answer)


def _checked(entity: str) -> str:
    try:
        return validate_id(entity, "path.entity")
    except InvalidRecord as error:
        raise SchemaViolation(
            f"{error.field} {error.reason}", errors=[Fault(field=error.field, reason=error.reason)]
        ) from None
