"""Mapper: rows to statements, with the same result as followthemoney's mapping followed by loading its entities.

FtM maps one record at a time, through objects and lists that are created for each. Here some thousand rows are mapped
at once, one property after the other: each value costs only a dictionary lookup and a hash. The result is the same,
statement by statement; a property test holds the two equal. Rows that are unusual in any way are mapped by FtM itself,
one by one; only those can be bad.

A value that is given but not stored is omitted, and reported: values that FtM's mapping discards (and logs), values
that the mapping accepts but loading does not, and values that are too long to be cleaned. The same value for the same
property of the same entity of a row is reported once. Blank values are not reported.
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

from tarn.errors import FieldError
from tarn.journal.parsing.event_buffer import SCHEMA, Events, Kind
from tarn.model.datasets.shards import shards_of
from tarn.model.ftm.entity import (
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
from tarn.model.ftm.mapping import MappingDocument, Query
from tarn.model.ftm.statement import InvalidRecord, validate_id
from tarn.model.names import DatasetName

BLOCK_ROWS = 2048
"""Rows that are mapped together."""

FEW_ROWS = 8
"""Rows up to which a block with unusual rows is mapped row by row instead of being split."""

MOST_USUAL_VALUES = 64
"""Values of one property above which a row is unusual."""

MOST_VALUES = 5_000
"""Values that a row may be split into: FtM compares each with every other."""

LONG = 64 << 10
"""Characters from which on a value is unusual: FtM limits the total size of long texts of an entity."""

MOST_SOURCES = 200
"""Columns and literals of a query up to which texts that are not long cannot exceed the total size."""

LONGEST_TEMPLATE = 4 << 20
"""Characters of a filled template at most."""

LONGEST_REASON = 500
"""Characters of FtM's message on a bad row at most: it may repeat the whole value."""

WORTH_DROPPING = 0.95
"""Share of distinct events below which it is worth dropping duplicates."""

INVALID_BYTES = re.compile("[\udc80-\udcff]")
"""Surrogates, to which Python decodes bytes that are invalid in an encoding."""

PLAIN_DATE = "[12][0-9]{3}(?:-(?:0[1-9]|1[0-2])(?:-(?:0[1-9]|1[0-9]|2[0-8]))?)?"
"""A year, month or day that always exists, in FtM's format."""

DATE = re.compile(PLAIN_DATE)

ALL_PLAIN, ALL_DATES, NOTHING = (re.compile(rf"(?:{text}\n)*+") for text in (PLAIN_TEXT, PLAIN_DATE, "(?!)"))
"""Plain texts, one per line. The quantifiers are possessive, so that matching never backtracks."""

ID = re.compile("[A-Za-z0-9]+")
"""An id that is valid in every tool, such as a hash."""

NAMES_PROPERTY = "namesMentioned"
"""The property in which FtM repeats the names of the entities that an entity refers to."""

Row = Sequence[str]
Texts = list[str | None]
"""A column: the text of each row, or None."""
Record = dict[str, str]
Digests = list[bytes | None]
RowIndexes = npt.NDArray[np.uint16]


class UnusualRows(Exception):
    """These rows must be mapped by FtM itself."""


class BadRow(NamedTuple):
    """A row that could not be used: its index among the passed rows, and the reason."""

    row_index: int
    fault: FieldError


class OmittedInRow(NamedTuple):
    """A value that was left out of a mapped row: the row's index among the passed rows, and the reason."""

    row_index: int
    schema: str
    prop: str
    value: str
    reason: str


class MappedBlock(NamedTuple):
    """The result of some rows: events without positions in a batch, the rows that could not be used, and the values
    that were left out of the others, in the order of the rows."""

    events: pa.RecordBatch
    entities: int
    bad: list[BadRow]
    omitted: list[OmittedInRow]


