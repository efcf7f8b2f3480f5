"""The columns of the two Delta tables, and how they are divided and pruned. Light to import: executors do."""

import pyarrow as pa

from tarn.model.snapshot import TableName

MOMENT = pa.timestamp("us", "UTC")

STATEMENTS = pa.schema(
    [
        ("bucket", pa.string()),
        ("canonical_id", pa.string()),
        ("id", pa.binary()),
        ("entity_id", pa.string()),
        ("schema", pa.string()),
        ("prop", pa.string()),
        ("value", pa.string()),
        ("lang", pa.string()),
        ("original_value", pa.string()),
        ("external", pa.bool_()),
        ("first_seen", MOMENT),
        ("last_seen", MOMENT),
        ("ord", pa.int64()),
        ("origin", pa.string()),
    ]
)
"""A row a statement; `id` is FtM's SHA-1 as its twenty bytes, `ord` its place in the dataset's history."""

TRANSLOG = pa.schema(
    [
        ("bucket", pa.string()),
        ("canonical_id", pa.string()),
        ("id", pa.binary()),
        ("entity_id", pa.string()),
        ("origin", pa.string()),
        ("first_seen", MOMENT),
        ("last_seen", MOMENT),
        ("deleted_at", MOMENT),
        ("ord", pa.int64()),
        ("kind", pa.string()),
    ]
)
"""A row for what happened to a statement: `insert`, `seen` again, `delete`."""

SCHEMAS: dict[TableName, pa.Schema] = {"statements": STATEMENTS, "translog": TRANSLOG}
PARTITIONED: dict[TableName, str] = {"statements": "origin", "translog": "kind"}

PRUNING = ("bucket", "canonical_id", "entity_id", "first_seen", "last_seen", "ord")
"""Columns whose bounds are kept for every file."""
