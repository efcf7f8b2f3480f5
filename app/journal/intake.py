"""From a body to events: records read, checked, and gathered into chunks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

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


class Intake:
    """Reads one body. Bad records end it with SchemaViolation, or are left out and counted."""

    def __init__(self, skip: bool) -> None:
        self._skip = skip
        self.rejected = Rejected()
        self.entities = 0
        self.statements = 0

    def entities_of(
        self,
        source: Source,
        media_type: str,
        longest: int,
        exploder: Exploder,
        dataset: DatasetName,
        origin: str,
        now: int,
    ) -> Iterator[Events]:
        """Chunks of the statements of entities."""

        def add(events: Events, record: bytes) -> int:
            try:
                data = orjson.loads(record)
            except orjson.JSONDecodeError as error:
                raise Invalid(None, f"is not valid JSON: {error.msg}") from None
            events.add_entity(exploder.explode(dataset, data), origin, now)
            return len(record)

        return self._chunks(entity_records(source, media_type, longest), add)

    def statements_of(self, source: Source, media_type: str, longest: int, reader: StatementReader) -> Iterator[Events]:
        """Chunks of statements."""

        def add(events: Events, row: dict[str, Any]) -> int:
            statement = reader.read(row)
            events.add_statement(statement)
            return len(statement.value) + 100

        return self._chunks(statement_rows(source, media_type, longest), add)

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
            yield self._counted(events)

    def _counted(self, events: Events) -> Events:
        self.entities += events.entities
        self.statements += events.statements
        return events

    def _fault(self, fault: Fault) -> None:
        if not self._skip:
            where = f"line {fault.line}" + (f", {fault.field}" if fault.field else "")
            raise SchemaViolation(f"{where}: {fault.reason}", errors=[fault])
        self.rejected.add(fault)