class Mapper:
    """Maps rows of one file for one dataset. Not thread-safe: it caches cleaned values."""

    def __init__(
        self, mapping: MappingDocument, header: Sequence[str], dataset: DatasetName, origin: str, moment: int
    ) -> None:
        self._dataset = dataset
        self._origin = origin
        self._moment = moment
        self._exploder = Exploder()
        self._is_doubtful = False
        # Of columns with the same name, FtM reads the last.
        self._column_indexes = {name: index for index, name in enumerate(header)}
        cleaners = _Cleaners()
        self._queries = [
            _Query(query, ftm, cleaners, dataset)
            for query, ftm in zip(mapping.queries, mapping.ftm(dataset), strict=True)
        ]
        self._used = sorted({name for query in self._queries for name in query.columns})

    def map(self, rows: Sequence[Row], is_doubtful: bool = False) -> Iterator[MappedBlock]:
        """Map the rows, in order. With `is_doubtful`, they may have bytes that are invalid in the file's encoding."""
        self._is_doubtful = is_doubtful
        for start in range(0, len(rows), BLOCK_ROWS):
            yield from self._map_or_split(rows[start : start + BLOCK_ROWS], start)

    def _map_or_split(self, rows: Sequence[Row], start: int) -> Iterator[MappedBlock]:
        """Map the rows together if none is unusual; otherwise by halves, and a few rows one by one."""
        try:
            yield self._map_block(rows, start)
        except Exception:  # noqa: BLE001 - it is raised again when its row is mapped alone
            if len(rows) <= FEW_ROWS:
                yield self._map_singly(rows, start)
                return
            middle = len(rows) // 2
            yield from self._map_or_split(rows[:middle], start)
            yield from self._map_or_split(rows[middle:], start + middle)

    # Blocks

    def _map_block(self, rows: Sequence[Row], start: int) -> MappedBlock:
        if self._is_doubtful and any(map(_has_invalid_bytes, rows)):
            raise UnusualRows
        texts = {name: self._column(rows, name) for name in self._used}
        statements = _StatementColumns()
        for query in self._queries:
            query.map(texts, len(rows), statements)
        return MappedBlock(
            statements.table(self._origin, self._moment), statements.entities, [], statements.omitted(start)
        )

    def _column(self, rows: Sequence[Row], name: str) -> Texts:
        """Return a column as `CSVSource.read_csv` reads it."""
        index = self._column_indexes.get(name)
        if index is None:
            return [None] * len(rows)
        try:
            column = [row[index] for row in rows]
        except IndexError:
            column = [row[index] if index < len(row) else "" for row in rows]
        if _is_plain("".join(column)):
            return [text.strip() or None for text in column]
        return [text.strip() or None if _is_plain(text) else sanitize_text(text) for text in column]

    # Single rows

    def _map_singly(self, rows: Sequence[Row], start: int) -> MappedBlock:
        events = Events()
        bad: list[BadRow] = []
        omitted: list[OmittedInRow] = []
        for index, row in enumerate(rows, start):
            try:
                entities, values = self._entities(row)
                for entity in entities:
                    events.add_entity(entity, self._origin, self._moment)
                omitted += [OmittedInRow(index, *value) for value in values]
            except InvalidRecord as error:
                bad.append(BadRow(index, FieldError(field=error.field, reason=error.reason)))
            except Exception as error:  # noqa: BLE001 - FtM's cleaning may raise nearly anything
                bad.append(BadRow(index, FieldError(reason=(str(error) or type(error).__name__)[:LONGEST_REASON])))
        table = events.table(0) if len(events) else pa.RecordBatch.from_pylist([], SCHEMA)
        return MappedBlock(table, events.entities, bad, omitted)

    def _entities(self, row: Row) -> tuple[list[Exploded], list[tuple[str, str, str, str]]]:
        """Return the entities of a row, and the values that are left out: schema, property, value and reason.

        Raises InvalidRecord and any error of FtM: then the row cannot be used.
        """
        if self._is_doubtful and _has_invalid_bytes(row):
            raise InvalidRecord(None, "is not in the file's encoding")
        texts = {name: sanitize_text(row[index]) for name, index in self._column_indexes.items() if index < len(row)}
        record = {name: text for name, text in texts.items() if text is not None}
        exploded: list[Exploded] = []
        omitted: list[tuple[str, str, str, str]] = []
        for query in self._queries:
            query.check(record)
            if query.source.check_filters(record):
                entities = query.map_one(record, omitted)
                exploded += [self._exploder.explode(self._dataset, entity) for entity in entities]
        return exploded, omitted


