"""From rows to statements, as followthemoney's mapping and the loading of what it makes would do it.

FtM maps a record at a time, through objects and lists that are made for each. Here some thousand rows are mapped at
once, a property after the other: what is left to do for each value is a look into a dictionary and a hash. What comes
of it is the same, statement by statement; a property test holds the two equal. Rows that are in any way unusual are
left to FtM itself, one by one: those are the ones that may be bad.

A value that is given and not stored is omitted, and reported: what FtM's mapping discards (and logs), what is not
stored although the mapping accepts it, and what is too long to be cleaned. The same value for the same property of the
same entity of a row is reported once. Blank values are not reported.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from followthemoney.entity import ValueEntity
from followthemoney.helpers import inline_names
from followthemoney.mapping.csv import CSVSource
from followthemoney.mapping.entity import EntityMapping
from followthemoney.mapping.property import PropertyMapping
from followthemoney.mapping.query import QueryMapping
from followthemoney.property import Property
from followthemoney.proxy import EntityProxy
from followthemoney.statement.util import BASE_ID
from followthemoney.types import registry
from followthemoney.types.common import PropertyType
from followthemoney.util import key_bytes, sanitize_text

from tarn.errors import Fault
from tarn.journal.event_buffer import SCHEMA, Events, Kind
from tarn.model.entity import (
    LONGEST_KNOWN,
    LONGEST_VALUE,
    MOST_KNOWN,
    PLAIN,
    PLAIN_TEXT,
    REJECTED_BY_CLEANING,
    TIDY,
    TITLE,
    Cleaner,
    Exploded,
    Exploder,
)
from tarn.model.mapping import MappingDocument, Query
from tarn.model.names import DatasetName
from tarn.model.shards import shards_of
from tarn.model.statement import InvalidRecord, validate_id

BLOCK_ROWS = 2048
"""Rows that are mapped together."""

FEW_ROWS = 8
"""Rows of which it is not worth to find out which of them is unusual."""

MOST_USUAL_VALUES = 64
"""Values of one property of a row that are usual."""

MOST_VALUES = 5_000
"""Values that a row may be split into: FtM compares each with every other."""

LONG = 64 << 10
"""Characters from which on a value is unusual: FtM counts what long texts come to, and drops what is too much."""

MOST_SOURCES = 200
"""Columns and literals of a query below which texts that are not long cannot come to too much."""

LONGEST_TEMPLATE = 4 << 20
"""Characters that a template may grow to."""

LONGEST_REASON = 500
"""Characters of what FtM says of a bad row: it may repeat the whole value."""

WORTH_DROPPING = 0.95
"""The part of events that are different below which it pays to leave the others out."""

INVALID_BYTES = re.compile("[\udc80-\udcff]")
"""What Python makes of bytes that are not of an encoding."""

PLAIN_DATE = "[12][0-9]{3}(?:-(?:0[1-9]|1[0-2])(?:-(?:0[1-9]|1[0-9]|2[0-8]))?)?"
"""A year, month or day that there is in every calendar, written as FtM writes it."""

DATE = re.compile(PLAIN_DATE)

ALL_PLAIN, ALL_DATES, NOTHING = (re.compile(rf"(?:{text}\n)*+") for text in (PLAIN_TEXT, PLAIN_DATE, "(?!)"))
"""Plain texts, each on a line. What a text is like is certain at each character, so nothing is ever tried again."""

ID = re.compile("[A-Za-z0-9]+")
"""An id that is one for every tool; hashes are."""

NAMES_PROPERTY = "namesMentioned"
"""Where FtM repeats the names of entities that an entity refers to."""

Row = Sequence[str]
Texts = list[str | None]
"""A column: what each row says, None where it says nothing."""
Record = dict[str, str]
Digests = list[bytes | None]
Places = npt.NDArray[np.uint16]


class UnusualRows(Exception):
    """These rows are for FtM itself to map."""


class BadRow(NamedTuple):
    """A row that came to nothing: its place among those that were given, and why."""

    place: int
    fault: Fault


class OmittedInRow(NamedTuple):
    """A value that was left out of a row that was mapped: the row's place among those that were given, and why."""

    place: int
    schema: str
    prop: str
    value: str
    reason: str


class MappedBlock(NamedTuple):
    """What some rows came to: events without their place in a batch, the rows that could not be used, and the values
    that were left out of the others, in the order of their rows."""

    events: pa.RecordBatch
    entities: int
    bad: list[BadRow]
    omitted: list[OmittedInRow]


