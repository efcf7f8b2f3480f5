"""Columnar bodies of a few kilobytes that decompress to very much data."""

from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

JANE = {"entity_id": "jane", "prop": "name", "schema": "Person", "value": "Jane"}


def constant_parquet(rows: int, **values: str) -> bytes:
    """Return rows that are all equal: a few bytes for any number of them."""
    table = pa.table({name: pa.repeat(value, rows) for name, value in (JANE | values).items()})
    return as_parquet(table, use_dictionary=True, data_page_size=1 << 30)


def numbered_parquet(rows: int) -> bytes:
    """Return distinct, valid statements in as few bytes as a usual writer needs."""
    columns = {name: pa.repeat(value, rows) for name, value in JANE.items()}
    columns["entity_id"] = pa.array([f"{number:06}" for number in range(rows)])
    encodings = {"entity_id": "DELTA_BYTE_ARRAY"}
    return as_parquet(
        pa.table(columns),
        use_dictionary=["prop", "schema", "value"],
        column_encoding=encodings,
        data_page_size=1 << 30,
        compression_level=22,
    )


def long_parquet(length: int, columns: int) -> bytes:
    """Return one row whose long values compress to almost nothing."""
    optional = ["value", "original_value", "lang", "dataset", "origin"][:columns]
    row: dict[str, Any] = JANE | dict.fromkeys(optional, "x" * length)
    return as_parquet(pa.Table.from_pylist([row]), use_dictionary=False)


def prefixed_parquet(length: int, rows: int) -> bytes:
    """Return values with the same long prefix, which is written once."""
    columns = {name: pa.repeat(value, rows) for name, value in JANE.items()}
    columns["value"] = pa.array(["x" * length] * rows)
    return as_parquet(pa.table(columns), use_dictionary=False, column_encoding={"value": "DELTA_BYTE_ARRAY"})


def repeated_parquet(length: int, rows: int) -> bytes:
    """Return a long value that is in the dictionary once."""
    table = pa.table({name: pa.repeat(value, rows) for name, value in (JANE | {"value": "x" * length}).items()})
    return as_parquet(table, dictionary_pagesize_limit=1 << 30)


def as_parquet(table: pa.Table, **options: Any) -> bytes:
    file = BytesIO()
    level = {"compression_level": 19} | options
    parquet.write_table(table, file, compression="zstd", write_statistics=False, row_group_size=1 << 26, **level)
    return file.getvalue()


def long_arrow(length: int, rows: int) -> bytes:
    """Return a batch whose buffers compress to almost nothing."""
    columns = {name: pa.repeat(value, rows) for name, value in JANE.items()}
    columns["value"] = pa.array(["x" * length] * rows, pa.large_string())
    return as_arrow(pa.table(columns))


def as_arrow(table: pa.Table, **options: Any) -> bytes:
    file = BytesIO()
    with pa.ipc.new_stream(file, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_table(table, **options)
    return file.getvalue()
