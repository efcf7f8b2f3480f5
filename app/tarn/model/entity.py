"""From an FtM entity to its statements.

The same as followthemoney's `StatementEntity` makes of it (schema and property checks, cleaning by type, duplicates
left out, the BASE statement with the checksum), without an object per statement: ingest spends its time here.
A property test holds the two equal, with values cleaned and with values taken as they are.

Two things are stored that `StatementEntity` keeps outside its statements: entities nested in a reference become
entities of their own, and each referent gets a BASE statement under its own id with the entity as its canonical id, so
that it names the entity from then on.
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

from tarn.model.omissions import LONGEST_SHOWN
from tarn.model.statement import InvalidRecord, StatementRow, microseconds, statement_id, validate_id

FIELDS = frozenset(
    {"id", "schema", "properties", "caption", "datasets", "referents", "origin", "first_seen", "last_seen",
     "last_change", "target"}
)  # fmt: skip
"""What an entity may hold; what is derived from statements is accepted and not read. Other fields are ignored."""

MOST_REFERENTS = 10_000
DEEPEST = 8
"""Referents of one entity, and levels of entities nested in one another."""

LONGEST_VALUE = {
    **dict.fromkeys(("mimetype", "country", "gender", "language", "topic"), 250),
    **dict.fromkeys(("checksum", "date", "email", "entity", "identifier", "ip", "number", "phone"), 1000),
    **dict.fromkeys(("name", "url"), 16_384),
    "address": 65_536,
}
"""Characters of a value that is cleaned, by the name of its type. Cleaning some types takes time that grows faster than
the value; no real value is near these limits. Types that are not here are cleaned in linear time."""

REJECTED_BY_CLEANING = "rejected by FollowTheMoney's cleaning of {}"

MOST_KNOWN = 50_000
LONGEST_KNOWN = 120
"""How many values of a type, and how long ones, are remembered with what they clean to."""

LONGEST_CODE = 2
"""Characters of a country that FtM knows without its names."""

LETTERS = "A-Za-zÀ-ÖØ-öø-ÿ"
PLAIN_TEXT = (
    f"[{LETTERS}0-9&()+./:_%#-]+(?:'[{LETTERS}]+)*"
    f"(?:,? [{LETTERS}0-9(][{LETTERS}0-9&()+./:_%#-]*(?:'[{LETTERS}]+)*| [&+/:_%#-]+)*"
)
TITLE = "ESQ"
"""What FtM takes from the end of a name, and so from no plain text."""
PLAIN = re.compile(f"(?!.*{TITLE}){PLAIN_TEXT}")
"""Text that cleaning leaves as it is, for types that only tidy up white space, quotes and unsafe characters."""
TIDY = frozenset({"address", "html", "identifier", "json", "name", "number", "string", "text"})

WARMING = {
    "Person": {"name": "A", "country": "Germany", "birthDate": "2000", "phone": "+49 30 1234567", "email": "a@b.org"},
    "Company": {"name": "A", "jurisdiction": "gb", "website": "https://example.org", "leiCode": "529900T8BM49AURSDO55"},
    "Document": {"mimeType": "text/plain", "language": "deu", "contentHash": "0" * 40},
}
"""Entities with a property of every type that FtM cleans with data of its own."""

Cleaned = tuple[str, str | None] | None
"""A clean value and what it was before, if that was different; None for a value that FtM drops."""

Values = Literal["clean", "as_is"]
"""How values are taken: cleaned as FtM does, or as they were given."""


class Omitted(NamedTuple):
    """A value that was left out of an entity that was kept."""

    schema: str
    prop: str
    value: str
    reason: str


@dataclass(slots=True)
class Exploded:
    """An entity's statements, as columns; the last one is BASE."""

    entity_id: str
    schema: str
    ids: list[bytes]
    props: list[str]
    values: list[str]
    originals: list[str | None]
    first_seen: int | None
    last_seen: int | None
    referents: list[tuple[str, bytes]] = field(default_factory=list)
    """Ids that name the entity too, each with the id of the BASE statement that says so."""
    nested: list["Exploded"] = field(default_factory=list)
    """Entities that were given in the place of references to them."""
    omitted: list[Omitted] = field(default_factory=list)
    """Values that were left out, of nested entities too."""
    ignored: list[str] = field(default_factory=list)
    """Fields that no entity has, of nested entities too."""

    def all(self) -> "list[Exploded]":
        """The entity, and those nested in it at any depth."""
        return [self, *(one for child in self.nested for one in child.all())] if self.nested else [self]


class TimeLimitExceeded(Exception):
    """The work takes longer than it may where it is done."""


class TimeLimit:
    """A moment after which work is given up, if one is set."""

    def __init__(self) -> None:
        self._until: float | None = None
        self.is_loading = False
        """Whether FtM's names of countries are still being loaded, which takes seconds: nobody can wait for them."""

    @contextmanager
    def of(self, seconds: float) -> Iterator[None]:
        """Let what is done in the context take so long."""
        self._until = time.perf_counter() + seconds
        try:
            yield
        finally:
            self._until = None

    def check(self) -> None:
        """Raise TimeLimitExceeded if the moment has passed."""
        if self._until is not None and time.perf_counter() > self._until:
            raise TimeLimitExceeded


