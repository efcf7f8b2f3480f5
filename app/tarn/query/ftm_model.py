"""What FtM's model says of schemata and properties, as reads ask for it: once for each distinct pair, never a row."""

from collections.abc import Iterable
from functools import cache

from followthemoney.model import Model
from followthemoney.statement.util import get_prop_type
from followthemoney.types import registry

NO_CAPTION = 1_000
"""The rank of a property that is never a caption: after every other."""


@cache
def resolved_schema(schemata: frozenset[str]) -> str | None:
    """The one of these schemata that is a kind of all the others, or None if there is none.

    FtM folds schemata two by two (`Model.common_schema`) and fails or not depending on their order; wherever some
    order of the fold comes to an end, it is with this one. Like the fold, it passes over what FtM does not know.
    """
    known = [schema for name in sorted(schemata) if (schema := Model.instance().get(name)) is not None]
    for schema in known:
        if all(schema.is_a(other) for other in known):
            return str(schema.name)
    return None


def schema_conflict_reason(schemata: Iterable[str]) -> str:
    """Why these schemata are not resolved."""
    known = sorted(name for name in schemata if Model.instance().get(name) is not None)
    return f"No common schema: {', '.join(known)}" if known else "No schema that FollowTheMoney knows"


@cache
def schema_label(schema: str) -> str:
    """What an entity without a caption of its own is called."""
    found = Model.instance().get(schema)
    return schema if found is None else str(found.label)


@cache
def caption_rank(schema: str, prop: str) -> int:
    """The place of a property among those that a schema takes captions from, or NO_CAPTION."""
    found = Model.instance().get(schema)
    return found.caption.index(prop) if found is not None and prop in found.caption else NO_CAPTION


@cache
def holds_names(schema: str, prop: str) -> bool:
    """Whether the values of a property are names, the best of which FtM picks."""
    found = Model.instance().get(schema)
    known = None if found is None else found.get(prop)
    return known is not None and known.type == registry.name


@cache
def caption_properties() -> tuple[str, ...]:
    """Every property that some schema takes captions from, sorted."""
    return tuple(sorted({prop for schema in Model.instance() for prop in schema.caption}))


@cache
def property_type(schema: str, prop: str) -> str | None:
    """The name of a property's type as FtM's statements have it, or None for what FtM does not know (any more)."""
    try:
        return get_prop_type(schema, prop)
    except TypeError:
        return None
