"""Convert a request body to journal events: read and validate its records, and gather events into chunks."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn

import orjson
from pydantic import BaseModel, ConfigDict, Field

from tarn.errors import FieldError, SchemaViolation
from tarn.journal.formats import BadRecord, IgnoredColumns, Record, Row, entity_records, statement_rows
from tarn.journal.formats.counting import Counted, require_equal
from tarn.journal.formats.record import ByteSource, invalid_format, require_memory
from tarn.journal.parsing.event_buffer import Events
from tarn.model.ftm.entity import Exploded, Exploder, Omitted, Values, truncated
from tarn.model.ftm.omissions import Omissions
from tarn.model.ftm.statement import InvalidRecord, StatementReader, validate_id
from tarn.model.names import DatasetName, Origin

DEFAULT_ORIGIN = Origin("default")
"""Origin of records that do not name one."""

CHUNK_ROWS = 50_000
CHUNK_BYTES = 16 << 20
"""A chunk is full at this many rows, or when its records were this large."""

MOST_FAULTS = 100
"""Faults that a response lists; further ones are only counted."""


MOST_IGNORED = 100
"""Names of ignored fields that are counted separately; further ones are counted together as `*`."""

MOST_DELETED = 200_000
"""Maximum entities that a body of changes may delete: their ids are held in memory until its end."""

MOST_DEFERRED = 500_000
"""Maximum referents in a body of changes: they are written after all of its deletes, so they are held in memory."""

OnError = Literal["abort", "skip", "drop"]
"""How to treat an invalid record: reject the body, skip the record, or drop only the invalid values."""


class ReadReport(BaseModel):
    """Result of reading a body: counts of stored and rejected records, and the values that were left out."""

    read: int = 0
    stored: int = 0
    rejected: int = 0
    errors: list[FieldError] = []
    omitted: Omissions = Field(default_factory=Omissions)
    ignored: dict[str, int] = {}
    nested: int = 0
    deleted: int = 0
    deleted_ids: dict[str, None] = {}
    """Entities that the body deletes and does not add again, in body order."""

    def reject(self, line: int, field: str | None, reason: str) -> None:
        """Count a rejected record, and list its fault if it is among the first `MOST_FAULTS`."""
        self.rejected += 1
        if len(self.errors) < MOST_FAULTS:
            self.errors.append(FieldError(line=line, field=field, reason=reason))

    def ignore(self, name: str, count: int = 1) -> None:
        """Count an unknown field."""
        name = truncated(name)
        if name not in self.ignored and len(self.ignored) >= MOST_IGNORED:
            name = "*"
        self.ignored[name] = self.ignored.get(name, 0) + count


class ReadOptions(BaseModel):
    """Options for reading a body: its record type, media type, and values that apply to all of its records."""

    model_config = ConfigDict(frozen=True)

    records: Literal["entities", "statements"]
    media_type: str
    dataset: DatasetName
    origin: Origin | None
    moment: int
    """Default for missing `first_seen` and `last_seen`, in microseconds since 1970."""
    longest: int
    """Maximum size of a record in bytes."""
    replaces: str | None = None
    """If set, the body is one entity with this id, and replaces the origin's statements of it."""
    on_error: OnError = "abort"
    values: Values = "clean"
    strict: bool = False
    """Reject the body if any value would be left out; verify the ids and datasets that statements declare."""


