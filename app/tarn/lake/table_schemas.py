"""Schemas of the two Delta tables: columns, partitioning and pruning columns. Light to import, for executors."""

import pyarrow as pa

from tarn.model.datasets.snapshot import TableName

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
"""One row per statement; `id` is FtM's SHA-1 as its twenty bytes, `ord` its position in the dataset's history."""

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
"""One row per event of a statement: `insert`, `seen` (added again) or `delete`."""

SCHEMAS: dict[TableName, pa.Schema] = {"statements": STATEMENTS, "translog": TRANSLOG}
PARTITIONED: dict[TableName, str] = {"statements": "origin", "translog": "kind"}

PRUNING = ("bucket", "canonical_id", "entity_id", "first_seen", "last_seen", "ord")
"""Columns whose minimum and maximum are stored for every file."""