class Cleaner:
    """FtM's cleaning of one type of value, remembering what it has cleaned: most values come again and again."""

    def __init__(self, kind: PropertyType, limit: TimeLimit | None = None) -> None:
        self.kind = kind.name
        self._kind = kind
        self._limit = limit or TimeLimit()
        self._longest = LONGEST_VALUE.get(kind.name)
        self._plain = PLAIN.fullmatch if kind.name in TIDY else None
        self.known: dict[str, Cleaned] = {}

    def learn(self, raw: str) -> Cleaned:
        """Clean a value that is not known yet. Some take milliseconds, so the time limit is checked for each.

        Raises Invalid for a value that is too long to be cleaned in little time.
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
        except (ValueError, RecursionError):  # a library's own, on a value that it cannot parse
            clean = None
        # An empty string is nothing said; FtM's own `add` would not store it either.
        result: Cleaned = None if not clean else (clean, None if text == clean else text)
        if len(raw) <= LONGEST_KNOWN:
            if len(self.known) >= MOST_KNOWN:
                self.known.clear()
            self.known[raw] = result
        return result


@dataclass(frozen=True, slots=True)
class Property:
    """What the inner loop needs to know of a property."""

    infix: bytes
    cleaner: Cleaner
    refers: bool


class Stub(NamedTuple):
    """The other side of a reference, which is set on the entity that refers."""

    reverse: str


class Exploder:
    """Makes statements of entities, for one process: it remembers schemata and cleaned values. Not for two threads."""

    def __init__(self) -> None:
        self._model = Model.instance()
        self.limit = TimeLimit()
        self._cleaners: dict[str, Cleaner] = {}
        self._schemata: dict[str, dict[str, Property | Stub]] = {}

    def explode(self, dataset: str, data: Any, values: Values = "clean", drop: bool = False) -> Exploded:
        """The statements of an entity under a dataset. Raises Invalid, naming the field.

        With `drop`, a property or a value that cannot be stored is left out of the entity instead. What is left out
        either way is in the result.
        """
        return self._explode(dataset, data, values == "clean", drop, 1)

    def clean(self, dataset: str, row: StatementRow) -> StatementRow | Omitted:
        """A statement with its value cleaned, and its id after that. Raises Invalid."""
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
        made = Exploded(entity_id, schema, ids, props, values, originals, None, None)
        if not FIELDS.issuperset(data):
            made.ignored += data.keys() - FIELDS
        seen: set[bytes] = set()
        sha1 = hashlib.sha1
        prefix = f"{dataset}.{entity_id}.".encode()
        for name, given in properties.items():
            prop = known.get(name)
            if not isinstance(prop, Property):
                self._without_property(made, dataset, name, prop, given, cleans, drop, depth)
                continue
            start = prefix + prop.infix
            remembered = prop.cleaner.known
            for raw in given if type(given) is list else (given,):
                try:
                    if type(raw) is not str:
                        raw = self._text(made, dataset, prop, raw, cleans, drop, depth)
                        if raw is None:
                            continue
                    if cleans:
                        cleaned = remembered[raw] if raw in remembered else prop.cleaner.learn(raw)
                        if cleaned is None:
                            if raw.strip():
                                made.omitted.append(
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
                    made.omitted.append(Omitted(schema, name, truncated(raw), error.reason))
                    continue
                digest = sha1(start + value.encode()).digest()
                if digest in seen:
                    continue
                seen.add(digest)
                ids.append(digest)
                props.append(name)
                values.append(value)
                originals.append(original)
        # Sorted and joined as bytes they are in the order of their hexadecimal forms.
        checksum = sha1(f"{schema}{b''.join(sorted(ids)).hex()}".encode()).hexdigest()
        ids.append(sha1(prefix + b"id." + checksum.encode()).digest())
        props.append(BASE_ID)
        values.append(checksum)
        originals.append(None)
        if "first_seen" in data:
            made.first_seen = _moment(made, data, "first_seen", drop)
        if "last_seen" in data:
            made.last_seen = _moment(made, data, "last_seen", drop)
        if data.get("referents"):
            _refer(made, dataset, data["referents"], drop)
        return made

    def _without_property(
        self,
        made: Exploded,
        dataset: str,
        name: str,
        prop: Stub | None,
        given: Any,
        cleans: bool,
        drop: bool,
        depth: int,
    ) -> None:
        """Take entities that were nested under the other side of their reference; refuse or drop anything else."""
        unknown = f"{truncated(name)!r} is not a property of {made.schema}"
        if prop is None and not drop:
            raise InvalidRecord(f"properties.{name}", unknown)
        for raw in given if type(given) is list else (given,):
            try:
                if prop is None:
                    raise InvalidRecord(None, unknown)  # noqa: TRY301 - listed like the others
                if type(raw) is not dict or "schema" not in raw:
                    raise InvalidRecord(None, "is the other side of a reference and cannot be set")  # noqa: TRY301
                self._nest(made, dataset, _referring(raw, prop.reverse, made.entity_id), cleans, drop, depth)
            except InvalidRecord as error:
                if not drop:
                    raise InvalidRecord(_within(name, error), error.reason) from None
                made.omitted.append(Omitted(made.schema, name, truncated(raw), error.reason))

    def _text(
        self, made: Exploded, dataset: str, prop: Property, raw: Any, cleans: bool, drop: bool, depth: int
    ) -> str | None:
        """What FtM makes of a value that is no string: the id of an entity, which is taken as one of its own."""
        if type(raw) is dict and prop.refers and "id" in raw:
            if "schema" not in raw:
                return validate_id(raw["id"], "id")
            return self._nest(made, dataset, raw, cleans, drop, depth)
        return _stringified(raw)

    def _nest(self, made: Exploded, dataset: str, data: Any, cleans: bool, drop: bool, depth: int) -> str:
        """Make a nested entity one of its own; its id."""
        if depth >= DEEPEST:
            raise InvalidRecord(None, f"entities are nested more than {DEEPEST} levels deep")
        child = self._explode(dataset, data, cleans, drop, depth + 1)
        made.nested.append(child)
        made.omitted += child.omitted
        made.ignored += child.ignored
        return child.entity_id

    def _schema(self, name: Any) -> tuple[str, dict[str, Property | Stub]]:
        if type(name) is not str:
            raise InvalidRecord("schema", "is missing" if name is None else "must be a string")
        found = self._schemata.get(name)
        if found is None:
            schema = self._model.get(name)
            if schema is None:
                raise InvalidRecord("schema", f"{truncated(name)!r} is not a schema of FollowTheMoney")
            found = self._schemata[name] = self._properties(schema)
        return name, found

    def _properties(self, schema: Schema) -> dict[str, Property | Stub]:
        """By name: what can be set, and what is set on the entity that refers."""
        found: dict[str, Property | Stub] = {}
        for name, prop in schema.properties.items():
            if prop.stub:
                assert prop.reverse is not None
                found[name] = Stub(prop.reverse.name)
                continue
            if prop.type.name not in self._cleaners:
                self._cleaners[prop.type.name] = Cleaner(prop.type, self.limit)
            cleaner = self._cleaners[prop.type.name]
            found[name] = Property(f"{name}.".encode(), cleaner, prop.type is registry.entity)
        return found


def warm_up(exploder: Exploder) -> None:
    """Make FtM load what it loads when it is first needed, so that no client waits for it."""
    for schema, properties in WARMING.items():
        exploder.explode("warming", {"id": "up", "schema": schema, "properties": properties})


def truncated(raw: Any) -> str:
    """A value as an error or a report shows it: cut, and never large, whatever was sent."""
    text = raw if isinstance(raw, str) else _described(raw)
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…"


def _described(raw: Any) -> str:
    if isinstance(raw, dict):
        return f"an object of {len(raw)} members"
    return f"a list of {len(raw)}" if isinstance(raw, list) else repr(raw)


def _refer(made: Exploded, dataset: str, referents: Any, drop: bool) -> None:
    """Note what else names the entity. Its own id among them says nothing."""
    if type(referents) is not list or len(referents) > MOST_REFERENTS:
        raise InvalidRecord("referents", f"must be a list of at most {MOST_REFERENTS} ids")
    checksum = made.values[-1]
    noted: set[str] = {made.entity_id}
    for referent in referents:
        try:
            named = validate_id(referent, "referents")
        except InvalidRecord as error:
            if not drop:
                raise
            made.omitted.append(Omitted(made.schema, "referents", truncated(referent), error.reason))
            continue
        if named not in noted:
            noted.add(named)
            made.referents.append((named, statement_id(dataset, named, BASE_ID, checksum)))


def _referring(data: dict[str, Any], prop: str, entity_id: str) -> dict[str, Any]:
    """The entity, with a reference that stands only in its place where it is nested."""
    properties = data.get("properties") or {}
    if type(properties) is not dict:
        raise InvalidRecord("properties", "must be an object of lists of strings")
    given = properties.get(prop, [])
    others = given if type(given) is list else [given]
    return data | {"properties": properties | {prop: [*others, entity_id]}}


def _within(name: str, error: InvalidRecord) -> str:
    """Where an error is that was found in a value of a property."""
    return f"properties.{name}" if error.field is None else f"properties.{name}.{error.field}"


def _moment(made: Exploded, data: dict[str, Any], name: str, drop: bool) -> int | None:
    given = data[name]
    try:
        return None if given is None else microseconds(given, name)
    except InvalidRecord as error:
        if not drop:
            raise
        made.omitted.append(Omitted(made.schema, name, truncated(given), error.reason))
        return None


def _stringified(raw: Any) -> str | None:
    """What FtM makes of a value that is no string; an object or a list in a list is refused."""
    if raw is None:
        return None
    if type(raw) in (int, float, bool):
        return string_list(raw)[0]
    raise InvalidRecord(None, "must be a string or a list of strings")