class Mapper:
    """Maps rows of one file for one dataset. Not for two threads: it remembers what it has cleaned."""

    def __init__(
        self, mapping: MappingDocument, header: Sequence[str], dataset: DatasetName, origin: str, moment: int
    ) -> None:
        self._dataset = dataset
        self._origin = origin
        self._moment = moment
        self._exploder = Exploder()
        self._is_doubtful = False
        # Of columns that have the same name, FtM reads the last.
        self._places = {name: place for place, name in enumerate(header)}
        cleaners = _Cleaners()
        self._queries = [
            _Query(query, ftm, cleaners, dataset)
            for query, ftm in zip(mapping.queries, mapping.ftm(dataset), strict=True)
        ]
        self._used = sorted({name for query in self._queries for name in query.columns})

    def map(self, rows: Sequence[Row], is_doubtful: bool = False) -> Iterator[MappedBlock]:
        """What the rows say, in their order. If that is doubtful, they may hold what is not of the file's encoding."""
        self._is_doubtful = is_doubtful
        for start in range(0, len(rows), BLOCK_ROWS):
            yield from self._block(rows[start : start + BLOCK_ROWS], start)

    def _block(self, rows: Sequence[Row], start: int) -> Iterator[MappedBlock]:
        """All at once if nothing about them is unusual, else by halves, and the last few one by one."""
        try:
            yield self._at_once(rows, start)
        except Exception:  # noqa: BLE001 - whatever it is, it is met again below, at the row that it is about
            if len(rows) <= FEW_ROWS:
                yield self._one_by_one(rows, start)
                return
            middle = len(rows) // 2
            yield from self._block(rows[:middle], start)
            yield from self._block(rows[middle:], start + middle)

    # All at once

    def _at_once(self, rows: Sequence[Row], start: int) -> MappedBlock:
        if self._is_doubtful and any(map(_has_invalid_bytes, rows)):
            raise UnusualRows
        texts = {name: self._column(rows, name) for name in self._used}
        made = _StatementColumns()
        for query in self._queries:
            query.map(texts, len(rows), made)
        return MappedBlock(made.table(self._origin, self._moment), made.entities, [], made.omitted(start))

    def _column(self, rows: Sequence[Row], name: str) -> Texts:
        """What `CSVSource.read_csv` makes of a column."""
        place = self._places.get(name)
        if place is None:
            return [None] * len(rows)
        try:
            column = [row[place] for row in rows]
        except IndexError:
            column = [row[place] if place < len(row) else "" for row in rows]
        if _is_plain("".join(column)):
            return [text.strip() or None for text in column]
        return [text.strip() or None if _is_plain(text) else sanitize_text(text) for text in column]

    # One by one

    def _one_by_one(self, rows: Sequence[Row], start: int) -> MappedBlock:
        events = Events()
        bad: list[BadRow] = []
        omitted: list[OmittedInRow] = []
        for place, row in enumerate(rows, start):
            try:
                entities, values = self._entities(row)
                for entity in entities:
                    events.add_entity(entity, self._origin, self._moment)
                omitted += [OmittedInRow(place, *value) for value in values]
            except InvalidRecord as error:
                bad.append(BadRow(place, Fault(field=error.field, reason=error.reason)))
            except Exception as error:  # noqa: BLE001 - FtM's cleaning may raise nearly anything
                bad.append(BadRow(place, Fault(reason=(str(error) or type(error).__name__)[:LONGEST_REASON])))
        table = events.table(0) if len(events) else pa.RecordBatch.from_pylist([], SCHEMA)
        return MappedBlock(table, events.entities, bad, omitted)

    def _entities(self, row: Row) -> tuple[list[Exploded], list[tuple[str, str, str, str]]]:
        """All that a row stands for, and the values that are left out: schema, property, value and reason.

        Raises Invalid, and whatever FtM raises: then it stands for nothing.
        """
        if self._is_doubtful and _has_invalid_bytes(row):
            raise InvalidRecord(None, "is not in the file's encoding")
        texts = {name: sanitize_text(row[place]) for name, place in self._places.items() if place < len(row)}
        record = {name: text for name, text in texts.items() if text is not None}
        found: list[Exploded] = []
        omitted: list[tuple[str, str, str, str]] = []
        for query in self._queries:
            query.check(record)
            if query.source.check_filters(record):
                entities = query.map_one(record, omitted)
                found += [self._exploder.explode(self._dataset, entity) for entity in entities]
        return found, omitted


