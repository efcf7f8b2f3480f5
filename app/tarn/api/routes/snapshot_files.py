"""A snapshot's files as rows: what the manifest says of each, with the statistics side by side."""

import orjson
import pyarrow as pa

from tarn.api.http.streaming.row_formats import ResultRows, Row
from tarn.model.snapshot import File, Scalar, Snapshot, Table, TableName

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
    """A row a file.

    Each column of a file with statistics gives up to four: `{column}_min`, `_max`, `_nulls` and `_truncated`. What no
    file reports is no column; what one file does not report is missing from its row.
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
    found = {} if file.checksum is None else {"checksum": file.checksum}
    for name, column in file.columns.items():
        found |= {f"{name}_{what}": value for what, value in column.model_dump(exclude_none=True).items()}
    return found


def _unify(rows: list[Row], name: str) -> pa.DataType:
    """The one type of a column's values. Where they have none in common, they are made JSON, in their rows too."""
    values: list[Scalar] = [row[name] for row in rows if name in row]
    try:
        return pa.array(values).type
    except (TypeError, ValueError, OverflowError):
        for row in rows:
            if name in row:
                row[name] = orjson.dumps(row[name]).decode()
        return pa.string()
