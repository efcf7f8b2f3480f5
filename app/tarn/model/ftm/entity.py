"""Convert FtM entities to statements (`Exploder`), with FtM's cleaning of values.

The result equals that of followthemoney's `StatementEntity` (schema and property checks, cleaning by type, duplicates
removed, the BASE statement with the checksum), but without an object per statement: this is the hot path of ingest.
A property test checks that both are equal, with cleaned and with unchanged values.

Two things are stored that `StatementEntity` keeps outside its statements: entities nested in a reference become
separate entities, and each referent gets a BASE statement under its own id with the entity as its canonical id, so that
the referent resolves to the entity.
"""

import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from followthemoney.model import Model
from followthemoney.schema import Schema
from followthemoney.statement.util import BASE_ID
from followthemoney.types import registry
from followthemoney.types.common import PropertyType
from followthemoney.util import sanitize_text
from followthemoney.value import string_list

from tarn.model.ftm.omissions import LONGEST_SHOWN
from tarn.model.ftm.statement import InvalidRecord, StatementRow, microseconds, statement_id, validate_id

FIELDS = frozenset(
    {"id", "schema", "properties", "caption", "datasets", "referents", "origin", "first_seen", "last_seen",
     "last_change", "target"}
)  # fmt: skip
"""Fields of an entity; those derived from statements are accepted but not read. Other fields are ignored."""

MOST_REFERENTS = 10_000
DEEPEST = 8
"""Maximum referents of one entity, and maximum levels of nested entities."""

LONGEST_VALUE = {
    **dict.fromkeys(("mimetype", "country", "gender", "language", "topic"), 250),
    **dict.fromkeys(("checksum", "date", "email", "entity", "identifier", "ip", "number", "phone"), 1000),
    **dict.fromkeys(("name", "url"), 16_384),
    "address": 65_536,
}
"""Maximum characters of a value that is cleaned, by type name. The time to clean these types grows faster than linearly
with the length; no real value is near these limits. Other types are cleaned in linear time."""

REJECTED_BY_CLEANING = "rejected by FollowTheMoney's cleaning of {}"

MOST_KNOWN = 50_000
LONGEST_KNOWN = 120
"""Cache of cleaned values per type: maximum entries, and maximum characters of a cached value."""

LONGEST_CODE = 2
"""Length of a country code, which FtM recognizes without its country names."""

LETTERS = "A-Za-zÀ-ÖØ-öø-ÿ"
PLAIN_TEXT = (
    f"[{LETTERS}0-9&()+./:_%#-]+(?:'[{LETTERS}]+)*"
    f"(?:,? [{LETTERS}0-9(][{LETTERS}0-9&()+./:_%#-]*(?:'[{LETTERS}]+)*| [&+/:_%#-]+)*"
)
TITLE = "ESQ"
"""FtM removes this from the end of a name, so text with it does not count as plain."""
PLAIN = re.compile(f"(?!.*{TITLE}){PLAIN_TEXT}")
"""Text that cleaning does not change, for types that only normalize white space, quotes and unsafe characters."""
TIDY = frozenset({"address", "html", "identifier", "json", "name", "number", "string", "text"})

WARMING = {
    "Person": {"name": "A", "country": "Germany", "birthDate": "2000", "phone": "+49 30 1234567", "email": "a@b.org"},
    "Company": {"name": "A", "jurisdiction": "gb", "website": "https://example.org", "leiCode": "529900T8BM49AURSDO55"},
    "Document": {"mimeType": "text/plain", "language": "deu", "contentHash": "0" * 40},
}
"""Entities with a property of every type for whose cleaning FtM loads data."""

Cleaned = tuple[str, str | None] | None
"""The clean value, and the original if it differs; None for a value that FtM drops."""

Values = Literal["clean", "as_is"]
"""Whether values are cleaned as FtM does, or stored unchanged."""


class Omitted(NamedTuple):
    """A value that was omitted from an entity that was stored."""

    schema: str
    prop: str
    value: str
    reason: str


@dataclass(slots=True)
class Exploded:
    """The statements of an entity, as columns; the last one is BASE."""

    entity_id: str
    schema: str
    ids: list[bytes]
    props: list[str]
    values: list[str]
    originals: list[str | None]
    first_seen: int | None
    last_seen: int | None
    referents: list[tuple[str, bytes]] = field(default_factory=list)
    """Other ids of the entity, each with the id of the BASE statement that records it."""
    nested: list["Exploded"] = field(default_factory=list)
    """Entities that were sent in place of references to them."""
    omitted: list[Omitted] = field(default_factory=list)
    """Omitted values, including those of nested entities."""
    ignored: list[str] = field(default_factory=list)
    """Unknown fields, including those of nested entities."""

    def all(self) -> "list[Exploded]":
        """Return the entity and those nested in it at any depth."""
        return [self, *(entity for child in self.nested for entity in child.all())] if self.nested else [self]