class _Query:
    """A query with its rules in FtM's order: an entity comes after the entities that it refers to."""

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

    def map(self, texts: dict[str, Texts], count: int, statements: "_StatementColumns") -> None:
        """Map some rows. Raises UnusualRows and any error of FtM's cleaning."""
        if self._is_counted and (self._is_large or self._has_long(texts)):
            raise UnusualRows
        indexes = np.arange(count, dtype=np.uint16)
        for columns, must_match in ((self.source.filters_set, True), (self.source.filters_not_set, False)):
            for name, allowed in columns:
                indexes = indexes[[(texts[name][index] in allowed) is must_match for index in indexes.tolist()]]
        if len(indexes) < count:
            texts = {name: [texts[name][index] for index in indexes.tolist()] for name in self.columns}
        results: dict[str, _RuleResult] = {}
        for rule in self._rules:
            results[rule.name] = rule.map(texts, indexes, results, statements)

    def map_one(self, record: Record, omitted: list[tuple[str, str, str, str]]) -> Iterator[dict[str, Any]]:
        """Yield the entities of a row as `QueryMapping.map` does, without values that would not be stored."""
        entities: dict[str, EntityProxy] = {}
        for rule in self._rules:
            reasons: dict[tuple[str, str], str] = {}
            entity = rule.map_one(record, entities, reasons)
            if entity is not None:
                entities[rule.name] = entity
                yield rule.stored(entity, reasons)
            omitted += [(rule.schema, prop, value, reason) for (prop, value), reason in reasons.items()]

    def check(self, record: Record) -> None:
        """Raise InvalidRecord for a row that would take FtM too much time or memory."""
        for prop in self._properties:
            if prop.template is not None:
                _fill_template(prop, record)
            if prop.split is not None and sum(record.get(ref, "").count(prop.split) for ref in prop.refs) > MOST_VALUES:
                raise InvalidRecord(prop.prop.name, f"has more than {MOST_VALUES} values")

    def _has_long(self, texts: dict[str, Texts]) -> bool:
        return any(text is not None and len(text) > LONG for name in self.columns for text in texts[name])


class _RuleResult(NamedTuple):
    """The ids and names that a rule gave some rows, for rules that refer to it."""

    ids: Texts
    names: list[Texts]


