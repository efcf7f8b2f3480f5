"""Statements: ids, and validation of statement rows."""

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from followthemoney.model import Model
from followthemoney.statement.util import BASE_ID, NON_LANG_TYPE_NAMES

from tarn.model.names import Origin
from tarn.model.timestamps import FIRST_MOMENT, LAST_MOMENT, since_epoch

LONGEST_ID = 255
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Characters forbidden in ids: they would be invisible in a log or break a line in an export."""


class InvalidRecord(ValueError):
    """Validation of a record failed: the field and the reason."""

    def __init__(self, field: str | None, reason: str) -> None:
        super().__init__(reason)
        self.field = field
        self.reason = reason


def statement_id(
    dataset: str, entity_id: str, prop: str, value: str, external: bool = False, lang: str | None = None
) -> bytes:
    """Return FtM's key of a statement (`Statement.make_key`), as twenty bytes."""
    key = f"{dataset}.{entity_id}.{prop}.{value}"
    if lang is not None:
        key = f"{key}@{lang}"
    if external:
        key = f"{key}.ext"
    return hashlib.sha1(key.encode(), usedforsecurity=False).digest()


def validate_id(value: Any, field: str) -> str:
    """Return an entity id unchanged. Raises InvalidRecord."""
    if value is None:
        raise InvalidRecord(field, "is missing")
    if type(value) is not str:
        raise InvalidRecord(field, f"must be a string, not {_kind(value)}")
    if not value:
        raise InvalidRecord(field, "must not be empty")
    if len(value) > LONGEST_ID:
        raise InvalidRecord(field, f"is {len(value)} characters long, at most {LONGEST_ID} are allowed")
    if CONTROL.search(value):
        raise InvalidRecord(field, "must not have control characters")
    return value


def microseconds(value: Any, field: str) -> int:
    """Return an ISO 8601 string or datetime as microseconds since 1970. Without an offset it is in UTC.

    Raises InvalidRecord.
    """
    try:
        moment = datetime.fromisoformat(value) if type(value) is str else value
    except ValueError:
        raise InvalidRecord(field, "must be an ISO 8601 date or time") from None
    if not isinstance(moment, datetime):
        raise InvalidRecord(field, f"must be an ISO 8601 date or time, not {_kind(value)}")
    result = since_epoch(moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment)
    if not FIRST_MOMENT <= result <= LAST_MOMENT:
        raise InvalidRecord(field, "must be in the years 1 to 9999, in UTC")
    return result


@dataclass(frozen=True, slots=True)
class StatementRow:
    """A validated statement as it was sent, with its id in the target dataset."""

    id: bytes
    entity_id: str
    canonical_id: str | None
    schema: str
    prop: str
    value: str
    lang: str | None
    original_value: str | None
    external: bool
    origin: str
    first_seen: int
    last_seen: int


FIELDS = frozenset(
    {"id", "entity_id", "canonical_id", "prop", "prop_type", "schema", "value", "dataset", "lang", "original_value",
     "external", "first_seen", "last_seen", "origin"}
)  # fmt: skip


class StatementReader:
    """Validates statement rows against FtM's model and computes their ids in one dataset."""

    def __init__(self, dataset: str, origin: Origin | None, default_origin: Origin, now: int, strict: bool) -> None:
        self._dataset = dataset
        self._origin = origin
        self._default_origin = default_origin
        self._now = now
        self._strict = strict
        self._types: dict[tuple[str, str], str] = {}
        self._origins: dict[str, Origin] = {}
        self.ignored: Collection[str] = ()
        """Unknown fields of the row that was read last."""

    def read(self, row: dict[str, Any]) -> StatementRow:
        """Return the statement of a row. The row's own `id` and `dataset` are never trusted. Raises InvalidRecord."""
        self.ignored = () if FIELDS.issuperset(row) else row.keys() - FIELDS
        entity_id = validate_id(row.get("entity_id"), "entity_id")
        canonical = row.get("canonical_id")
        canonical_id = None if canonical is None or canonical == entity_id else validate_id(canonical, "canonical_id")
        schema, prop = _text(row, "schema"), _text(row, "prop")
        value = _text(row, "value")
        kind = self._type(schema, prop)
        lang, original = _optional_text(row, "lang"), _optional_text(row, "original_value")
        external = row.get("external") or False
        if type(external) is not bool:
            raise InvalidRecord("external", f"must be true or false, not {_kind(external)}")
        if lang is not None and kind in NON_LANG_TYPE_NAMES:
            lang = None
        first, last = row.get("first_seen"), row.get("last_seen")
        first_seen = self._now if first is None else microseconds(first, "first_seen")
        last_seen = (
            max(first_seen, self._now if first is None else first_seen)
            if last is None
            else microseconds(last, "last_seen")
        )
        statement = StatementRow(
            id=statement_id(self._dataset, entity_id, prop, value, external, lang),
            entity_id=entity_id,
            canonical_id=canonical_id,
            schema=schema,
            prop=prop,
            value=value,
            lang=lang,
            original_value=None if original == value else original,
            external=external,
            origin=self._origin_of(row),
            first_seen=first_seen,
            last_seen=last_seen,
        )
        if self._strict:
            self._check_claims(row, statement)
        return statement

    def _type(self, schema: str, prop: str) -> str:
        """Return the property's type. Raises InvalidRecord for an unknown schema or property."""
        try:
            return self._types[schema, prop]
        except KeyError:
            self._types[schema, prop] = kind = _prop_type(schema, prop)
            return kind

    def _origin_of(self, row: dict[str, Any]) -> str:
        if self._origin is not None:
            return self._origin
        origin = _optional_text(row, "origin")
        if origin is None:
            return self._default_origin
        if origin not in self._origins:
            try:
                self._origins[origin] = Origin(origin)
            except ValueError as error:
                raise InvalidRecord("origin", str(error)) from None
        return origin

    def _check_claims(self, row: dict[str, Any], statement: StatementRow) -> None:
        if (claimed := row.get("dataset")) is not None and claimed != self._dataset:
            raise InvalidRecord("dataset", f"is {claimed!r}, not {self._dataset!r}")
        if (claimed := row.get("id")) is not None and claimed != statement.id.hex():
            raise InvalidRecord("id", f"is {claimed!r}, and the statement's id here is {statement.id.hex()}")


def _prop_type(schema: str, prop: str) -> str:
    known_schema = Model.instance().get(schema)
    if known_schema is None:
        raise InvalidRecord("schema", f"{schema!r} is not a schema of FollowTheMoney")
    if prop == BASE_ID:
        return BASE_ID
    known = known_schema.get(prop)
    if known is None:
        raise InvalidRecord("prop", f"{prop!r} is not a property of {schema}")
    if known.stub:
        raise InvalidRecord("prop", f"{prop!r} is the other side of a reference and cannot be set")
    return known.type.name


def _text(row: dict[str, Any], field: str) -> str:
    text = _optional_text(row, field)
    if text is None:
        raise InvalidRecord(field, "is missing")
    return text


def _optional_text(row: dict[str, Any], field: str) -> str | None:
    value = row.get(field)
    if value is None or value == "":
        return None
    if type(value) is not str:
        raise InvalidRecord(field, f"must be a string, not {_kind(value)}")
    if "\x00" in value:
        raise InvalidRecord(field, "must not have NUL characters")
    return value


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", bool: "a boolean", int: "a number", float: "a number"}.get(
        type(value), type(value).__name__
    )