class _Query:
    """A query with its rules in FtM's order: an entity comes after those that it refers to."""

    def __init__(self, query: Query, ftm: QueryMapping, cleaners: "_Cleaners", dataset: str) -> None:
        assert isinstance(ftm.source, CSVSource)
        self.ftm = ftm
        self.source = ftm.source
        named_by = {
            prop.entity
            for rule in ftm.entities
            if rule.schema.get(NAMES_PROPERTY)
            for prop in rule.properties
            if prop.entity
        }
        self._rules = [
            _EntityRule(rule, query.entities[rule.name].key_literal, cleaners, dataset, rule.name in named_by)
            for rule in ftm.entities
        ]
        filtered = {name for name, _ in (*self.source.filters_set, *self.source.filters_not_set)}
        self.columns = set(ftm.refs) | filtered
        self._properties = [prop for rule in ftm.entities for prop in rule.properties]
        self._is_counted = any(prop.prop.type.total_size is not None for prop in self._properties)
        self._is_large = sum(len(prop.refs) + len(prop.literals) for prop in self._properties) > MOST_SOURCES

    def map(self, texts: dict[str, Texts], count: int, made: "_StatementColumns") -> None:
        """Raises Unusual, and whatever FtM's cleaning raises."""
        if self._is_counted and (self._is_large or self._has_long(texts)):
            raise UnusualRows
        places = np.arange(count, dtype=np.uint16)
        for columns, wanted in ((self.source.filters_set, True), (self.source.filters_not_set, False)):
            for name, allowed in columns:
                places = places[[(texts[name][place] in allowed) is wanted for place in places.tolist()]]
        if len(places) < count:
            texts = {name: [texts[name][place] for place in places.tolist()] for name in self.columns}
        told: dict[str, _RuleResult] = {}
        for rule in self._rules:
            told[rule.name] = rule.map(texts, places, told, made)

    def map_one(self, record: Record, omitted: list[tuple[str, str, str, str]]) -> Iterator[dict[str, Any]]:
        """The entities of a row, as `QueryMapping.map` makes them, without values that would not be stored."""
        entities: dict[str, EntityProxy] = {}
        for rule in self._rules:
            reasons: dict[tuple[str, str], str] = {}
            entity = rule.map_one(record, entities, reasons)
            if entity is not None:
                entities[rule.name] = entity
                yield rule.stored(entity, reasons)
            omitted += [(rule.schema, prop, value, reason) for (prop, value), reason in reasons.items()]

    def check(self, record: Record) -> None:
        """Raise Invalid for a row that would take FtM too long, or too much memory."""
        for prop in self._properties:
            if prop.template is not None:
                _fill_template(prop, record)
            if prop.split is not None and sum(record.get(ref, "").count(prop.split) for ref in prop.refs) > MOST_VALUES:
                raise InvalidRecord(prop.prop.name, f"has more than {MOST_VALUES} values")

    def _has_long(self, texts: dict[str, Texts]) -> bool:
        return any(text is not None and len(text) > LONG for name in self.columns for text in texts[name])


class _RuleResult(NamedTuple):
    """What a rule made of some rows, for those that refer to it."""

    ids: Texts
    names: list[Texts]