class _EntityRule:
    """A rule of a query, which maps one entity per row."""

    def __init__(
        self, ftm: EntityMapping, key_literal: str | None, cleaners: "_Cleaners", dataset: str, is_named: bool
    ) -> None:
        self.name = ftm.name
        self._ftm = ftm
        self.schema = ftm.schema.name
        self._dataset = dataset
        self._is_named = is_named
        """Whether other entities repeat its names."""
        self._seed = key_bytes(dataset) + key_bytes(key_literal)
        assert hashlib.sha1(self._seed, usedforsecurity=False).digest() == ftm.seed.digest()
        self._cleaners = cleaners
        self._sources = [_source(prop, cleaners) for prop in ftm.properties]
        self._required = {prop.prop.name for prop in ftm.properties if prop.required}
        mentioned = ftm.schema.get(NAMES_PROPERTY)
        self._mentioned = None if mentioned is None else cleaners.of(mentioned, sanitizes=True)

    def map(
        self,
        texts: dict[str, Texts],
        indexes: RowIndexes,
        results: dict[str, _RuleResult],
        statements: "_StatementColumns",
    ) -> _RuleResult:
        ids = self._ids(texts)
        value_columns = [
            value_column
            for source in self._sources
            for value_column in source.value_columns(texts, results, len(indexes))
        ]
        if self._mentioned is not None:
            related = [results[prop.entity] for prop in self._ftm.properties if prop.entity]
            value_columns += [_ValueColumn(self._mentioned, names) for other in related for names in other.names]
        for name in self._required:
            firsts = zip(
                *(value_column.firsts() for value_column in value_columns if value_column.name == name), strict=True
            )
            has = [any(first is not None for first in row) for row in firsts] or [False] * len(ids)
            ids = [entity if has[index] else None for index, entity in enumerate(ids)]
        names = (
            [value_column.firsts() for value_column in value_columns if value_column.is_name] if self._is_named else []
        )
        if None in ids:  # an entity that does not exist has no names
            names = [
                [None if entity is None else name for entity, name in zip(ids, column, strict=True)] for column in names
            ]
        self._add_statements(ids, value_columns, indexes, statements)
        return _RuleResult(ids, names)

    def map_one(
        self, record: Record, entities: dict[str, EntityProxy], reasons: dict[tuple[str, str], str]
    ) -> ValueEntity | None:
        """Return the entity of one row as `EntityMapping.map` does; add the reasons why values were left out."""
        entity = ValueEntity(self._ftm.schema, {}, cleaned=True)
        # FtM cleans countries first.
        for source in sorted(self._sources, key=lambda source: source.rule.prop.type is not registry.country):
            source.add_to(entity, record, entities, reasons)
        entity.id = self._ftm.compute_key(record)
        is_complete = entity.id is not None and all(entity.has(name) for name in self._required)
        return entity if is_complete else None

    def stored(self, entity: ValueEntity, reasons: dict[tuple[str, str], str]) -> dict[str, Any]:
        """Return an entity as it is loaded; add the reasons why values are not stored."""
        properties: dict[str, list[str]] = {}
        for name, values in entity.properties.items():
            load_cleaner = self._cleaners.load_cleaner(entity.schema.properties[name].type)
            stored_values = properties[name] = []
            for value in values:
                if load_cleaner.cleaned(value):
                    stored_values.append(value)
                elif sanitize_text(value):
                    reasons[name, value] = load_cleaner.reason
        return {"id": entity.id, "schema": self.schema, "properties": properties}

    def _ids(self, texts: dict[str, Texts]) -> Texts:
        """Return the ids as `EntityMapping.compute_key` does."""
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

    def _add_statements(
        self, ids: Texts, value_columns: "list[_ValueColumn]", indexes: RowIndexes, statements: "_StatementColumns"
    ) -> None:
        """Add the statements of all entities that exist, including their BASE statements."""
        start = f"{self._dataset}."
        prefixes = [None if entity is None else f"{start}{entity}.".encode() for entity in ids]
        by_name: dict[str, list[_ValueColumn]] = {}
        for value_column in value_columns:
            by_name.setdefault(value_column.name, []).append(value_column)
        own = statements.entities_of(ids, self.schema)
        all_digests: list[Digests] = []
        for name, of_property in by_name.items():
            values = [value_column.values(ids) for value_column in of_property]
            digests = [_digests(prefixes, f"{name}.".encode(), column) for column in values]
            if len(digests) > 1:
                _keep_first(digests)
            for value_column, column, column_digests in zip(of_property, values, digests, strict=True):
                statements.add(name, own, indexes, column_digests, column, value_column.originals())
                for index, rejected in value_column.rejected(column):
                    if ids[index] is not None or not rejected.is_rejected_on_load:
                        statements.omit(int(indexes[index]), own, self.schema, name, rejected)
            all_digests += digests
        sha1 = hashlib.sha1
        schema = self.schema.encode()
        rows = zip(*all_digests, strict=True) if all_digests else (() for _ in ids)
        checksums: Texts = [
            None
            if prefix is None
            # Digests sort as their hexadecimal forms do.
            else sha1(schema + b"".join(sorted(filter(None, row))).hex().encode()).hexdigest()
            for prefix, row in zip(prefixes, rows, strict=True)
        ]
        statements.add(BASE_ID, own, indexes, _digests(prefixes, b"id.", checksums), checksums)


