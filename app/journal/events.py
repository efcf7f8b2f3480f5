"""Events on their way to the journal: a buffer of columns."""

from enum import IntEnum
from typing import Any

import pyarrow as pa

from app.model.entity import Exploded
from app.model.statement import StatementRow, shard_of


class Kind(IntEnum):
    """What an event does."""

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
"""The journal's columns, in types that both databases take as they are."""

COLUMNS = [name for name in SCHEMA.names if name not in ("batch", "position")]


class Events:
    """Events in the order in which they are to happen."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        self.entities = 0
        self.statements = 0

    def __len__(self) -> int:
        return len(self._columns["kind"])

    def add_entity(self, entity: Exploded, origin: str, now: int) -> None:
        """Add all statements of an entity."""
        count = len(entity.ids)
        columns = self._columns
        first = now if entity.first_seen is None else entity.first_seen
        last = first if entity.last_seen is None else entity.last_seen
        columns["kind"] += [Kind.ADD.value] * count
        columns["shard_key"] += [shard_of(entity.entity_id)] * count
        columns["id"] += entity.ids
        columns["entity_id"] += [entity.entity_id] * count
        columns["canonical_id"] += [None] * count
        columns["schema"] += [entity.schema] * count
        columns["prop"] += entity.props
        columns["value"] += entity.values
        columns["lang"] += [None] * count
        columns["original_value"] += entity.originals
        columns["external"] += [False] * count
        columns["origin"] += [origin] * count
        columns["first_seen"] += [first] * count
        columns["last_seen"] += [last] * count
        self.entities += 1
        self.statements += count

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
        """End one statement of one origin."""
        self._append(
            kind=Kind.DELETE.value, shard_key=shard_of(entity_id), id=statement, entity_id=entity_id, origin=origin
        )

    def erase(self, entity_id: str | None, origin: str | None) -> None:
        """End everything that an origin, or every one, says so far: of an entity, or of all."""
        shard = None if entity_id is None else shard_of(entity_id)
        self._append(kind=Kind.ERASE.value, shard_key=shard, entity_id=entity_id, origin=origin)

    def rows(self, batch: int, start: int = 0) -> list[dict[str, Any]]:
        """The events as rows of the journal, for a few of them."""
        names = [*COLUMNS]
        return [
            dict(zip(names, values, strict=True)) | {"batch": batch, "position": start + number}
            for number, values in enumerate(zip(*self._columns.values(), strict=True))
        ]

    def table(self, batch: int, start: int = 0) -> pa.RecordBatch:
        """The events as Arrow, for many of them."""
        count = len(self)
        arrays = [pa.repeat(pa.scalar(batch, pa.int64()), count), pa.array(range(start, start + count), pa.int64())]
        arrays += [pa.array(self._columns[name], SCHEMA.field(name).type) for name in COLUMNS]
        return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)

    def _append(self, **values: Any) -> None:
        for name, column in self._columns.items():
            column.append(values.get(name))