class _EntityRule:
    """An entity of a query."""

    def __init__(
        self, ftm: EntityMapping, key_literal: str | None, cleaners: "_Cleaners", dataset: str, is_named: bool
    ) -> None:
        self.name = ftm.name
        self._ftm = ftm
        self.schema = ftm.schema.name
        self._dataset = dataset
        self._is_named = is_named
        """Whether others repeat its names."""
        self._seed = key_bytes(dataset) + key_bytes(key_literal)
        assert hashlib.sha1(self._seed, usedforsecurity=False).digest() == ftm.seed.digest()
        self._cleaners = cleaners
        self._sources = [_source(prop, cleaners) for prop in ftm.properties]
        self._required = {prop.prop.name for prop in ftm.properties if prop.required}
        mentioned = ftm.schema.get(NAMES_PROPERTY)
        self._mentioned = None if mentioned is None else cleaners.of(mentioned, sanitizes=True)

    def map(
        self, texts: dict[str, Texts], places: Places, told: dict[str, _RuleResult], made: "_StatementColumns"
    ) -> _RuleResult:
        ids = self._ids(texts)
        lanes = [lane for source in self._sources for lane in source.lanes(texts, told, len(places))]
        if self._mentioned is not None:
            related = [told[prop.entity] for prop in self._ftm.properties if prop.entity]
            lanes += [_ValueColumn(self._mentioned, names) for other in related for names in other.names]
        for name in self._required:
            firsts = zip(*(lane.firsts() for lane in lanes if lane.name == name), strict=True)
            has = [any(first is not None for first in row) for row in firsts] or [False] * len(ids)
            ids = [entity if has[place] else None for place, entity in enumerate(ids)]
        names = [lane.firsts() for lane in lanes if lane.is_name] if self._is_named else []
        if None in ids:  # who is not there has no names either
            names = [
                [None if entity is None else name for entity, name in zip(ids, column, strict=True)] for column in names
            ]
        self._say(ids, lanes, places, made)
        return _RuleResult(ids, names)

    def map_one(
        self, record: Record, entities: dict[str, EntityProxy], reasons: dict[tuple[str, str], str]
    ) -> ValueEntity | None:
        """The entity of one row, as `EntityMapping.map` makes it; adds why values were left out."""
        entity = ValueEntity(self._ftm.schema, {}, cleaned=True)
        # FtM cleans countries first.
        for source in sorted(self._sources, key=lambda source: source.rule.prop.type is not registry.country):
            source.add_to(entity, record, entities, reasons)
        entity.id = self._ftm.compute_key(record)
        is_there = entity.id is not None and all(entity.has(name) for name in self._required)
        return entity if is_there else None

    def stored(self, entity: ValueEntity, reasons: dict[tuple[str, str], str]) -> dict[str, Any]:
        """An entity as it is loaded; adds why values are not stored."""
        properties: dict[str, list[str]] = {}
        for name, values in entity.properties.items():
            second = self._cleaners.second(entity.schema.properties[name].type)
            kept = properties[name] = []
            for value in values:
                if second.cleaned(value):
                    kept.append(value)
                elif sanitize_text(value):
                    reasons[name, value] = second.reason
        return {"id": entity.id, "schema": self.schema, "properties": properties}

    def _ids(self, texts: dict[str, Texts]) -> Texts:
        """As `EntityMapping.compute_key` makes them."""
        if self._ftm.id_column is not None:
            ids = texts[self._ftm.id_column]
            for entity in ids:
                if entity is not None:
                    validate_id(entity, "id")
            return ids
        sha1, seed = hashlib.sha1, self._seed
        columns = [texts[key] for key in self._ftm.keys]
        if len(columns) == 1:
            return [None if text is None else sha1(seed + text.encode()).hexdigest() for text in columns[0]]
        keys = (b"".join(sorted([text.encode() for text in row if text is not None])) for row in zip(*columns))  # noqa: B905 - alike
        return [sha1(seed + key).hexdigest() if key else None for key in keys]

    def _say(self, ids: Texts, lanes: "list[_ValueColumn]", places: Places, made: "_StatementColumns") -> None:
        """The statements of all entities that are there, and each one's BASE."""
        start = f"{self._dataset}."
        prefixes = [None if entity is None else f"{start}{entity}.".encode() for entity in ids]
        by_name: dict[str, list[_ValueColumn]] = {}
        for lane in lanes:
            by_name.setdefault(lane.name, []).append(lane)
        own = made.entities_of(ids, self.schema)
        said: list[Digests] = []
        for name, several in by_name.items():
            values = [lane.values(ids) for lane in several]
            digests = [_digests(prefixes, f"{name}.".encode(), column) for column in values]
            if len(digests) > 1:
                _keep_first(digests)
            for lane, column, found in zip(several, values, digests, strict=True):
                made.add(name, own, places, found, column, lane.originals())
                for place, rejected in lane.rejected(column):
                    if ids[place] is not None or not rejected.is_second:
                        made.omit(int(places[place]), own, self.schema, name, rejected)
            said += digests
        sha1 = hashlib.sha1
        schema = self.schema.encode()
        rows = zip(*said, strict=True) if said else (() for _ in ids)
        checksums: Texts = [
            None
            if prefix is None
            # Sorted and joined as bytes they are in the order of their hexadecimal forms.
            else sha1(schema + b"".join(sorted(filter(None, row))).hex().encode()).hexdigest()
            for prefix, row in zip(prefixes, rows, strict=True)
        ]
        made.add(BASE_ID, own, places, _digests(prefixes, b"id.", checksums), checksums)


def _digests(prefixes: list[bytes | None], infix: bytes, values: Texts) -> Digests:
    """FtM's keys of statements."""
    sha1 = hashlib.sha1
    if None not in prefixes and None not in values:
        pairs: Any = zip(prefixes, values, strict=True)
        return [key.digest() for key in map(sha1, [prefix + infix + value.encode() for prefix, value in pairs])]
    return [
        None if prefix is None or value is None else sha1(prefix + infix + value.encode()).digest()
        for prefix, value in zip(prefixes, values, strict=True)
    ]