class TimeLimitExceeded(Exception):
    """The work exceeded the time limit of the process or thread that runs it."""


class TimeLimit:
    """An optional deadline after which work is aborted."""

    def __init__(self) -> None:
        self._until: float | None = None
        self.is_loading = False
        """Whether FtM's country names are still loading, which takes seconds: work that needs them is aborted."""

    @contextmanager
    def of(self, seconds: float) -> Iterator[None]:
        """Set the deadline of the block, in seconds from now."""
        self._until = time.perf_counter() + seconds
        try:
            yield
        finally:
            self._until = None

    def check(self) -> None:
        """Raise TimeLimitExceeded if the deadline has passed."""
        if self._until is not None and time.perf_counter() > self._until:
            raise TimeLimitExceeded


class Cleaner:
    """FtM's cleaning of one type of value, with a cache: most values are frequent."""

    def __init__(self, kind: PropertyType, limit: TimeLimit | None = None) -> None:
        self.kind = kind.name
        self._kind = kind
        self._limit = limit or TimeLimit()
        self._longest = LONGEST_VALUE.get(kind.name)
        self._plain = PLAIN.fullmatch if kind.name in TIDY else None
        self.known: dict[str, Cleaned] = {}

    def learn(self, raw: str) -> Cleaned:
        """Clean a value that is not cached, and cache the result.

        Some values take milliseconds, so the time limit is checked for each: raises TimeLimitExceeded. Raises
        InvalidRecord for a value that is too long to be cleaned quickly.
        """
        if self._longest is not None and len(raw) > self._longest:
            raise InvalidRecord(
                None, f"is {len(raw)} characters long, at most {self._longest} are cleaned as {self.kind}"
            )
        self._limit.check()
        if self._limit.is_loading and self._kind.name == "country" and len(raw) > LONGEST_CODE:
            raise TimeLimitExceeded
        if self._plain is not None and self._plain(raw):
            return raw, None
        text = sanitize_text(raw)
        try:
            clean = None if not text else self._kind.clean_text(text)
        except (ValueError, RecursionError):  # raised by a library that cannot parse the value
            clean = None
        # An empty string is no value; FtM's `add` does not store it either.
        result: Cleaned = None if not clean else (clean, None if text == clean else text)
        if len(raw) <= LONGEST_KNOWN:
            if len(self.known) >= MOST_KNOWN:
                self.known.clear()
            self.known[raw] = result
        return result


@dataclass(frozen=True, slots=True)
class Property:
    """Precomputed data of a property for the inner loop."""

    infix: bytes
    cleaner: Cleaner
    refers: bool


class Stub(NamedTuple):
    """The reverse side of a reference; only the referring entity stores a value."""

    reverse: str


