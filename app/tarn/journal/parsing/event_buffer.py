"""Columnar in-memory buffer of journal events, convertible to SQL rows and Arrow."""

from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from tarn.model.datasets.shards import shard_of
from tarn.model.ftm.entity import Exploded
from tarn.model.ftm.statement import StatementRow


class Kind(IntEnum):
    """Kind of an event: add a statement, delete a statement, or erase all statements of an entity or origin."""

    ADD = 1
    DELETE = 2
    ERASE = 3


SCHEMA = pa.schema(
    [
        ("batch", pa.int64()),
        ("position", pa.int64()),
        ("kind", pa.int16()),
        ("shard_key", pa.int32()),
        ("id", pa.binary()),
        ("entity_id", pa.string()),
        ("canonical_id", pa.string()),
        ("schema", pa.string()),
        ("prop", pa.string()),
        ("value", pa.string()),
        ("lang", pa.string()),
        ("original_value", pa.string()),
        ("external", pa.bool_()),
        ("origin", pa.string()),
        ("first_seen", pa.int64()),
        ("last_seen", pa.int64()),
    ]
)
"""The journal's columns, in types that both databases accept without conversion."""

OF_ROWS = ("id", "prop", "value", "original_value")
"""Columns that differ between the statements of one entity."""
OF_RUNS = tuple(name for name in SCHEMA.names if name not in ("batch", "position", *OF_ROWS))
"""Columns that are equal for all statements of one entity, stored once per run of rows."""


class Chunk(Protocol):
    """Events of one batch that are written together."""

    @property
    def entities(self) -> int: ...
    @property
    def statements(self) -> int: ...
    @property
    def size(self) -> int:
        """Total characters of all values, an estimate of their size."""

    def __len__(self) -> int: ...
    def rows(self, batch: int, start: int = 0) -> list[dict[str, Any]]:
        """Return the events as rows of the journal table; for small numbers of events."""

    def table(self, batch: int, start: int = 0) -> pa.RecordBatch:
        """Return the events as Arrow; for large numbers of events."""