def _keep_first(columns: list[Digests]) -> None:
    """Of the same statements of an entity, only the first."""
    for place, row in enumerate(zip(*columns, strict=True)):
        given = [digest for digest in row if digest is not None]
        if len(given) > 1 and len(set(given)) < len(given):
            seen: set[bytes] = set()
            for column in columns:
                digest = column[place]
                if digest in seen:
                    column[place] = None
                elif digest is not None:
                    seen.add(digest)


# Values


class _Rejected(NamedTuple):
    """A value that is left out."""

    value: str
    reason: str
    is_second: bool
    """Whether the mapping accepts it, and whoever loads it does not."""


class _LoadCleaner:
    """The cleaning of values of a type when they are loaded."""

    def __init__(self, kind: PropertyType) -> None:
        self.reason = REJECTED_BY_CLEANING.format(kind.name)
        self._cleaner = Cleaner(kind)

    def cleaned(self, value: str) -> str | None:
        known = self._cleaner.known
        found = known[value] if value in known else self._cleaner.learn(value)
        return None if found is None else found[0]


class _Cleaner:
    """What becomes of the values of a property: cleaned as its mapping says, and as they are when they are loaded."""

    def __init__(self, prop: Property, fuzzy: bool, form: str | None, second: _LoadCleaner, sanitizes: bool) -> None:
        self.name = prop.name
        self.is_name = prop.type is registry.name
        self.refers = prop.type is registry.entity
        self._kind: PropertyType = prop.type
        self._fuzzy = fuzzy
        self._format = form
        self._second = second
        self._sanitizes = sanitizes
        self._is_simple = form is None and not fuzzy
        self._plain: Callable[[str], object] | None = None
        self._all_plain = NOTHING
        if self._is_simple and prop.type.name in TIDY:
            self._plain, self._all_plain = PLAIN.fullmatch, ALL_PLAIN
        elif self._is_simple and prop.type is registry.date:
            self._plain, self._all_plain = DATE.fullmatch, ALL_DATES
        self._known: dict[str | None, str | None] = {None: None}
        self._changed: dict[str | None, str | None] = {}
        self._firsts: dict[str | None, str | None] = {None: None}
        self._longest = LONGEST_VALUE.get(prop.type.name)

    def values(self, texts: Texts) -> Texts:
        """What is stored."""
        if len(self._known) > MOST_KNOWN:
            self._known, self._changed = {None: None}, {}
        known, learn = self._known, self._learn
        plain = self._plain_of(texts)
        if plain is not None and self._are_plain(texts):
            return texts
        if plain is None:
            return [known[text] if text in known else learn(text) for text in texts]  # type: ignore[arg-type]  # None is known
        return [known[text] if text in known else text if plain(text) else learn(text) for text in texts]  # type: ignore[arg-type]

    def originals(self, texts: Texts) -> Texts | None:
        """What the values were before, where they are different; None: none of them is."""
        changed = self._changed
        return [changed.get(text) for text in texts] if changed else None

    def rejected(self, texts: Texts, values: Texts) -> Iterator[tuple[int, _Rejected]]:
        """Which of the texts are left out, given what is stored of them."""
        if values is texts or values.count(None) == texts.count(None):
            return
        for place, (text, value) in enumerate(zip(texts, values, strict=True)):
            if value is None and text is not None and (rejected := self._rejection(text)) is not None:
                yield place, rejected

    def reason(self, raw: str) -> str:
        """Why FtM's mapping does not put a value into the entity."""
        if self.is_too_long(raw):
            return f"is {len(raw)} characters long, at most {self._longest} are cleaned as {self._kind.name}"
        if self._first(raw):
            return f"the long values of the entity come to more than {self._kind.total_size} characters"
        return REJECTED_BY_CLEANING.format(self._kind.name)

    def is_too_long(self, raw: str) -> bool:
        return self._longest is not None and len(raw) > self._longest

    def firsts(self, texts: Texts) -> Texts:
        """What FtM's mapping puts into the entity; an empty text counts as something there."""
        if len(self._firsts) > MOST_KNOWN:
            self._firsts = {None: None}
        known, learn = self._firsts, self._first
        plain = self._plain_of(texts)
        if plain is not None and self._are_plain(texts):
            return texts
        if plain is None:
            return [known[text] if text in known else learn(text) for text in texts]  # type: ignore[arg-type]  # None is known
        return [known[text] if text in known else text if plain(text) else learn(text) for text in texts]  # type: ignore[arg-type]

    def _plain_of(self, texts: Texts) -> Callable[[str], object] | None:
        """What tells that a text stays as it is; None if there is nothing, or a text is too long whatever it is."""
        if self._plain is None or self._longest is None:
            return self._plain
        return None if max(map(len, filter(None, texts)), default=0) > self._longest else self._plain

    def _are_plain(self, texts: Texts) -> bool:
        """Whether all texts that are there stay as they are, told by one look at all of them."""
        there = [text for text in texts if text is not None] if None in texts else texts
        return self._is_all_plain(there)  # type: ignore[arg-type]  # those that are there

    def _is_all_plain(self, texts: list[str]) -> bool:
        lines = "\n".join([*texts, ""])
        # A text may hold a newline itself, which would make two plain ones of it.
        return TITLE not in lines and lines.count("\n") == len(texts) and self._all_plain.fullmatch(lines) is not None

    def _learn(self, raw: str) -> str | None:
        """Clean a value as its mapping says, and as whoever loads it does."""
        first = self._first(raw)
        value: str | None
        if first is None:
            value = None
        elif first == raw and self._is_simple and sanitize_text(raw) == raw:
            value = raw  # to clean it once more would change nothing either
        else:
            value = self._second.cleaned(first)
        if value is not None and value != raw and (original := sanitize_text(raw)) != value:
            self._changed[raw] = original
        if len(raw) <= LONGEST_KNOWN:
            self._known[raw] = value
        return value

    def _rejection(self, raw: str) -> _Rejected | None:
        """Why nothing is stored of a value; None if it is blank."""
        first = self._first(raw)
        if first:
            return _Rejected(first, self._second.reason, True) if sanitize_text(first) else None
        # A name that is repeated from another entity was given there.
        is_given = not self._sanitizes and sanitize_text(raw)
        return _Rejected(raw, self.reason(raw), False) if is_given else None

    def _first(self, raw: str) -> str | None:
        if raw in self._firsts:
            return self._firsts[raw]
        first = self._mapped(raw)
        if len(raw) <= LONGEST_KNOWN:
            self._firsts[raw] = first
        return first

    def _mapped(self, raw: str) -> str | None:
        if self.is_too_long(raw):
            return None
        text = sanitize_text(raw) if self._sanitizes else raw
        return None if text is None else self._kind.clean_text(text, fuzzy=self._fuzzy, format=self._format)