def _digests(prefixes: list[bytes | None], infix: bytes, values: Texts) -> Digests:
    """Return the statement ids, computed as FtM does."""
    sha1 = hashlib.sha1
    if None not in prefixes and None not in values:
        pairs: Any = zip(prefixes, values, strict=True)
        return [key.digest() for key in map(sha1, [prefix + infix + value.encode() for prefix, value in pairs])]
    return [
        None if prefix is None or value is None else sha1(prefix + infix + value.encode()).digest()
        for prefix, value in zip(prefixes, values, strict=True)
    ]


def _keep_first(columns: list[Digests]) -> None:
    """Keep only the first of equal statements of an entity."""
    for index, row in enumerate(zip(*columns, strict=True)):
        row_digests = [digest for digest in row if digest is not None]
        if len(row_digests) > 1 and len(set(row_digests)) < len(row_digests):
            seen: set[bytes] = set()
            for column in columns:
                digest = column[index]
                if digest in seen:
                    column[index] = None
                elif digest is not None:
                    seen.add(digest)


# Values


class _Rejected(NamedTuple):
    """A value that is left out."""

    value: str
    reason: str
    is_rejected_on_load: bool
    """Whether the mapping accepts the value, but loading does not."""


class _LoadCleaner:
    """Cleans values of a type as loading does."""

    def __init__(self, kind: PropertyType) -> None:
        self.reason = REJECTED_BY_CLEANING.format(kind.name)
        self._cleaner = Cleaner(kind)

    def cleaned(self, value: str) -> str | None:
        known = self._cleaner.known
        result = known[value] if value in known else self._cleaner.learn(value)
        return None if result is None else result[0]


