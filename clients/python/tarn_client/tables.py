"""Arrow schemas of statements and entities, and the conversion of entities to Arrow."""

from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from typing import Any

import pyarrow as pa

BATCH_ROWS = 10_000
MOMENT = pa.timestamp("us", "UTC")
MOMENTS = ("first_seen", "last_seen", "last_change")

STATEMENTS = pa.schema(
    [
        ("id", pa.string()),
        ("entity_id", pa.string()),
        ("canonical_id", pa.string()),
        ("prop", pa.string()),
        ("prop_type", pa.string()),
        ("schema", pa.string()),
        ("value", pa.string()),
        ("dataset", pa.string()),
        ("origin", pa.string()),
        ("lang", pa.string()),
        ("original_value", pa.string()),
        ("external", pa.bool_()),
        ("first_seen", MOMENT),
        ("last_seen", MOMENT),
    ]
)

ENTITIES = pa.schema(
    [
        ("id", pa.string()),
        ("caption", pa.string()),
        ("schema", pa.string()),
        ("properties", pa.map_(pa.string(), pa.list_(pa.string()))),
        ("datasets", pa.list_(pa.string())),
        ("referents", pa.list_(pa.string())),
        ("origin", pa.list_(pa.string())),
        ("first_seen", MOMENT),
        ("last_seen", MOMENT),
        ("last_change", MOMENT),
    ]
)


def entity_batches(entities: Iterable[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    """Yield entities as Arrow batches: properties become a map, and timestamps are typed."""
    remaining = iter(entities)
    while batch := list(islice(remaining, BATCH_ROWS)):
        yield pa.RecordBatch.from_pylist([_row(entity) for entity in batch], ENTITIES)


def _row(entity: dict[str, Any]) -> dict[str, Any]:
    moments = {name: _moment(entity[name]) for name in MOMENTS}
    return {**entity, **moments, "properties": list(entity["properties"].items())}


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
