"""Entity write routes: add, replace and delete entities."""

from typing import Annotated

from fastapi import Path, Response

from tarn.api.http.ingest import Deleted, ParseOptionsDep, WriteRequestDep, Written, record_responses, write_responses
from tarn.api.http.routing import records_body, router
from tarn.errors import FieldError, QueryTimeout, SchemaViolation
from tarn.journal.formats import ENTITY_TYPES
from tarn.journal.parsing.event_buffer import Events
from tarn.model.ftm.statement import LONGEST_ID, InvalidRecord, validate_id
from tarn.query import delete_counts
from tarn.query.reader import Reading

routes = router("/v1/datasets", "entities")

EntityId = Annotated[str, Path(min_length=1, max_length=LONGEST_ID)]


@routes.post(
    "/{dataset}/entities",
    responses=record_responses(Written),
    openapi_extra=records_body(ENTITY_TYPES),
    response_model=Written,
)
async def add_entities(writing: WriteRequestDep, options: ParseOptionsDep) -> Response:
    """Add entities: durable on return, all or nothing.

    A record is an entity, which may contain nested entities, or a change: `{"op": "ADD|MOD|DEL", "entity": …}`.
    """
    return await writing.write_entities(options)


@routes.put(
    "/{dataset}/entities/{entity}",
    responses=write_responses(Written),
    openapi_extra=records_body(("application/json",)),
    response_model=Written,
)
async def put_entity(writing: WriteRequestDep, entity: EntityId, options: ParseOptionsDep) -> Response:
    """Replace the statements of this origin about an entity. Its referents are kept until the entity is deleted."""
    return await writing.write_replacement(_checked(entity), options)


@routes.delete("/{dataset}/entities/{entity}", responses=write_responses(Deleted, QueryTimeout), response_model=Deleted)
async def delete_entity(writing: WriteRequestDep, entity: EntityId) -> Response:
    """Delete the statements of one origin, or of all, about an entity. If there are none, `tombstones` is 0."""
    _checked(entity)
    events = Events()
    events.erase(entity, writing.origin)

    def count(reading: Reading) -> tuple[int, list[delete_counts.Referent]]:
        own = delete_counts.of_entity(reading, writing.dataset, entity, writing.origin)
        return own, delete_counts.referents(reading, writing.dataset, [entity], writing.origin)

    tombstones, referents = await writing.look_up(count)
    for referent in referents:
        events.delete(referent.id, referent.entity_id, referent.origin)
    answer = Deleted(tombstones=tombstones + len(referents))
    return await writing.write(events, answer)


def _checked(entity: str) -> str:
    try:
        return validate_id(entity, "path.entity")
    except InvalidRecord as error:
        raise SchemaViolation(
            f"{error.field} {error.reason}", errors=[FieldError(field=error.field, reason=error.reason)]
        ) from None
