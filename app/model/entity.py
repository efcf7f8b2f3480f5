"""From an FtM entity to its statements.

The same as followthemoney's `StatementEntity` makes of it (schema and property checks, cleaning by type, duplicates
left out, the BASE statement with the checksum), without an object per statement: ingest spends its time here.
A property test holds the two equal.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from followthemoney.model import Model
from followthemoney.schema import Schema
from followthemoney.statement.util import BASE_ID
from followthemoney.types import registry
from followthemoney.types.common import PropertyType
from followthemoney.util import sanitize_text
from followthemoney.value import string_list

from app.model.statement import Invalid, checked_id, microseconds

FIELDS = frozenset(
    {"id", "schema", "properties", "caption", "datasets", "referents", "origin", "first_seen", "last_seen",
     "last_change", "target"}
)  # fmt: skip
"""What an entity may hold; what is derived from statements is accepted and not read."""

MOST_KNOWN = 50_000
LONGEST_KNOWN = 120
"""How many values of a type, and how long ones, are remembered with what they clean to."""

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
    "Person": {"name": "A", "country": "de", "birthDate": "2000", "phone": "+49 30 1234567", "email": "a@example.org"},
    "Company": {"name": "A", "jurisdiction": "gb", "website": "https://example.org", "leiCode": "529900T8BM49AURSDO55"},
    "Document": {"mimeType": "text/plain", "language": "deu", "contentHash": "0" * 40},
}
"""Entities with a property of every type that FtM cleans with data of its own."""

Cleaned = tuple[str, str | None] | None
"""A clean value and what it was before, if that was different; None for a value that FtM drops."""


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


class Cleaner:
    """FtM's cleaning of one type of value, remembering what it has cleaned: most values come again and again."""

    def __init__(self, kind: PropertyType) -> None:
        self._kind = kind
        self._plain = PLAIN.fullmatch if kind.name in TIDY else None
        self.known: dict[str, Cleaned] = {}

    def learn(self, raw: str) -> Cleaned:
        """Clean a value that is not known yet."""
        if self._plain is not None and self._plain(raw):
            return raw, None
        text = sanitize_text(raw)
        clean = None if not text else self._kind.clean_text(text)
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


class Exploder:
    """Makes statements of entities, for one process: it remembers schemata and cleaned values. Not for two threads."""

    def __init__(self) -> None:
        self._model = Model.instance()
        self._cleaners: dict[str, Cleaner] = {}
        self._schemata: dict[str, dict[str, Property | str]] = {}

    def explode(self, dataset: str, data: Any) -> Exploded:
        """The statements of an entity under a dataset. Raises Invalid, naming the field."""
        if type(data) is not dict:
            raise Invalid(None, "an entity must be a JSON object")
        if not FIELDS.issuperset(data):
            raise Invalid(min(data.keys() - FIELDS), "is not a field of an entity")
        entity_id = checked_id(data.get("id"), "id")
        schema, known = self._schema(data.get("schema"))
        properties = data.get("properties")
        if properties is None:
            properties = {}
        elif type(properties) is not dict:
            raise Invalid("properties", "must be an object of lists of strings")
        ids: list[bytes] = []
        props: list[str] = []
        values: list[str] = []
        originals: list[str | None] = []
        seen: set[bytes] = set()
        sha1 = hashlib.sha1
        prefix = f"{dataset}.{entity_id}.".encode()
        for name, given in properties.items():
            prop = known.get(name)
            if type(prop) is not Property:
                raise Invalid(f"properties.{name}", _unknown(schema, name, prop))
            start = prefix + prop.infix
            remembered = prop.cleaner.known
            for raw in given if type(given) is list else (given,):
                if type(raw) is not str:
                    raw = _stringified(raw, name)
                    if raw is None:
                        continue
                cleaned = remembered[raw] if raw in remembered else prop.cleaner.learn(raw)
                if cleaned is None:
                    continue
                value, original = cleaned
                if prop.refers and value == entity_id:
                    raise Invalid(f"properties.{name}", "an entity cannot refer to itself")
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
        first, last = data.get("first_seen"), data.get("last_seen")
        return Exploded(
            entity_id,
            schema,
            ids,
            props,
            values,
            originals,
            None if first is None else microseconds(first, "first_seen"),
            None if last is None else microseconds(last, "last_seen"),
        )

    def _schema(self, name: Any) -> tuple[str, dict[str, Property | str]]:
        if type(name) is not str:
            raise Invalid("schema", "is missing" if name is None else "must be a string")
        found = self._schemata.get(name)
        if found is None:
            schema = self._model.get(name)
            if schema is None:
                raise Invalid("schema", f"{name!r} is not a schema of FollowTheMoney")
            found = self._schemata[name] = self._properties(schema)
        return name, found

    def _properties(self, schema: Schema) -> dict[str, Property | str]:
        """By name: what can be set, and for what cannot, the reason."""
        found: dict[str, Property | str] = {}
        for name, prop in schema.properties.items():
            if prop.stub:
                found[name] = "is the other side of a reference and cannot be set"
                continue
            if prop.type.name not in self._cleaners:
                self._cleaners[prop.type.name] = Cleaner(prop.type)
            cleaner = self._cleaners[prop.type.name]
            found[name] = Property(f"{name}.".encode(), cleaner, prop.type is registry.entity)
        return found


def warm_up(exploder: Exploder) -> None:
    """Make FtM load what it loads when it is first needed, so that no client waits for it."""
    for schema, properties in WARMING.items():
        exploder.explode("warming", {"id": "up", "schema": schema, "properties": properties})


def _unknown(schema: str, name: str, reason: Property | str | None) -> str:
    return reason if type(reason) is str else f"{name!r} is not a property of {schema}"


def _stringified(raw: Any, name: str) -> str | None:
    """What FtM makes of a value that is no string; an object or a list in a list is refused."""
    if raw is None:
        return None
    if type(raw) in (int, float, bool):
        return string_list(raw)[0]
    raise Invalid(f"properties.{name}", "must be a string or a list of strings")