class _ReferenceCleaner(_Cleaner):
    """A reference to an entity of the same row: FtM does not clean it, whoever loads it does."""

    def __init__(self, prop: Property, second: _LoadCleaner) -> None:
        super().__init__(prop, False, None, second, False)
        self._is_simple = False
        self._plain = ID.fullmatch

    def _is_all_plain(self, texts: list[str]) -> bool:
        joined = "".join(texts)
        return joined.isascii() and joined.isalnum() and "" not in texts

    def _mapped(self, raw: str) -> str | None:
        return raw


class _Cleaners:
    """Cleaners of one process: the second cleaning of a type is the same for all."""

    def __init__(self) -> None:
        self._seconds: dict[str, _LoadCleaner] = {}

    def second(self, kind: PropertyType) -> _LoadCleaner:
        return self._seconds.setdefault(kind.name, _LoadCleaner(kind))

    def of(self, prop: Property, rule: PropertyMapping | None = None, sanitizes: bool = False) -> _Cleaner:
        second = self.second(prop.type)
        if rule is not None and rule.entity is not None:
            return _ReferenceCleaner(prop, second)
        fuzzy = rule is not None and rule.fuzzy
        form = (None if rule is None else rule.format) or prop.format
        return _Cleaner(prop, fuzzy, form, second, sanitizes)


class _ValueColumn:
    """One value a row, at most, of a property."""

    def __init__(self, cleaner: _Cleaner, texts: Texts) -> None:
        self.name = cleaner.name
        self.is_name = cleaner.is_name
        self._cleaner = cleaner
        self._texts = texts

    def values(self, ids: Texts) -> Texts:
        """Raises Unusual for an entity that refers to itself: that row is bad."""
        values = self._cleaner.values(self._texts)
        if self._cleaner.refers and any(
            value is not None and value == entity for entity, value in zip(ids, values, strict=True)
        ):
            raise UnusualRows
        return values

    def originals(self) -> Texts | None:
        return self._cleaner.originals(self._texts)

    def rejected(self, values: Texts) -> Iterator[tuple[int, _Rejected]]:
        return self._cleaner.rejected(self._texts, values)

    def firsts(self) -> Texts:
        return self._cleaner.firsts(self._texts)


