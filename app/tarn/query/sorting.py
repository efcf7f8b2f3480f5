"""Sorting: a total order of entities, and positions in it for cursors.

A key with several values sorts by its smallest value, or by its greatest if descending. Numbers are compared as
numbers, all else as text by code point, of which the first 256 characters count. Entities without a value come last in
both directions. Canonical id and dataset are always the last keys, so that no two entities have the same position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from tarn.model.ftm.query_fields import FieldName, SortKey
from tarn.model.timestamps import FIRST_MOMENT, LAST_MOMENT
from tarn.query.filters import FIRST_SEEN, LAST_SEEN, NUMBER, Condition, has_value

LONGEST_TEXT = 256
"""Characters of a value that are compared: a position must fit into a cursor, and a value may be a whole document."""

Scalar = str | int | float | None


class Selection(NamedTuple):
    """An SQL select list, and its parameters in order."""

    sql: str
    parameters: tuple[Any, ...]


class InvalidPosition(ValueError):
    """The text is not a valid position in this order."""


class EntityPosition(NamedTuple):
    """An entity's position: the value of each sort key, then canonical id and dataset, which make it unique."""

    values: tuple[Scalar, ...]
    canonical_id: str
    dataset: str


@dataclass(frozen=True)
class Sorting:
    """The order defined by some sort keys, which are `sort_0`, `sort_1`, … in its SQL."""

    keys: tuple[SortKey, ...]

    @property
    def select(self) -> Selection:
        """Return the columns `dataset, canonical_id, sort_0, …` of a query that groups by the first two."""
        columns = [_column(key) for key in self.keys]
        sql = ["dataset", "canonical_id", *(f"{column.sql} AS sort_{i}" for i, column in enumerate(columns))]
        return Selection(", ".join(sql), tuple(value for column in columns for value in column.parameters))

    @property
    def order_by(self) -> str:
        keys = [f"sort_{i} {'DESC' if key.descending else 'ASC'} NULLS LAST" for i, key in enumerate(self.keys)]
        return ", ".join([*keys, "canonical_id", "dataset"])

    def after(self, position: EntityPosition) -> Condition:
        """Return the condition for the rows of `select` that come after this position."""
        steps: list[tuple[str, Scalar, str]] = [
            (f"sort_{i}", value, "<" if key.descending else ">")
            for i, (key, value) in enumerate(zip(self.keys, position.values, strict=True))
        ]
        steps += [("canonical_id", position.canonical_id, ">"), ("dataset", position.dataset, ">")]
        alternatives: list[str] = []
        parameters: list[Scalar] = []
        same: list[str] = []
        same_values: list[Scalar] = []
        for column, value, sign in steps:
            if value is None:  # null sorts last, so only the following keys can make a row come after it
                same.append(f"{column} IS NULL")
                continue
            alternatives.append("(" + " AND ".join([*same, f"({column} {sign} ? OR {column} IS NULL)"]) + ")")
            parameters += [*same_values, value]
            same.append(f"{column} = ?")
            same_values.append(value)
        return Condition(f"({' OR '.join(alternatives)})", tuple(parameters))

    def encode(self, row: Sequence[Any]) -> str:
        """Return the position of a row of `select` as text. Not secret; validate it when a client sends it back."""
        dataset, canonical_id, *values = row
        return orjson.dumps([*values, canonical_id, dataset]).decode()

    def decode(self, text: str) -> EntityPosition:
        """Parse a position. Raises InvalidPosition unless it could have been made by `encode` of this order."""
        try:
            decoded = orjson.loads(text)
        except orjson.JSONDecodeError:
            raise InvalidPosition("is not JSON") from None
        if type(decoded) is not list or len(decoded) != len(self.keys) + 2:
            raise InvalidPosition(f"must have {len(self.keys) + 2} values")
        *values, canonical_id, dataset = decoded
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
    condition = has_value(field)
    value = NUMBER if field.is_number else f"left(value, {LONGEST_TEXT})"
    # FILTER would read the values of every property; CASE reads only those of this field.
    return Selection(f"{chosen}(CASE WHEN {condition.sql} THEN {value} END)", condition.parameters)


def _check(field: FieldName, value: Any) -> None:
    if value is None and field.kind == "prop":
        return
    if field.is_moment:
        if type(value) is not int or not FIRST_MOMENT <= value <= LAST_MOMENT:
            raise InvalidPosition(f"{field} must be a timestamp in microseconds")
    elif field.is_number:
        if type(value) is not float:
            raise InvalidPosition(f"{field} must be a number")
    else:
        _check_text(value)


def _check_text(value: Any) -> None:
    if type(value) is not str or len(value) > LONGEST_TEXT or "\x00" in value:
        raise InvalidPosition(f"every other value must be a text of at most {LONGEST_TEXT} characters without NUL")
