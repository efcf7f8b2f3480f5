"""From a body to events: records read, checked, and gathered into chunks."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn

import orjson
from pydantic import BaseModel, ConfigDict, Field

from tarn.errors import Fault, SchemaViolation
from tarn.journal.event_buffer import Events
from tarn.journal.formats import BadRecord, IgnoredColumns, Record, Row, entity_records, statement_rows
from tarn.journal.formats.counting import Counted, require_equal
from tarn.journal.formats.record import ByteSource, invalid_format, require_memory
from tarn.model.entity import Exploded, Exploder, Omitted, Values, truncated
from tarn.model.names import DatasetName, Origin
from tarn.model.omissions import Omissions
from tarn.model.statement import InvalidRecord, StatementReader, validate_id

DEFAULT_ORIGIN = Origin("default")
"""The origin of what names none."""

CHUNK_ROWS = 50_000
CHUNK_BYTES = 16 << 20
"""A chunk is full at this many rows, or when its records were this large."""

MOST_FAULTS = 100
"""Faults that an answer lists; the rest are counted."""


MOST_IGNORED = 100
"""Names of ignored fields that are counted one by one; the rest is counted as `*`."""

MOST_DELETED = 200_000
"""Entities that a body of changes may delete: their ids are held until its end."""

MOST_DEFERRED = 500_000
"""Referents of a body of changes: they are written after all of its deletes, so they are held until its end."""

OnError = Literal["abort", "skip", "drop"]
"""What a bad record does: refuse the body, leave the record out, or leave out only what is bad in it."""


class ReadReport(BaseModel):
    """What became of a body: a record that was read is stored or rejected, and what was left out of it is listed."""

    read: int = 0
    stored: int = 0
    rejected: int = 0
    errors: list[Fault] = []
    omitted: Omissions = Field(default_factory=Omissions)
    ignored: dict[str, int] = {}
    nested: int = 0
    deleted: int = 0
    deleted_ids: dict[str, None] = {}
    """Entities that the body deletes and does not add again, in its order."""

    def reject(self, line: int, field: str | None, reason: str) -> None:
        """Count a record that was left out, and list it if it is among the first."""
        self.rejected += 1
        if len(self.errors) < MOST_FAULTS:
            self.errors.append(Fault(line=line, field=field, reason=reason))

    def ignore(self, name: str, count: int = 1) -> None:
        """Count a field that no record of its kind has."""
        name = truncated(name)
        if name not in self.ignored and len(self.ignored) >= MOST_IGNORED:
            name = "*"
        self.ignored[name] = self.ignored.get(name, 0) + count


class ReadOptions(BaseModel):
    """How a body is to be read: what it holds, in which form, and what is said of it as a whole."""

    model_config = ConfigDict(frozen=True)

    records: Literal["entities", "statements"]
    media_type: str
    dataset: DatasetName
    origin: Origin | None
    moment: int
    """What stands for the times that a record does not tell, in microseconds since 1970."""
    longest: int
    """Bytes of a record, at most."""
    replaces: str | None = None
    """The body is one entity with this id, and replaces what the origin says of it."""
    on_error: OnError = "abort"
    values: Values = "clean"
    strict: bool = False
    """Refuse the body if any value would be left out; hold statements to the ids and datasets that they claim."""


class BodyReader:
    """Reads one body. Bad records end it with SchemaViolation, or are left out and counted."""

    def __init__(self, terms: ReadOptions, exploder: Exploder) -> None:
        self._terms = terms
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
        """Whether the chunk that was given last is known to be the last one."""

    def chunks(self, source: ByteSource) -> Iterator[Events]:
        """The body's events. Raises what the body's form and its records raise."""
        terms = self._terms
        if terms.records == "entities":
            return self._chunks(entity_records(source, terms.media_type, terms.longest), self._add_entity())
        return self._chunks(statement_rows(source, terms.media_type, terms.longest), self._add_statement())

    def _add_entity(self) -> Callable[[Events, bytes], int]:
        terms, explode = self._terms, self._exploder.explode
        dataset, moment, values, drop = terms.dataset, terms.moment, terms.values, terms.on_error == "drop"
        origin = terms.origin or DEFAULT_ORIGIN

        def add(events: Events, record: bytes) -> int:
            try:
                data = orjson.loads(record)
            except orjson.JSONDecodeError as error:
                require_memory(error)
                if terms.replaces is not None:
                    raise invalid_format(f"not valid JSON: {error.msg}", error.lineno) from None
                raise InvalidRecord(None, f"is not valid JSON: {error.msg}") from None
            if terms.replaces is not None:
                self._replace(events, data, terms.replaces)
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
        """End what the origin says of the entity that the body consists of. Raises Invalid, InvalidFormat."""
        if self._line != 1:
            raise invalid_format("expected nothing after the entity", self._line)
        if type(data) is dict and data.setdefault("id", entity_id) != entity_id:
            raise InvalidRecord("id", f"is not the one in the path, {entity_id!r}")
        events.erase(entity_id, self._terms.origin or DEFAULT_ORIGIN)

    def _change(self, events: Events, data: dict[str, Any]) -> None:
        """Take a line of changes: ADD and MOD replace what the origin says of the entity, DEL ends it.

        Referents are written at the end of the body: an entity that was merged into another is deleted under an id
        which is the other's referent from then on, in whichever order the two lines come.
        """
        terms, op, given = self._terms, data["op"], data.get("entity")
        origin = terms.origin or DEFAULT_ORIGIN
        if op == "DEL":
            named = given.get("id") if type(given) is dict else data.get("id")
            entity_id = validate_id(named, "entity.id")
            events.erase(entity_id, origin)
            self.report.deleted += 1
            self.report.deleted_ids[entity_id] = None
            if len(self.report.deleted_ids) > MOST_DELETED:
                self._refuse_size("entity.id", f"a body of changes may delete {MOST_DELETED} entities")
            return
        if op not in ("ADD", "MOD"):
            raise InvalidRecord("op", f"is {truncated(op)!r}, not ADD, MOD or DEL")
        if type(given) is not dict:
            raise InvalidRecord("entity", "must be an entity: the change does not say what is stored")
        try:
            entity = self._exploder.explode(terms.dataset, given, terms.values, terms.on_error == "drop")
        except InvalidRecord as error:
            raise InvalidRecord("entity" if error.field is None else f"entity.{error.field}", error.reason) from None
        self._deferred_referents += sum(len(one.referents) for one in entity.all())
        if self._deferred_referents > MOST_DEFERRED:
            self._refuse_size("entity.referents", f"a body of changes may name {MOST_DEFERRED} referents")
        self.report.deleted_ids.pop(entity.entity_id, None)
        events.erase(entity.entity_id, origin)
        for one in entity.all():
            events.add_statements_of(one, origin, terms.moment)
            if one.referents:
                self._deferred.append(one)
        self._note(entity)

    def _refuse_size(self, field: str, limit: str) -> NoReturn:
        fault = Fault(line=self._line, field=field, reason=f"{limit}; split it")
        raise SchemaViolation(f"line {self._line}, {field}: {fault.reason}", errors=[fault])

    def _note(self, entity: Exploded) -> None:
        """Report what is special about an entity. Raises SchemaViolation where nothing may be left out."""
        self.report.nested += len(entity.all()) - 1
        for name in entity.ignored:
            self.report.ignore(name)
        for value in entity.omitted:
            self._omit(value)

    def _omit(self, value: Omitted) -> None:
        if self._terms.strict:
            field = f"{value.schema}:{value.prop}"
            fault = Fault(line=self._line, field=field, reason=f"{truncated(value.value)!r} is {value.reason}")
            raise SchemaViolation(f"line {self._line}, {field}: {fault.reason}", errors=[fault])
        self.report.omitted.add(value.schema, value.prop, value.value, value.reason, self._line)

    def _add_statement(self) -> Callable[[Events, dict[str, Any]], int | None]:
        terms = self._terms
        reader = StatementReader(terms.dataset, terms.origin, DEFAULT_ORIGIN, terms.moment, terms.strict)
        cleans = terms.values == "clean"

        def add(events: Events, row: dict[str, Any]) -> int | None:
            statement = reader.read(row)
            for name in reader.ignored:
                self.report.ignore(name)
            if cleans:
                cleaned = self._exploder.clean(terms.dataset, statement)
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
        """`add` gives the size of what it has added, or None for a record whose only value was left out."""
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
                taken = add(events, content)
            except InvalidRecord as error:
                self._fault(self._line, error.field, error.reason)
                continue
            if taken is None:
                report.rejected += 1
                continue
            report.stored += 1
            size += taken
            if len(events) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                yield self._counted(events)
                events, size = Events(), 0
        report.read = counted.count
        require_equal(report.stored + report.rejected, report.read, "records were stored or reported", "were read")
        for name in ignored:
            report.ignore(name, report.read)
        for entity in self._deferred:
            events.add_referents_of(entity, self._terms.origin or DEFAULT_ORIGIN, self._terms.moment)
        if len(events):
            self.over = True
            yield self._counted(events)

    def _counted(self, events: Events) -> Events:
        self.entities += events.entities
        self.statements += events.statements
        self.rows += len(events)
        return events

    def _fault(self, line: int, field: str | None, reason: str) -> None:
        if self._terms.on_error == "abort" or self._terms.replaces is not None:
            where = f"line {line}" + (f", {field}" if field else "")
            raise SchemaViolation(f"{where}: {reason}", errors=[Fault(line=line, field=field, reason=reason)])
        self.report.reject(line, field, reason)