class _Cleaner:
    """Cleans the values of a property: first by its mapping rule, then as loading does."""

    def __init__(
        self, prop: Property, fuzzy: bool, form: str | None, load_cleaner: _LoadCleaner, sanitizes: bool
    ) -> None:
        self.name = prop.name
        self.is_name = prop.type is registry.name
        self.refers = prop.type is registry.entity
        self._kind: PropertyType = prop.type
        self._fuzzy = fuzzy
        self._format = form
        self._load_cleaner = load_cleaner
        self._sanitizes = sanitizes
        self._is_simple = form is None and not fuzzy
        self._is_unchanged: Callable[[str], object] | None = None
        self._all_unchanged = NOTHING
        if self._is_simple and prop.type.name in TIDY:
            self._is_unchanged, self._all_unchanged = PLAIN.fullmatch, ALL_PLAIN
        elif self._is_simple and prop.type is registry.date:
            self._is_unchanged, self._all_unchanged = DATE.fullmatch, ALL_DATES
        self._stored_values: dict[str | None, str | None] = {None: None}
        self._original_values: dict[str | None, str | None] = {}
        self._mapped_values: dict[str | None, str | None] = {None: None}
        self._longest = LONGEST_VALUE.get(prop.type.name)

    def values(self, texts: Texts) -> Texts:
        """Return the values that are stored."""
        if len(self._stored_values) > MOST_KNOWN:
            self._stored_values, self._original_values = {None: None}, {}
        known, learn = self._stored_values, self._clean
        plain = self._unchanged_check(texts)
        if plain is not None and self._are_unchanged(texts):
            return texts
        if plain is None:
            return [known[text] if text in known else learn(text) for text in texts]  # type: ignore[arg-type]  # None is known
        return [known[text] if text in known else text if plain(text) else learn(text) for text in texts]  # type: ignore[arg-type]

    def originals(self, texts: Texts) -> Texts | None:
        """Return the original values where they differ; None if none does."""
        changed = self._original_values
        return [changed.get(text) for text in texts] if changed else None

    def rejected(self, texts: Texts, values: Texts) -> Iterator[tuple[int, _Rejected]]:
        """Yield the texts that are left out, given the stored values."""
        if values is texts or values.count(None) == texts.count(None):
            return
        for index, (text, value) in enumerate(zip(texts, values, strict=True)):
            if value is None and text is not None and (rejected := self._rejection(text)) is not None:
                yield index, rejected

    def reason(self, raw: str) -> str:
        """Return why FtM's mapping does not add a value to the entity."""
        if self.is_too_long(raw):
            return f"is {len(raw)} characters long, at most {self._longest} are cleaned as {self._kind.name}"
        if self._map_value(raw):
            return f"the long values of the entity have more than {self._kind.total_size} characters"
        return REJECTED_BY_CLEANING.format(self._kind.name)

    def is_too_long(self, raw: str) -> bool:
        return self._longest is not None and len(raw) > self._longest

    def firsts(self, texts: Texts) -> Texts:
        """Return the values that FtM's mapping adds to the entity. An empty text counts as a value."""
        if len(self._mapped_values) > MOST_KNOWN:
            self._mapped_values = {None: None}
        known, learn = self._mapped_values, self._map_value
        plain = self._unchanged_check(texts)
        if plain is not None and self._are_unchanged(texts):
            return texts
        if plain is None:
            return [known[text] if text in known else learn(text) for text in texts]  # type: ignore[arg-type]  # None is known
        return [known[text] if text in known else text if plain(text) else learn(text) for text in texts]  # type: ignore[arg-type]

    def _unchanged_check(self, texts: Texts) -> Callable[[str], object] | None:
        """Return the check whether cleaning leaves a text unchanged; None without one, or if a text is too long."""
        if self._is_unchanged is None or self._longest is None:
            return self._is_unchanged
        return None if max(map(len, filter(None, texts)), default=0) > self._longest else self._is_unchanged

    def _are_unchanged(self, texts: Texts) -> bool:
        """Return whether cleaning leaves all texts unchanged, checked for all of them together."""
        present = [text for text in texts if text is not None] if None in texts else texts
        return self._are_all_unchanged(present)  # type: ignore[arg-type]  # without None

    def _are_all_unchanged(self, texts: list[str]) -> bool:
        lines = "\n".join([*texts, ""])
        # A text with a newline would count as two plain texts.
        return (
            TITLE not in lines and lines.count("\n") == len(texts) and self._all_unchanged.fullmatch(lines) is not None
        )

    def _clean(self, raw: str) -> str | None:
        """Clean a value by its mapping rule and as loading does, and cache the result."""
        first = self._map_value(raw)
        value: str | None
        if first is None:
            value = None
        elif first == raw and self._is_simple and sanitize_text(raw) == raw:
            value = raw  # cleaning it again would not change it
        else:
            value = self._load_cleaner.cleaned(first)
        if value is not None and value != raw and (original := sanitize_text(raw)) != value:
            self._original_values[raw] = original
        if len(raw) <= LONGEST_KNOWN:
            self._stored_values[raw] = value
        return value

    def _rejection(self, raw: str) -> _Rejected | None:
        """Return why a value is not stored; None if it is blank."""
        first = self._map_value(raw)
        if first:
            return _Rejected(first, self._load_cleaner.reason, True) if sanitize_text(first) else None
        # A name that is repeated from another entity is reported there.
        is_given = not self._sanitizes and sanitize_text(raw)
        return _Rejected(raw, self.reason(raw), False) if is_given else None

    def _map_value(self, raw: str) -> str | None:
        if raw in self._mapped_values:
            return self._mapped_values[raw]
        first = self._clean_by_rule(raw)
        if len(raw) <= LONGEST_KNOWN:
            self._mapped_values[raw] = first
        return first

    def _clean_by_rule(self, raw: str) -> str | None:
        if self.is_too_long(raw):
            return None
        text = sanitize_text(raw) if self._sanitizes else raw
        return None if text is None else self._kind.clean_text(text, fuzzy=self._fuzzy, format=self._format)


class _ReferenceCleaner(_Cleaner):
    """Cleans references to entities of the same row: FtM's mapping does not clean them, but loading does."""

    def __init__(self, prop: Property, load_cleaner: _LoadCleaner) -> None:
        super().__init__(prop, False, None, load_cleaner, False)
        self._is_simple = False
        self._is_unchanged = ID.fullmatch

    def _are_all_unchanged(self, texts: list[str]) -> bool:
        joined = "".join(texts)
        return joined.isascii() and joined.isalnum() and "" not in texts

    def _clean_by_rule(self, raw: str) -> str | None:
        return raw


