"""Sorting: a total order of entities, and the place in it where a page begins.

A key with several values sorts by its least one, descending by its greatest; numbers as numbers, all else as text in
the order of code points, of which the first 256 count. Entities without a value come last in both directions. Whatever
the keys, canonical id and dataset decide at the end, so that no two entities have the same place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from tarn.model.query_fields import FieldName, SortKey
from tarn.model.timestamps import FIRST_MOMENT, LAST_MOMENT
from tarn.query.filters import FIRST_SEEN, LAST_SEEN, NUMBER, Condition, has_value

LONGEST_TEXT = 256
"""Characters of a value that count: a position must fit into a cursor, and a value may be a whole document."""

Scalar = str | int | float | None


class Selection(NamedTuple):
    """A select list, and what binds to its question marks, in their order."""

    sql: str
    parameters: tuple[Any, ...]


class InvalidPosition(ValueError):
    """The text is no position in this order."""


class EntityPosition(NamedTuple):
    """An entity's place: the value of each sort key, then what tells it from all others."""

    values: tuple[Scalar, ...]
    canonical_id: str
    dataset: str


@dataclass(frozen=True)
class Sorting:
    """The order that sort keys give. In its SQL they are `sort_0`, `sort_1`, …"""

    keys: tuple[SortKey, ...]

    @property
    def select(self) -> Selection:
        """The columns `dataset, canonical_id, sort_0, …` of a query that groups by the first two."""
        columns = [_column(key) for key in self.keys]
        sql = ["dataset", "canonical_id", *(f"{column.sql} AS sort_{i}" for i, column in enumerate(columns))]
        return Selection(", ".join(sql), tuple(value for column in columns for value in column.parameters))

    @property
    def order_by(self) -> str:
        keys = [f"sort_{i} {'DESC' if key.descending else 'ASC'} NULLS LAST" for i, key in enumerate(self.keys)]
        return ", ".join([*keys, "canonical_id", "dataset"])

    def after(self, position: EntityPosition) -> Condition:
        """Which rows of the columns above come after this position."""
        steps: list[tuple[str, Scalar, str]] = [
            (f"sort_{i}", value, "<" if key.descending else ">")
            for i, (key, value) in enumerate(zip(self.keys, position.values, strict=True))
        ]
        steps += [("canonical_id", position.canonical_id, ">"), ("dataset", position.dataset, ">")]
        ways: list[str] = []
        parameters: list[Scalar] = []
        same: list[str] = []
        same_values: list[Scalar] = []
        for column, value, sign in steps:
            if value is None:  # nothing comes after it but by the keys that follow
                same.append(f"{column} IS NULL")
                continue
            ways.append("(" + " AND ".join([*same, f"({column} {sign} ? OR {column} IS NULL)"]) + ")")
            parameters += [*same_values, value]
            same.append(f"{column} = ?")
            same_values.append(value)
        return Condition(f"({' OR '.join(ways)})", tuple(parameters))

    def encode(self, row: Sequence[Any]) -> str:
        """The position of a row of the columns above, as text; not secret, and not to be trusted when it comes back."""
        dataset, canonical_id, *values = row
        return orjson.dumps([*values, canonical_id, dataset]).decode()

    def decode(self, text: str) -> EntityPosition:
        """The position in a text. Raises NotAPosition unless it could have come from this order."""
        try:
            found = orjson.loads(text)
        except orjson.JSONDecodeError:
            raise InvalidPosition("is not JSON") from None
        if type(found) is not list or len(found) != len(self.keys) + 2:
            raise InvalidPosition(f"must have {len(self.keys) + 2} values")
        *values, canonical_id, dataset = found
        for key, value in zip(self.keys, values, strict=True):
            _check(key.field, value)
        for value in (canonical_id, dataset):
            _check_text(value)
        return EntityPosition(tuple(values), canonical_id, dataset)


def _column(key: SortKey) -> Selection:
    field, chosen = key.field, "max" if key.descending else "min"
    match field.kind:
        case "id" | "canonical_id":
            return Selection("canonical_id", ())
        case "schema":
            return Selection(f"{chosen}(schema)", ())
        case "first_seen":
            return Selection(FIRST_SEEN, ())
        case "last_seen":
            return Selection(LAST_SEEN, ())
    held = has_value(field)
    value = NUMBER if field.is_number else f"left(value, {LONGEST_TEXT})"
    # FILTER would read the values of every property: CASE reads none that does not matter.
    return Selection(f"{chosen}(CASE WHEN {held.sql} THEN {value} END)", held.parameters)


def _check(field: FieldName, value: Any) -> None:
    if value is None and field.kind == "prop":
        return
    if field.is_moment:
        if type(value) is not int or not FIRST_MOMENT <= value <= LAST_MOMENT:
            raise InvalidPosition("must have a moment")
    elif field.is_number:
        if type(value) is not float:
            raise InvalidPosition("must have a number")
    else:
        _check_text(value)


def _check_text(value: Any) -> None:
    if type(value) is not str or len(value) > LONGEST_TEXT or "\x00" in value:
        raise InvalidPosition("must have a text")