class Events:
    """Buffer of events in the order in which they apply."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Any]] = {name: [] for name in OF_ROWS}
        self._runs: list[tuple[Any, ...]] = []
        self._lengths: list[int] = []
        self.entities = 0
        self.statements = 0

    @property
    def size(self) -> int:
        """Total characters of all values, an estimate of their size."""
        return sum(len(value) for value in self._rows["value"] if value is not None)

    def __len__(self) -> int:
        return len(self._rows["id"])

    def add_entity(self, entity: Exploded, origin: str, now: int) -> None:
        """Add all statements of an entity, of its nested entities and of their referents."""
        self.add_statements_of(entity, origin, now)
        if entity.referents:
            self.add_referents_of(entity, origin, now)
        for child in entity.nested:
            self.add_entity(child, origin, now)

    def add_statements_of(self, entity: Exploded, origin: str, now: int) -> None:
        """Add the statements of one entity, without nested entities and referents."""
        first, last = _seen(entity, now)
        shard = shard_of(entity.entity_id)
        self._runs.append(
            (Kind.ADD.value, shard, entity.entity_id, None, entity.schema, None, False, origin, first, last)
        )
        self._lengths.append(len(entity.ids))
        self._rows["id"] += entity.ids
        self._rows["prop"] += entity.props
        self._rows["value"] += entity.values
        self._rows["original_value"] += entity.originals
        self.entities += 1
        self.statements += len(entity.ids)

    def add_referents_of(self, entity: Exploded, origin: str, now: int) -> None:
        """Add a BASE statement for each referent of an entity, which makes the referent an id of that entity."""
        for referent, statement in entity.referents:
            first, last = _seen(entity, now)
            self._append(
                kind=Kind.ADD.value,
                shard_key=shard_of(referent),
                id=statement,
                entity_id=referent,
                canonical_id=entity.entity_id,
                schema=entity.schema,
                prop=entity.props[-1],
                value=entity.values[-1],
                external=False,
                origin=origin,
                first_seen=first,
                last_seen=last,
            )
            self.statements += 1

    def add_statement(self, row: StatementRow) -> None:
        self._append(
            kind=Kind.ADD.value,
            shard_key=shard_of(row.entity_id),
            id=row.id,
            entity_id=row.entity_id,
            canonical_id=row.canonical_id,
            schema=row.schema,
            prop=row.prop,
            value=row.value,
            lang=row.lang,
            original_value=row.original_value,
            external=row.external,
            origin=row.origin,
            first_seen=row.first_seen,
            last_seen=row.last_seen,
        )
        self.statements += 1

    def delete(self, statement: bytes, entity_id: str, origin: str) -> None:
        """Delete one statement of one origin."""
        self._append(
            kind=Kind.DELETE.value, shard_key=shard_of(entity_id), id=statement, entity_id=entity_id, origin=origin
        )

    def erase(self, entity_id: str | None, origin: str | None) -> None:
        """Delete all earlier statements of an entity (None: of every entity) by an origin (None: by every origin)."""
        shard = None if entity_id is None else shard_of(entity_id)
        self._append(kind=Kind.ERASE.value, shard_key=shard, entity_id=entity_id, origin=origin)

    def rows(self, batch: int, start: int = 0) -> list[dict[str, Any]]:
        """Return the events as rows of the journal table; for small numbers of events."""
        commons = (
            dict(zip(OF_RUNS, run, strict=True))
            for run, length in zip(self._runs, self._lengths, strict=True)
            for _ in range(length)
        )
        own = zip(*self._rows.values(), strict=True)
        return [
            {"batch": batch, "position": position, **common, **dict(zip(OF_ROWS, values, strict=True))}
            for position, (common, values) in enumerate(zip(commons, own, strict=True), start)
        ]

    def table(self, batch: int, start: int = 0) -> pa.RecordBatch:
        """Return the events as Arrow; for large numbers of events."""
        count = len(self)
        run_of_row = pa.array(np.repeat(np.arange(len(self._runs)), self._lengths))
        columns: dict[str, pa.Array] = {
            "batch": pa.repeat(pa.scalar(batch, pa.int64()), count),
            "position": pa.array(np.arange(start, start + count)),
        }
        for name, values in zip(OF_RUNS, zip(*self._runs, strict=True), strict=True):
            columns[name] = pa.array(values, SCHEMA.field(name).type).take(run_of_row)
        for name in OF_ROWS:
            columns[name] = pa.array(self._rows[name], SCHEMA.field(name).type)
        return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)

    def _append(self, **values: Any) -> None:
        """Add one row as a run of length 1."""
        self._runs.append(tuple(values.get(name) for name in OF_RUNS))
        self._lengths.append(1)
        for name, column in self._rows.items():
            column.append(values.get(name))


def _seen(entity: Exploded, now: int) -> tuple[int, int]:
    """Return when an entity was first and last seen, in microseconds since 1970."""
    first = now if entity.first_seen is None else entity.first_seen
    return first, first if entity.last_seen is None else entity.last_seen


class Packed:
    """Chunk of events that another process has parsed, as Arrow."""

    def __init__(self, data: pa.RecordBatch, entities: int, statements: int, size: int) -> None:
        self._data = data
        self.entities = entities
        self.statements = statements
        self.size = size

    def __len__(self) -> int:
        return int(self._data.num_rows)

    def rows(self, batch: int, start: int = 0) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.table(batch, start).to_pylist()
        return rows

    def table(self, batch: int, start: int = 0) -> pa.RecordBatch:
        """Return the events with this batch id and positions from `start`, which the parsing process did not know."""
        place = [pa.repeat(pa.scalar(batch, pa.int64()), len(self)), pa.array(np.arange(start, start + len(self)))]
        return pa.RecordBatch.from_arrays([*place, *self._data.columns[len(place) :]], schema=SCHEMA)
