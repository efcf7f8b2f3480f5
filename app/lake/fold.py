"""What is live: the one definition.

The newest event on an identity counts. An identity is (statement, origin); of an entity's BASE statements of one origin
only the newest lives, so they share one. An erase ends what came before it, and nothing that comes after.
"""

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from followthemoney.statement.util import BASE_ID

T = TypeVar("T")


class Event(NamedTuple):
    """What the fold needs to know of an event; given to it in the order in which events happened."""

    kind: str
    """add, delete or erase."""
    id: bytes | None
    entity_id: str | None
    prop: str | None
    origin: str | None


class Live(NamedTuple):
    """A statement that is there."""

    id: bytes
    entity_id: str
    origin: str


def fold(events: Iterable[Event]) -> list[Live]:
    """The statements that are live after these events."""
    entities: dict[str, dict[str, dict[bytes, bytes]]] = {}
    for event in events:
        if event.kind == "add":
            assert event.entity_id is not None
            assert event.origin is not None
            assert event.id is not None
            key = BASE_ID.encode() if event.prop == BASE_ID else event.id
            entities.setdefault(event.entity_id, {}).setdefault(event.origin, {})[key] = event.id
        elif event.kind == "erase":
            for origins in _of(entities, event.entity_id):
                if event.origin is None:
                    origins.clear()
                else:
                    origins.pop(event.origin, None)
        else:
            for origins in _of(entities, event.entity_id):
                for held in origins.values() if event.origin is None else _of(origins, event.origin):
                    for key in [key for key, statement in held.items() if statement == event.id]:
                        del held[key]
    return [
        Live(statement, entity_id, origin)
        for entity_id, origins in entities.items()
        for origin, held in origins.items()
        for statement in held.values()
    ]


def _of(known: dict[str, T], name: str | None) -> list[T]:
    """The one of that name if it is there, or all of them."""
    if name is None:
        return list(known.values())
    return [known[name]] if name in known else []
