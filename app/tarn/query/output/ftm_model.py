"""Cached lookups in the FtM model of schemata and properties: once for each distinct pair, not once per row."""

from collections.abc import Iterable
from functools import cache

from followthemoney.model import Model
from followthemoney.statement.util import get_prop_type
from followthemoney.types import registry

NO_CAPTION = 1_000
"""The rank of a property that is never used as caption: after all others."""


@cache
def resolved_schema(schemata: frozenset[str]) -> str | None:
    """Return the one of these schemata that is a descendant of all the others, or None if there is none.

    FtM combines schemata pairwise (`Model.common_schema`) and fails or not depending on their order; whenever some
    order succeeds, its result is this schema. Like FtM, this ignores schemata that are not in the model.
    """
    known = [schema for name in sorted(schemata) if (schema := Model.instance().get(name)) is not None]
    for schema in known:
        if all(schema.is_a(other) for other in known):
            return str(schema.name)
    return None


def schema_conflict_reason(schemata: Iterable[str]) -> str:
    """Return the reason why these schemata cannot be resolved."""
    known = sorted(name for name in schemata if Model.instance().get(name) is not None)
    return f"No common schema: {', '.join(known)}" if known else "No schema that FollowTheMoney knows"


@cache
def schema_label(schema: str) -> str:
    """Return the label of a schema, which is the caption of an entity without a caption property."""
    known = Model.instance().get(schema)
    return schema if known is None else str(known.label)


@cache
def caption_rank(schema: str, prop: str) -> int:
    """Return the rank of a property among the caption properties of a schema, or NO_CAPTION."""
    known = Model.instance().get(schema)
    return known.caption.index(prop) if known is not None and prop in known.caption else NO_CAPTION


@cache
def holds_names(schema: str, prop: str) -> bool:
    """Return whether the values of a property are names, of which FtM picks the best as caption."""
    known = Model.instance().get(schema)
    known_prop = None if known is None else known.get(prop)
    return known_prop is not None and known_prop.type == registry.name


@cache
def caption_properties() -> tuple[str, ...]:
    """Return the caption properties of all schemata, sorted."""
    return tuple(sorted({prop for schema in Model.instance() for prop in schema.caption}))


@cache
def property_type(schema: str, prop: str) -> str | None:
    """Return the name of a property's type as in FtM's statements, or None if it is not, or no longer, in the model."""
    try:
        return get_prop_type(schema, prop)
    except TypeError:
        return None
