"""Fields of entity queries and sort keys, in FtM's vocabulary.

id              every entity id of the entity, including the canonical one
canonical_id    only the canonical id
schema          the schemata of its statements
schemata        those and all their parent schemata
origin          the origins of its statements
first_seen, last_seen   the earliest and latest moment of its statements; BASE counts only without other statements
prop:<name>     the values of a property, in any schema
type:<name>     the values of all properties of a type, by its group (`countries`) or its name (`country`)
"""

from functools import cache
from typing import Any, NamedTuple

from followthemoney.model import Model
from followthemoney.statement.util import BASE_ID
from followthemoney.types import registry

from tarn.model.names import Name

MOMENTS = frozenset({"first_seen", "last_seen"})


class FieldName(Name):
    """A valid query field; its property or type exists in FtM."""

    what = "field"
    rule = "must be id, canonical_id, schema, schemata, origin, first_seen, last_seen, prop:<property> or type:<types>"
    pattern = r"(id|canonical_id|schema|schemata|origin|first_seen|last_seen|(prop|type):[A-Za-z][A-Za-z0-9]*)"

    @classmethod
    def check(cls, value: str) -> None:
        kind, _, name = value.partition(":")
        if kind == "prop" and name not in _types_of_properties():
            raise ValueError(f"field {value!r}: no schema of FollowTheMoney has values of a property {name!r}")
        if kind == "type" and name not in _type_names():
            raise ValueError(f"field {value!r}: FollowTheMoney has no type or group of types {name!r}")

    @property
    def kind(self) -> str:
        """Return the part before the colon."""
        return self.partition(":")[0]

    @property
    def name(self) -> str:
        """Return the part after the colon: a property, or a type or its group."""
        return self.partition(":")[2]

    @property
    def is_moment(self) -> bool:
        return self in MOMENTS

    @property
    def is_number(self) -> bool:
        """Return whether its values are compared as numbers; all others are compared as text."""
        if self.kind == "prop":
            return _types_of_properties()[self.name] == {registry.number.name}
        return self.kind == "type" and _type_names()[self.name] == registry.number.name

    @property
    def holders(self) -> "PropertiesOfType":
        """Return the properties that have the values of a `prop:` or `type:` field."""
        return PropertiesOfType([self.name], {}) if self.kind == "prop" else _holders(_type_names()[self.name])


class SortKey(Name):
    """A field to sort by, with a leading `-` for descending order."""

    what = "sort key"
    rule = "must be id, canonical_id, schema, first_seen, last_seen or prop:<property>, or one of them after a -"
    pattern = r"-?(id|canonical_id|schema|first_seen|last_seen|prop:[A-Za-z][A-Za-z0-9]*)"

    @classmethod
    def check(cls, value: str) -> None:
        FieldName(value.removeprefix("-"))

    @property
    def field(self) -> FieldName:
        return FieldName(self.removeprefix("-"))

    @property
    def descending(self) -> bool:
        return self.startswith("-")


class PropertiesOfType(NamedTuple):
    """Names of properties; those in `in_some` have the type only in the listed schemata, and another type elsewhere."""

    names: list[str]
    in_some: dict[str, list[str]]


@cache
def schema_names() -> frozenset[str]:
    return frozenset(Model.instance().schemata)


@cache
def property_names() -> frozenset[str]:
    """Return the names of all properties that a statement can have, including BASE."""
    return frozenset({*_types_of_properties(), BASE_ID})


@cache
def schema_descendants(schema: str) -> list[str]:
    """Return the schema and all its descendants."""
    root = Model.instance()[schema]
    return sorted({root.name, *(descendant.name for descendant in root.descendants)})


@cache
def schema_ancestors() -> tuple[list[str], list[str]]:
    """Return all pairs of a schema and one of its ancestors or itself, as two columns of the same length."""
    pairs = [(schema.name, name) for schema in Model.instance().schemata.values() for name in sorted(schema.names)]
    return [schema for schema, _ in pairs], [name for _, name in pairs]


@cache
def _types_of_properties() -> dict[str, set[str]]:
    """Return the types of each property name. Reverse sides of references have no values, and are not included."""
    types: dict[str, set[str]] = {}
    for _, prop in _properties():
        types.setdefault(prop.name, set()).add(prop.type.name)
    return types


@cache
def _type_names() -> dict[str, str]:
    """Return the name of each type, by its name and by its group."""
    return {key: kind.name for kind in registry.types for key in (kind.name, kind.group) if key}


@cache
def _holders(kind: str) -> PropertiesOfType:
    always = sorted(name for name, kinds in _types_of_properties().items() if kinds == {kind})
    sometimes = {name for name, kinds in _types_of_properties().items() if kind in kinds and len(kinds) > 1}
    in_some: dict[str, list[str]] = {name: [] for name in sorted(sometimes)}
    for schema, prop in _properties():
        if prop.name in sometimes and prop.type.name == kind:
            in_some[prop.name].append(schema)
    return PropertiesOfType(always, in_some)


def _properties() -> list[tuple[str, Any]]:
    """Return each schema's properties that can have values, including inherited ones."""
    schemata = Model.instance().schemata.values()
    return [(schema.name, prop) for schema in schemata for prop in schema.properties.values() if not prop.stub]
