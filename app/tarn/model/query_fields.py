"""What a query can speak of: the fields of an entity, in FtM's own vocabulary.

id              every entity id of the entity, the canonical one included
canonical_id    that one alone
schema          the schemata its statements name
schemata        those, and everything they are
origin          who asserted its statements
first_seen, last_seen   the earliest and latest moment of its statements; BASE counts only if there is nothing else
prop:<name>     the values of a property, in whichever schema it is
type:<name>     the values of every property of a type, by its group (`countries`) or its name (`country`)
"""

from functools import cache
from typing import Any, NamedTuple

from followthemoney.model import Model
from followthemoney.statement.util import BASE_ID
from followthemoney.types import registry

from tarn.model.names import Name

MOMENTS = frozenset({"first_seen", "last_seen"})


class FieldName(Name):
    """A field that exists, down to the property or the type."""

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
        """The field without what follows the colon."""
        return self.partition(":")[0]

    @property
    def name(self) -> str:
        """What follows the colon: a property, or a type or its group."""
        return self.partition(":")[2]

    @property
    def is_moment(self) -> bool:
        return self in MOMENTS

    @property
    def is_number(self) -> bool:
        """Whether its values compare as numbers; all others compare as text."""
        if self.kind == "prop":
            return _types_of_properties()[self.name] == {registry.number.name}
        return self.kind == "type" and _type_names()[self.name] == registry.number.name

    @property
    def holders(self) -> "PropertiesOfType":
        """The properties that hold the values of a `prop:` or `type:` field."""
        return PropertiesOfType([self.name], {}) if self.kind == "prop" else _holders(_type_names()[self.name])


class SortKey(Name):
    """What a list can be sorted by, with `-` before it for the other direction."""

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
    """Properties by their names; `in_some` are of the type in some schemata only, and something else in others."""

    names: list[str]
    in_some: dict[str, list[str]]


@cache
def schema_names() -> frozenset[str]:
    return frozenset(Model.instance().schemata)


@cache
def property_names() -> frozenset[str]:
    """Every property that a statement can be of, BASE included."""
    return frozenset({*_types_of_properties(), BASE_ID})


@cache
def kinds_of(schema: str) -> list[str]:
    """The schema and all that are one of it."""
    found = Model.instance()[schema]
    return sorted({found.name, *(descendant.name for descendant in found.descendants)})


@cache
def lineage() -> tuple[list[str], list[str]]:
    """Every schema beside each that it is: two columns of the same length."""
    pairs = [(schema.name, name) for schema in Model.instance().schemata.values() for name in sorted(schema.names)]
    return [schema for schema, _ in pairs], [name for _, name in pairs]


@cache
def _types_of_properties() -> dict[str, set[str]]:
    """The types a property name has. Other sides of references have no values, and are not in it."""
    found: dict[str, set[str]] = {}
    for _, prop in _properties():
        found.setdefault(prop.name, set()).add(prop.type.name)
    return found


@cache
def _type_names() -> dict[str, str]:
    """The name of a type by itself and by its group."""
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
    """Every schema's properties that can have values, inherited ones included."""
    schemata = Model.instance().schemata.values()
    return [(schema.name, prop) for schema in schemata for prop in schema.properties.values() if not prop.stub]
