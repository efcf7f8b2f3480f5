"""The files in a snapshot's manifest as rows, with one column per statistic."""

import orjson
import pyarrow as pa

from tarn.api.http.streaming.row_formats import ResultRows, Row
from tarn.model.datasets.snapshot import File, Scalar, Snapshot, Table, TableName

FIXED = pa.schema(
    [
        pa.field("table", pa.string(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("partition", pa.map_(pa.string(), pa.string()), nullable=False),
        pa.field("added", pa.bool_(), nullable=False),
    ]
)


def file_rows(snapshot: Snapshot) -> ResultRows:
    """Return one row per file.

    Each column of a file with statistics yields up to four: `{column}_min`, `_max`, `_nulls` and `_truncated`. A
    statistic that no file has is no column; one that a file lacks is missing from its row.
    """
    rows = [row for name in ("statements", "translog") for row in _of_table(name, snapshot.table(name))]
    reported = list(dict.fromkeys(name for row in rows for name in row if name not in FIXED.names))
    types = {name: _unify(rows, name) for name in reported}
    return ResultRows(rows, pa.schema([*FIXED, *(pa.field(name, kind) for name, kind in types.items())]))


def _of_table(name: TableName, table: Table) -> list[Row]:
    added = frozenset(table.added)
    return [
        {
            "table": name,
            "path": file.path,
            "size": file.size,
            "rows": file.rows,
            "partition": file.partition,
            "added": file.path in added,
            **_reported(file),
        }
        for file in table.files
    ]


def _reported(file: File) -> Row:
    row = {} if file.checksum is None else {"checksum": file.checksum}
    for name, column in file.columns.items():
        row |= {f"{name}_{what}": value for what, value in column.model_dump(exclude_none=True).items()}
    return row


def _unify(rows: list[Row], name: str) -> pa.DataType:
    """Return the common type of a column's values. If there is none, convert the values in the rows to JSON strings."""
    values: list[Scalar] = [row[name] for row in rows if name in row]
    try:
        return pa.array(values).type
    except (TypeError, ValueError, OverflowError):
        for row in rows:
            if name in row:
                row[name] = orjson.dumps(row[name]).decode()
        return pa.string()