class _ColumnSource:
    """Where the values of a property come from: a column, or one text for all."""

    def __init__(self, rule: PropertyMapping, cleaner: _Cleaner) -> None:
        self.rule = rule
        self._cleaner = cleaner

    def add_to(
        self,
        entity: ValueEntity,
        record: Record,
        entities: dict[str, EntityProxy],
        reasons: dict[tuple[str, str], str],
    ) -> None:
        """Add the values that a row has for an entity, as `PropertyMapping.map` does, and why others are left out."""
        rule, cleaner = self.rule, self._cleaner
        for value in _raw_values(rule, [record.get(ref) for ref in rule.refs]):
            is_added = not cleaner.is_too_long(value) and entity.unsafe_add(
                rule.prop, value, fuzzy=rule.fuzzy, format=rule.format
            )
            if not is_added and sanitize_text(value):
                reasons[rule.prop.name, value] = cleaner.reason(value)

    def lanes(self, texts: dict[str, Texts], told: dict[str, _RuleResult], count: int) -> list[_ValueColumn]:
        column: Texts = [*self.rule.literals] * count if self.rule.literals else texts[self.rule.refs[0]]
        return [_ValueColumn(self._cleaner, column)]


class _ReferenceSource(_ColumnSource):
    """Another entity of the row."""

    def add_to(
        self,
        entity: ValueEntity,
        record: Record,
        entities: dict[str, EntityProxy],
        reasons: dict[tuple[str, str], str],
    ) -> None:
        assert self.rule.entity is not None
        other = entities.get(self.rule.entity)
        if other is not None:
            entity.unsafe_add(self.rule.prop, other.id, cleaned=True)
            inline_names(entity, other)

    def lanes(self, texts: dict[str, Texts], told: dict[str, _RuleResult], count: int) -> list[_ValueColumn]:
        assert self.rule.entity is not None
        return [_ValueColumn(self._cleaner, told[self.rule.entity].ids)]


class _CombinedSource(_ColumnSource):
    """Several columns and texts, joined, split or put into a template."""

    def lanes(self, texts: dict[str, Texts], told: dict[str, _RuleResult], count: int) -> list[_ValueColumn]:
        rule = self.rule
        columns = [texts[ref] for ref in rule.refs]
        rows = zip(*columns, strict=True) if columns else [()] * count
        values = [_raw_values(rule, row) for row in rows]
        most = max(map(len, values), default=0)
        if most > MOST_USUAL_VALUES or (
            rule.template is not None and any(len(text) > LONG for own in values for text in own)
        ):
            raise UnusualRows
        return [
            _ValueColumn(self._cleaner, [own[place] if place < len(own) else None for own in values])
            for place in range(most)
        ]


def _raw_values(rule: PropertyMapping, row: Sequence[str | None]) -> list[str]:
    """What the columns of a property give it, as `PropertyMapping` makes it."""
    if rule.template is not None:
        record = {ref: text for ref, text in zip(rule.refs, row, strict=True) if text is not None}
        values = [_fill_template(rule, record).strip()]
    else:
        values = [*rule.literals, *(text for text in row if text is not None)]
    if rule.join is not None:
        values = [rule.join.join(values)]
    if rule.split is not None:
        values = [part for value in values for part in value.split(rule.split)]
    return values


def _source(rule: PropertyMapping, cleaners: _Cleaners) -> _ColumnSource:
    cleaner = cleaners.of(rule.prop, rule)
    if rule.entity is not None:
        return _ReferenceSource(rule, cleaner)
    is_one = len(rule.refs) + len(rule.literals) == 1
    if is_one and rule.template is None and rule.join is None and rule.split is None:
        return _ColumnSource(rule, cleaner)
    return _CombinedSource(rule, cleaner)


def _fill_template(rule: PropertyMapping, record: Record) -> str:
    """A template with a row's values. Raises Invalid if it would be too long: what is filled in may name others."""
    assert rule.template is not None
    value = rule.template
    for mark, ref in rule.replacements.items():
        text = record.get(ref) or ""
        if len(value) + value.count(mark) * len(text) > LONGEST_TEMPLATE:
            raise InvalidRecord(rule.prop.name, f"its template grows beyond {LONGEST_TEMPLATE} characters")
        value = value.replace(mark, text)
    return value


def _has_invalid_bytes(row: Row) -> bool:
    return INVALID_BYTES.search("".join(row)) is not None


def _is_plain(text: str) -> bool:
    """Whether FtM's sanitizing could change no more of it than the white space around it."""
    return text.isascii() and text.isprintable()