class Exploder:
    """Converts entities to statements; caches schemata and cleaned values. One per process, not thread-safe."""

    def __init__(self) -> None:
        self._model = Model.instance()
        self.limit = TimeLimit()
        self._cleaners: dict[str, Cleaner] = {}
        self._schemata: dict[str, dict[str, Property | Stub]] = {}

    def explode(self, dataset: str, data: Any, values: Values = "clean", drop: bool = False) -> Exploded:
        """Return the statements of an entity in a dataset. Raises InvalidRecord, which names the field.

        With `drop`, properties and values that cannot be stored are omitted instead of raising. The result lists what
        was omitted in either mode.
        """
        return self._explode(dataset, data, values == "clean", drop, 1)

    def clean(self, dataset: str, row: StatementRow) -> StatementRow | Omitted:
        """Return the statement with a cleaned value and the id of that value. Raises InvalidRecord."""
        if row.prop == BASE_ID:
            return row
        _, known = self._schema(row.schema)
        prop = known[row.prop]
        assert isinstance(prop, Property)
        try:
            cleaned = prop.cleaner.known.get(row.value) or prop.cleaner.learn(row.value)
        except InvalidRecord as error:
            raise InvalidRecord("value", error.reason) from None
        if cleaned is None:
            return Omitted(row.schema, row.prop, row.value, REJECTED_BY_CLEANING.format(prop.cleaner.kind))
        value, original = cleaned
        if value == row.value:
            return row
        changed = statement_id(dataset, row.entity_id, row.prop, value, row.external, row.lang)
        return replace(row, id=changed, value=value, original_value=row.original_value or original)

    def _explode(self, dataset: str, data: Any, cleans: bool, drop: bool, depth: int) -> Exploded:
        if type(data) is not dict:
            raise InvalidRecord(None, "an entity must be a JSON object")
        entity_id = validate_id(data.get("id"), "id")
        schema, known = self._schema(data.get("schema"))
        properties = data.get("properties")
        if properties is None:
            properties = {}
        elif type(properties) is not dict:
            raise InvalidRecord("properties", "must be an object of lists of strings")
        ids: list[bytes] = []
        props: list[str] = []
        values: list[str] = []
        originals: list[str | None] = []
        exploded = Exploded(entity_id, schema, ids, props, values, originals, None, None)
        if not FIELDS.issuperset(data):
            exploded.ignored += data.keys() - FIELDS
        seen: set[bytes] = set()
        sha1 = hashlib.sha1
        prefix = f"{dataset}.{entity_id}.".encode()
        for name, raw_values in properties.items():
            prop = known.get(name)
            if not isinstance(prop, Property):
                self._without_property(exploded, dataset, name, prop, raw_values, cleans, drop, depth)
                continue
            start = prefix + prop.infix
            remembered = prop.cleaner.known
            for raw in raw_values if type(raw_values) is list else (raw_values,):
                try:
                    if type(raw) is not str:
                        raw = self._text(exploded, dataset, prop, raw, cleans, drop, depth)
                        if raw is None:
                            continue
                    if cleans:
                        cleaned = remembered[raw] if raw in remembered else prop.cleaner.learn(raw)
                        if cleaned is None:
                            if raw.strip():
                                exploded.omitted.append(
                                    Omitted(schema, name, raw, REJECTED_BY_CLEANING.format(prop.cleaner.kind))
                                )
                            continue
                        value, original = cleaned
                        if prop.refers and value == entity_id:
                            raise InvalidRecord(None, "an entity cannot refer to itself")  # noqa: TRY301 - may be dropped
                    else:
                        if not raw:
                            continue
                        if "\x00" in raw:
                            raise InvalidRecord(None, "must not have NUL characters")  # noqa: TRY301 - may be dropped
                        value, original = raw, None
                except InvalidRecord as error:
                    if not drop:
                        raise InvalidRecord(_within(name, error), error.reason) from None
                    exploded.omitted.append(Omitted(schema, name, truncated(raw), error.reason))
                    continue
                digest = sha1(start + value.encode()).digest()
                if digest in seen:
                    continue
                seen.add(digest)
                ids.append(digest)
                props.append(name)
                values.append(value)
                originals.append(original)
        # Sorting bytes gives the same order as sorting their hexadecimal forms.
        checksum = sha1(f"{schema}{b''.join(sorted(ids)).hex()}".encode()).hexdigest()
        ids.append(sha1(prefix + b"id." + checksum.encode()).digest())
        props.append(BASE_ID)
        values.append(checksum)
        originals.append(None)
        if "first_seen" in data:
            exploded.first_seen = _moment(exploded, data, "first_seen", drop)
        if "last_seen" in data:
            exploded.last_seen = _moment(exploded, data, "last_seen", drop)
        if data.get("referents"):
            _refer(exploded, dataset, data["referents"], drop)
        return exploded

    def _without_property(
        self,
        exploded: Exploded,
        dataset: str,
        name: str,
        prop: Stub | None,
        raw_values: Any,
        cleans: bool,
        drop: bool,
        depth: int,
    ) -> None:
        """Convert entities nested under the reverse side of a reference; refuse or drop anything else."""
        unknown = f"{truncated(name)!r} is not a property of {exploded.schema}"
        if prop is None and not drop:
            raise InvalidRecord(f"properties.{name}", unknown)
        for raw in raw_values if type(raw_values) is list else (raw_values,):
            try:
                if prop is None:
                    raise InvalidRecord(None, unknown)  # noqa: TRY301 - listed like the others
                if type(raw) is not dict or "schema" not in raw:
                    raise InvalidRecord(None, "is the other side of a reference and cannot be set")  # noqa: TRY301
                self._nest(exploded, dataset, _referring(raw, prop.reverse, exploded.entity_id), cleans, drop, depth)
            except InvalidRecord as error:
                if not drop:
                    raise InvalidRecord(_within(name, error), error.reason) from None
                exploded.omitted.append(Omitted(exploded.schema, name, truncated(raw), error.reason))

    def _text(
        self, exploded: Exploded, dataset: str, prop: Property, raw: Any, cleans: bool, drop: bool, depth: int
    ) -> str | None:
        """Return a value that is not a string as FtM converts it; a nested entity is exploded, its id returned."""
        if type(raw) is dict and prop.refers and "id" in raw:
            if "schema" not in raw:
                return validate_id(raw["id"], "id")
            return self._nest(exploded, dataset, raw, cleans, drop, depth)
        return _stringified(raw)

    def _nest(self, exploded: Exploded, dataset: str, data: Any, cleans: bool, drop: bool, depth: int) -> str:
        """Explode a nested entity and return its id."""
        if depth >= DEEPEST:
            raise InvalidRecord(None, f"entities are nested more than {DEEPEST} levels deep")
        child = self._explode(dataset, data, cleans, drop, depth + 1)
        exploded.nested.append(child)
        exploded.omitted += child.omitted
        exploded.ignored += child.ignored
        return child.entity_id

    def _schema(self, name: Any) -> tuple[str, dict[str, Property | Stub]]:
        if type(name) is not str:
            raise InvalidRecord("schema", "is missing" if name is None else "must be a string")
        properties = self._schemata.get(name)
        if properties is None:
            schema = self._model.get(name)
            if schema is None:
                raise InvalidRecord("schema", f"{truncated(name)!r} is not a schema of FollowTheMoney")
            properties = self._schemata[name] = self._properties(schema)
        return name, properties

    def _properties(self, schema: Schema) -> dict[str, Property | Stub]:
        """Return the schema's properties by name; reverse sides of references are stubs."""
        result: dict[str, Property | Stub] = {}
        for name, prop in schema.properties.items():
            if prop.stub:
                assert prop.reverse is not None
                result[name] = Stub(prop.reverse.name)
                continue
            if prop.type.name not in self._cleaners:
                self._cleaners[prop.type.name] = Cleaner(prop.type, self.limit)
            cleaner = self._cleaners[prop.type.name]
            result[name] = Property(f"{name}.".encode(), cleaner, prop.type is registry.entity)
        return result