class _Cleaners:
    """Cleaners of one process: the cleaning on load is the same for all properties of a type."""

    def __init__(self) -> None:
        self._load_cleaners: dict[str, _LoadCleaner] = {}

    def load_cleaner(self, kind: PropertyType) -> _LoadCleaner:
        return self._load_cleaners.setdefault(kind.name, _LoadCleaner(kind))

    def of(self, prop: Property, rule: PropertyMapping | None = None, sanitizes: bool = False) -> _Cleaner:
        load_cleaner = self.load_cleaner(prop.type)
        if rule is not None and rule.entity is not None:
            return _ReferenceCleaner(prop, load_cleaner)
        fuzzy = rule is not None and rule.fuzzy
        form = (None if rule is None else rule.format) or prop.format
        return _Cleaner(prop, fuzzy, form, load_cleaner, sanitizes)


class _ValueColumn:
    """A column of values of a property: at most one per row."""

    def __init__(self, cleaner: _Cleaner, texts: Texts) -> None:
        self.name = cleaner.name
        self.is_name = cleaner.is_name
        self._cleaner = cleaner
        self._texts = texts

    def values(self, ids: Texts) -> Texts:
        """Return the values that are stored. Raises UnusualRows for an entity that refers to itself: such rows are
        bad."""
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
    """The source of a property's values: a column, or one text for all rows."""

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
        """Add a row's values to an entity as `PropertyMapping.map` does, and the reasons why values are left out."""
        rule, cleaner = self.rule, self._cleaner
        for value in _raw_values(rule, [record.get(ref) for ref in rule.refs]):
            is_added = not cleaner.is_too_long(value) and entity.unsafe_add(
                rule.prop, value, fuzzy=rule.fuzzy, format=rule.format
            )
            if not is_added and sanitize_text(value):
                reasons[rule.prop.name, value] = cleaner.reason(value)

    def value_columns(self, texts: dict[str, Texts], results: dict[str, _RuleResult], count: int) -> list[_ValueColumn]:
        column: Texts = [*self.rule.literals] * count if self.rule.literals else texts[self.rule.refs[0]]
        return [_ValueColumn(self._cleaner, column)]


class _ReferenceSource(_ColumnSource):
    """A source that refers to another entity of the row."""

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

    def value_columns(self, texts: dict[str, Texts], results: dict[str, _RuleResult], count: int) -> list[_ValueColumn]:
        assert self.rule.entity is not None
        return [_ValueColumn(self._cleaner, results[self.rule.entity].ids)]


class _CombinedSource(_ColumnSource):
    """A source of several columns and texts, which are joined, split or put into a template."""

    def value_columns(self, texts: dict[str, Texts], results: dict[str, _RuleResult], count: int) -> list[_ValueColumn]:
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
            _ValueColumn(self._cleaner, [own[index] if index < len(own) else None for own in values])
            for index in range(most)
        ]


def _raw_values(rule: PropertyMapping, row: Sequence[str | None]) -> list[str]:
    """Return the values of a property before cleaning, as `PropertyMapping` computes them."""
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
    """Fill a template with a row's values, which may contain placeholders. Raises InvalidRecord if it is too long."""
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
    """Return whether FtM's sanitizing would at most strip white space around the text."""
    return text.isascii() and text.isprintable()


# Events