# Events


class _StatementColumns:
    """Statements of some rows, as columns: those of one property after the other, and each knows its row."""

    def __init__(self) -> None:
        self.entities = 0
        self._entity_ids: list[str] = []
        self._schemata: list[str] = []
        self._schema_lengths: list[int] = []
        self._props: list[str] = []
        self._lengths: list[int] = []
        self._rows: list[Places] = []
        self._owners: list[npt.NDArray[np.int64]] = []
        self._ids: list[bytes] = []
        self._values: Texts = []
        self._originals: Texts = []
        self._omitted: dict[tuple[int, int, str, str], tuple[str, str]] = {}

    def omit(self, place: int, first: int, schema: str, prop: str, rejected: _Rejected) -> None:
        """Report a value that is left out of the entities whose first has this number, in the row at this place."""
        self._omitted[place, first, prop, rejected.value] = schema, rejected.reason

    def omitted(self, start: int) -> list[OmittedInRow]:
        """All that is left out, in the order of rows, of which the first has the place `start`."""
        return [
            OmittedInRow(start + place, schema, prop, value, reason)
            for (place, _, prop, value), (schema, reason) in sorted(self._omitted.items())
        ]

    def entities_of(self, ids: Texts, schema: str) -> int:
        """Make room for entities, of which some may not be there. Returns the number of the first."""
        first = len(self._entity_ids)
        self._entity_ids += [entity or "" for entity in ids]
        self._schemata.append(schema)
        self._schema_lengths.append(len(ids))
        self.entities += len(ids) - ids.count(None)
        return first

    def add(
        self, prop: str, first: int, places: Places, digests: Digests, values: Texts, originals: Texts | None = None
    ) -> None:
        """Statements of one property, where there is a digest."""
        owners = np.arange(first, first + len(digests))
        if None in digests:
            there = np.fromiter((digest is not None for digest in digests), bool, len(digests))
            places, owners = places[there], owners[there]
            values = list(compress(values, digests))
            originals = None if originals is None else list(compress(originals, digests))
            digests = list(compress(digests, digests))
        self._props.append(prop)
        self._lengths.append(len(digests))
        self._rows.append(places)
        self._owners.append(owners)
        self._ids += digests  # type: ignore[arg-type]  # those that are there
        self._values += values
        self._originals += [None] * len(digests) if originals is None else originals

    def table(self, origin: str, moment: int) -> pa.RecordBatch:
        """The events in the order of their shards, and within one of their rows: as the journal packs them.

        Where many are the same, only the last of each.
        """
        count = len(self._ids)
        if not count:
            return pa.RecordBatch.from_pylist([], SCHEMA)
        owners = np.concatenate(self._owners)
        shards = np.array(shards_of(self._entity_ids), np.uint16)
        order = np.argsort(np.concatenate(self._rows), kind="stable")
        order = order[np.argsort(shards[owners[order]], kind="stable")]
        if len(set(self._ids)) < count * WORTH_DROPPING:
            last = {self._ids[place]: turn for turn, place in enumerate(order.tolist())}
            order = order[sorted(last.values())]
            count = len(order)
        chosen = pa.array(order)
        owner = pa.array(owners[order])
        prop = pa.array(np.repeat(np.arange(len(self._props)), self._lengths)[order])
        schema = pa.array(np.repeat(np.arange(len(self._schemata)), self._schema_lengths))
        columns = {
            "batch": _repeat(0, count, pa.int64()),
            "position": pa.array(np.arange(count)),
            "kind": _repeat(Kind.ADD.value, count, pa.int16()),
            "shard_key": pa.array(shards[owners[order]].astype(np.int32)),
            "id": pa.array(self._ids, pa.binary()).take(chosen),
            "entity_id": pa.array(self._entity_ids, pa.string()).take(owner),
            "canonical_id": pa.nulls(count, pa.string()),
            "schema": pa.array(self._schemata, pa.string()).take(schema.take(owner)),
            "prop": pa.array(self._props, pa.string()).take(prop),
            "value": pa.array(self._values, pa.string()).take(chosen),
            "lang": pa.nulls(count, pa.string()),
            "original_value": pa.array(self._originals, pa.string()).take(chosen),
            "external": _repeat(False, count, pa.bool_()),
            "origin": _repeat(origin, count, pa.string()),
            "first_seen": _repeat(moment, count, pa.int64()),
            "last_seen": _repeat(moment, count, pa.int64()),
        }
        return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _repeat(value: object, count: int, kind: pa.DataType) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), count)