def warm_up(exploder: Exploder) -> None:
    """Make FtM load its lazily loaded data now, so that no request waits for it."""
    for schema, properties in WARMING.items():
        exploder.explode("warming", {"id": "up", "schema": schema, "properties": properties})


def truncated(raw: Any) -> str:
    """Return a value for an error message or report, truncated; objects and lists only by their size."""
    text = raw if isinstance(raw, str) else _described(raw)
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…"


def _described(raw: Any) -> str:
    if isinstance(raw, dict):
        return f"an object of {len(raw)} members"
    return f"a list of {len(raw)}" if isinstance(raw, list) else repr(raw)


def _refer(exploded: Exploded, dataset: str, referents: Any, drop: bool) -> None:
    """Add the entity's other ids, with their BASE statements. Its own id and duplicates are skipped."""
    if type(referents) is not list or len(referents) > MOST_REFERENTS:
        raise InvalidRecord("referents", f"must be a list of at most {MOST_REFERENTS} ids")
    checksum = exploded.values[-1]
    added: set[str] = {exploded.entity_id}
    for referent in referents:
        try:
            other_id = validate_id(referent, "referents")
        except InvalidRecord as error:
            if not drop:
                raise
            exploded.omitted.append(Omitted(exploded.schema, "referents", truncated(referent), error.reason))
            continue
        if other_id not in added:
            added.add(other_id)
            exploded.referents.append((other_id, statement_id(dataset, other_id, BASE_ID, checksum)))


def _referring(data: dict[str, Any], prop: str, entity_id: str) -> dict[str, Any]:
    """Return the nested entity with the reference to its parent added, which its position implies."""
    properties = data.get("properties") or {}
    if type(properties) is not dict:
        raise InvalidRecord("properties", "must be an object of lists of strings")
    references = properties.get(prop, [])
    others = references if type(references) is list else [references]
    return data | {"properties": properties | {prop: [*others, entity_id]}}


def _within(name: str, error: InvalidRecord) -> str:
    """Return the field path of an error in a value of a property."""
    return f"properties.{name}" if error.field is None else f"properties.{name}.{error.field}"


def _moment(exploded: Exploded, data: dict[str, Any], name: str, drop: bool) -> int | None:
    value = data[name]
    try:
        return None if value is None else microseconds(value, name)
    except InvalidRecord as error:
        if not drop:
            raise
        exploded.omitted.append(Omitted(exploded.schema, name, truncated(value), error.reason))
        return None


def _stringified(raw: Any) -> str | None:
    """Return a number or boolean as FtM converts it to a string. Raises InvalidRecord for an object or a list."""
    if raw is None:
        return None
    if type(raw) in (int, float, bool):
        return string_list(raw)[0]
    raise InvalidRecord(None, "must be a string or a list of strings")
