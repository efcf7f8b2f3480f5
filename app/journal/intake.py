"""From a body to events: records read, checked, and gathered into chunks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict

from app.errors import Fault, SchemaViolation
from app.journal.events import Events
from app.journal.formats import BadRecord, Record, Row, entity_records, statement_rows
from app.journal.formats.record import Source
from app.model.entity import Exploder
from app.model.names import DatasetName, Origin
from app.model.statement import Invalid, StatementReader

DEFAULT_ORIGIN = Origin("default")
"""The origin of what names none."""

CHUNK_ROWS = 50_000
CHUNK_BYTES = 16 << 20
"""A chunk is full at this many rows, or when its records were this large."""

MOST_FAULTS = 100
"""Faults that an answer lists; the rest are counted."""


@dataclass
class Rejected:
    """Records that were left out, where the caller asked for that."""

    count: int = 0
    faults: list[Fault] = field(default_factory=list)

    def add(self, fault: Fault) -> None:
        self.count += 1
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(fault)


class Terms(BaseModel):
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
    skip: bool
    """Leave bad records out."""
    strict: bool = False
    """Hold statements to the ids and datasets that they claim."""


class Intake:
    """Reads one body. Bad records end it with SchemaViolation, or are left out and counted."""

    def __init__(self, terms: Terms, exploder: Exploder) -> None:
        self._terms = terms
        self._exploder = exploder
        self.rejected = Rejected()
        self.entities = 0
        self.statements = 0
        self.over = False
        """Whether the chunk that was given last is known to be the last one."""

    def chunks(self, source: Source) -> Iterator[Events]:
        """The body's events. Raises what the body's form and its records raise."""
        terms = self._terms
        if terms.records == "entities":
            return self._chunks(entity_records(source, terms.media_type, terms.longest), self._add_entity())
        return self._chunks(statement_rows(source, terms.media_type, terms.longest), self._add_statement())

    def _add_entity(self) -> Callable[[Events, bytes], int]:
        explode, dataset, moment = self._exploder.explode, self._terms.dataset, self._terms.moment
        origin = self._terms.origin or DEFAULT_ORIGIN

        def add(events: Events, record: bytes) -> int:
            try:
                data = orjson.loads(record)
            except orjson.JSONDecodeError as error:
                raise Invalid(None, f"is not valid JSON: {error.msg}") from None
            events.add_entity(explode(dataset, data), origin, moment)
            return len(record)

        return add

    def _add_statement(self) -> Callable[[Events, dict[str, Any]], int]:
        terms = self._terms
        reader = StatementReader(terms.dataset, terms.origin, DEFAULT_ORIGIN, terms.moment, terms.strict)

        def add(events: Events, row: dict[str, Any]) -> int:
            statement = reader.read(row)
            events.add_statement(statement)
            return len(statement.value) + 100

        return add

    def _chunks(
        self, records: "Iterator[Record | BadRecord] | Iterator[Row | BadRecord]", add: Callable[[Events, Any], int]
    ) -> Iterator[Events]:
        events, size = Events(), 0
        for record in records:
            if isinstance(record, BadRecord):
                self._fault(Fault(line=record.line, field=record.field, reason=record.reason))
                continue
            line, content = record
            try:
                size += add(events, content)
            except Invalid as error:
                self._fault(Fault(line=line, field=error.field, reason=error.reason))
                continue
            if len(events) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                yield self._counted(events)
                events, size = Events(), 0
        if len(events):
            self.over = True
            yield self._counted(events)

    def _counted(self, events: Events) -> Events:
        self.entities += events.entities
        self.statements += events.statements
        return events

    def _fault(self, fault: Fault) -> None:
        if not self._terms.skip:
            where = f"line {fault.line}" + (f", {fault.field}" if fault.field else "")
            raise SchemaViolation(f"{where}: {fault.reason}", errors=[fault])
        self.rejected.add(fault)