class BodyReader:
    """Reader of one body. An invalid record raises SchemaViolation or is skipped and counted (`on_error`)."""

    def __init__(self, options: ReadOptions, exploder: Exploder) -> None:
        self._options = options
        self._exploder = exploder
        self._line = 0
        self._deferred: list[Exploded] = []
        self._deferred_referents = 0
        self.report = ReadReport()
        self.entities = 0
        self.statements = 0
        self.rows = 0
        """Events in all chunks so far."""
        self.over = False
        """Whether the chunk yielded last is known to be the final one."""

    def chunks(self, source: ByteSource) -> Iterator[Events]:
        """Return the body's events in chunks. Raises SchemaViolation, and what the format's parser raises."""
        options = self._options
        if options.records == "entities":
            return self._chunks(entity_records(source, options.media_type, options.longest), self._add_entity())
        return self._chunks(statement_rows(source, options.media_type, options.longest), self._add_statement())

    def _add_entity(self) -> Callable[[Events, bytes], int]:
        options, explode = self._options, self._exploder.explode
        dataset, moment, values, drop = options.dataset, options.moment, options.values, options.on_error == "drop"
        origin = options.origin or DEFAULT_ORIGIN

        def add(events: Events, record: bytes) -> int:
            try:
                data = orjson.loads(record)
            except orjson.JSONDecodeError as error:
                require_memory(error)
                if options.replaces is not None:
                    raise invalid_format(f"not valid JSON: {error.msg}", error.lineno) from None
                raise InvalidRecord(None, f"is not valid JSON: {error.msg}") from None
            if options.replaces is not None:
                self._replace(events, data, options.replaces)
            elif type(data) is dict and "op" in data and "schema" not in data:
                self._change(events, data)
                return len(record)
            entity = explode(dataset, data, values, drop)
            events.add_entity(entity, origin, moment)
            if entity.omitted or entity.ignored or entity.nested:
                self._note(entity)
            return len(record)

        return add

    def _replace(self, events: Events, data: Any, entity_id: str) -> None:
        """Erase the origin's statements of the one entity in the body. Raises InvalidRecord, InvalidFormat."""
        if self._line != 1:
            raise invalid_format("expected nothing after the entity", self._line)
        if type(data) is dict and data.setdefault("id", entity_id) != entity_id:
            raise InvalidRecord("id", f"is not the one in the path, {entity_id!r}")
        events.erase(entity_id, self._options.origin or DEFAULT_ORIGIN)

    def _change(self, events: Events, data: dict[str, Any]) -> None:
        """Apply one line of changes: ADD and MOD replace the origin's statements of the entity, DEL erases them.

        Referents are written at the end of the body: when an entity is merged into another, its id is deleted and
        becomes a referent of the other one, and the two lines may come in either order.
        """
        options, op, content = self._options, data["op"], data.get("entity")
        origin = options.origin or DEFAULT_ORIGIN
        if op == "DEL":
            deleted = content.get("id") if type(content) is dict else data.get("id")
            entity_id = validate_id(deleted, "entity.id")
            events.erase(entity_id, origin)
            self.report.deleted += 1
            self.report.deleted_ids[entity_id] = None
            if len(self.report.deleted_ids) > MOST_DELETED:
                self._refuse_size("entity.id", f"a body of changes may delete at most {MOST_DELETED} entities")
            return
        if op not in ("ADD", "MOD"):
            raise InvalidRecord("op", f"is {truncated(op)!r}, not ADD, MOD or DEL")
        if type(content) is not dict:
            raise InvalidRecord("entity", "must be an entity: ADD and MOD need its complete content")
        try:
            entity = self._exploder.explode(options.dataset, content, options.values, options.on_error == "drop")
        except InvalidRecord as error:
            raise InvalidRecord("entity" if error.field is None else f"entity.{error.field}", error.reason) from None
        self._deferred_referents += sum(len(part.referents) for part in entity.all())
        if self._deferred_referents > MOST_DEFERRED:
            self._refuse_size("entity.referents", f"a body of changes may name at most {MOST_DEFERRED} referents")
        self.report.deleted_ids.pop(entity.entity_id, None)
        events.erase(entity.entity_id, origin)
        for part in entity.all():
            events.add_statements_of(part, origin, options.moment)
            if part.referents:
                self._deferred.append(part)
        self._note(entity)

    def _refuse_size(self, field: str, limit: str) -> NoReturn:
        fault = FieldError(line=self._line, field=field, reason=f"{limit}; split the body")
        raise SchemaViolation(f"line {self._line}, {field}: {fault.reason}", errors=[fault])

    def _note(self, entity: Exploded) -> None:
        """Add nested entities, ignored fields and omitted values to the report.

        Raises SchemaViolation in strict mode if a value was omitted.
        """
        self.report.nested += len(entity.all()) - 1
        for name in entity.ignored:
            self.report.ignore(name)
        for value in entity.omitted:
            self._omit(value)

    def _omit(self, value: Omitted) -> None:
        if self._options.strict:
            field = f"{value.schema}:{value.prop}"
            fault = FieldError(line=self._line, field=field, reason=f"{truncated(value.value)!r} is {value.reason}")
            raise SchemaViolation(f"line {self._line}, {field}: {fault.reason}", errors=[fault])
        self.report.omitted.add(value.schema, value.prop, value.value, value.reason, self._line)

    def _add_statement(self) -> Callable[[Events, dict[str, Any]], int | None]:
        options = self._options
        reader = StatementReader(options.dataset, options.origin, DEFAULT_ORIGIN, options.moment, options.strict)
        cleans = options.values == "clean"

        def add(events: Events, row: dict[str, Any]) -> int | None:
            statement = reader.read(row)
            for name in reader.ignored:
                self.report.ignore(name)
            if cleans:
                cleaned = self._exploder.clean(options.dataset, statement)
                if isinstance(cleaned, Omitted):
                    self._omit(cleaned)
                    return None
                statement = cleaned
            events.add_statement(statement)
            return len(statement.value) + len(statement.original_value or "") + 100

        return add

    def _chunks(
        self,
        records: "Iterator[Record | BadRecord | IgnoredColumns] | Iterator[Row | BadRecord | IgnoredColumns]",
        add: Callable[[Events, Any], int | None],
    ) -> Iterator[Events]:
        """Yield full chunks. `add` returns the size of what it added, None if the record's only value was omitted."""
        events, size, report, counted = Events(), 0, self.report, Counted[Any](records)
        ignored: tuple[str, ...] = ()
        for record in counted:
            self._exploder.limit.check()
            if isinstance(record, IgnoredColumns):
                ignored = record.names
                continue
            if isinstance(record, BadRecord):
                self._fault(record.line, record.field, record.reason)
                continue
            self._line, content = record
            try:
                added_size = add(events, content)
            except InvalidRecord as error:
                self._fault(self._line, error.field, error.reason)
                continue
            if added_size is None:
                report.rejected += 1
                continue
            report.stored += 1
            size += added_size
            if len(events) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                yield self._counted(events)
                events, size = Events(), 0
        report.read = counted.count
        require_equal(report.stored + report.rejected, report.read, "records were stored or reported", "were read")
        for name in ignored:
            report.ignore(name, report.read)
        for entity in self._deferred:
            events.add_referents_of(entity, self._options.origin or DEFAULT_ORIGIN, self._options.moment)
        if len(events):
            self.over = True
            yield self._counted(events)

    def _counted(self, events: Events) -> Events:
        self.entities += events.entities
        self.statements += events.statements
        self.rows += len(events)
        return events

    def _fault(self, line: int, field: str | None, reason: str) -> None:
        if self._options.on_error == "abort" or self._options.replaces is not None:
            where = f"line {line}" + (f", {field}" if field else "")
            raise SchemaViolation(f"{where}: {reason}", errors=[FieldError(line=line, field=field, reason=reason)])
        self.report.reject(line, field, reason)