class _StatementColumns:
    """Statements of some rows as columns, one property after the other, with the row of each statement."""

    def __init__(self) -> None:
        self.entities = 0
        self._entity_ids: list[str] = []
        self._schemata: list[str] = []
        self._schema_lengths: list[int] = []
        self._props: list[str] = []
        self._lengths: list[int] = []
        self._rows: list[RowIndexes] = []
        self._owners: list[npt.NDArray[np.int64]] = []
        self._ids: list[bytes] = []
        self._values: Texts = []
        self._originals: Texts = []
        self._omitted: dict[tuple[int, int, str, str], tuple[str, str]] = {}

    def omit(self, index: int, first: int, schema: str, prop: str, rejected: _Rejected) -> None:
        """Record a value that is left out, in the row at this index, of the entities numbered from `first` on."""
        self._omitted[index, first, prop, rejected.value] = schema, rejected.reason

    def omitted(self, start: int) -> list[OmittedInRow]:
        """Return the omitted values in the order of rows, of which the first has the index `start`."""
        return [
            OmittedInRow(start + index, schema, prop, value, reason)
            for (index, _, prop, value), (schema, reason) in sorted(self._omitted.items())
        ]

    def entities_of(self, ids: Texts, schema: str) -> int:
        """Add entities, of which some may not exist. Returns the number of the first."""
        first = len(self._entity_ids)
        self._entity_ids += [entity or "" for entity in ids]
        self._schemata.append(schema)
        self._schema_lengths.append(len(ids))
        self.entities += len(ids) - ids.count(None)
        return first

    def add(
        self,
        prop: str,
        first: int,
        indexes: RowIndexes,
        digests: Digests,
        values: Texts,
        originals: Texts | None = None,
    ) -> None:
        """Add the statements of one property that have a digest."""
        owners = np.arange(first, first + len(digests))
        if None in digests:
            present = np.fromiter((digest is not None for digest in digests), bool, len(digests))
            indexes, owners = indexes[present], owners[present]
            values = list(compress(values, digests))
            originals = None if originals is None else list(compress(originals, digests))
            digests = list(compress(digests, digests))
        self._props.append(prop)
        self._lengths.append(len(digests))
        self._rows.append(indexes)
        self._owners.append(owners)
        self._ids += digests  # type: ignore[arg-type]  # without None
        self._values += values
        self._originals += [None] * len(digests) if originals is None else originals

    def table(self, origin: str, moment: int) -> pa.RecordBatch:
        """Return the events ordered by shard, and within a shard by row, as journal packs are.

        If many are equal, only the last of each is returned.
        """
        count = len(self._ids)
        if not count:
            return pa.RecordBatch.from_pylist([], SCHEMA)
        owners = np.concatenate(self._owners)
        shards = np.array(shards_of(self._entity_ids), np.uint16)
        order = np.argsort(np.concatenate(self._rows), kind="stable")
        order = order[np.argsort(shards[owners[order]], kind="stable")]
        if len(set(self._ids)) < count * WORTH_DROPPING:
            last = {self._ids[index]: position for position, index in enumerate(order.tolist())}
            order = order[sorted(last.values())]
            count = len(order)
        indices = pa.array(order)
        owner = pa.array(owners[order])
        prop = pa.array(np.repeat(np.arange(len(self._props)), self._lengths)[order])
        schema = pa.array(np.repeat(np.arange(len(self._schemata)), self._schema_lengths))
        columns = {
            "batch": _repeat(0, count, pa.int64()),
            "position": pa.array(np.arange(count)),
            "kind": _repeat(Kind.ADD.value, count, pa.int16()),
            "shard_key": pa.array(shards[owners[order]].astype(np.int32)),
            "id": pa.array(self._ids, pa.binary()).take(indices),
            "entity_id": pa.array(self._entity_ids, pa.string()).take(owner),
            "canonical_id": pa.nulls(count, pa.string()),
            "schema": pa.array(self._schemata, pa.string()).take(schema.take(owner)),
            "prop": pa.array(self._props, pa.string()).take(prop),
            "value": pa.array(self._values, pa.string()).take(indices),
            "lang": pa.nulls(count, pa.string()),
            "original_value": pa.array(self._originals, pa.string()).take(indices),
            "external": _repeat(False, count, pa.bool_()),
            "origin": _repeat(origin, count, pa.string()),
            "first_seen": _repeat(moment, count, pa.int64()),
            "last_seen": _repeat(moment, count, pa.int64()),
        }
        return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _repeat(value: object, count: int, kind: pa.DataType) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), count)
