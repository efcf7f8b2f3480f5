"""External sort of rows with long values: the values are spilled to a file, and only their offsets are sorted.

DuckDB's sort spills, but it holds two thousand complete rows of every run in memory while it merges: with texts of some
kilobytes that exceeds the memory limit.
"""

import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tarn.query.output.column_text import MAX_BYTES, TEXT, Numbers, column, fetch_tables, text_bytes
from tarn.storage.duckdb_sql import scan_parquet

LONGEST_SORTED = 64
"""Values up to this many bytes are sorted with their rows; longer ones are spilled."""


def sort_spilled(
    duck: duckdb.DuckDBPyConnection, tables: Iterable[pa.Table], order: str, batch_rows: int
) -> Iterator[pa.Table]:
    """Sort the rows of tables that have a column `value` by other columns. Yield tables of bounded size."""
    folder = Path(duck.execute("SELECT current_setting('temp_directory')").fetchall()[0][0])
    # DuckDB creates this folder only when it first spills.
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="spilled-", dir=folder) as scratch:
        rows, texts = Path(scratch, "rows.parquet"), Path(scratch, "values")
        _write_spilled(tables, rows, texts)
        if not rows.exists():
            return
        query = f"SELECT * FROM {scan_parquet([str(rows)])} ORDER BY {order}"  # noqa: S608 (constant column names)
        with texts.open("rb") as file:
            for table in fetch_tables(duck, query, [], batch_rows):
                yield from _restore_values(table, file.fileno())


def _write_spilled(tables: Iterable[pa.Table], rows: Path, texts: Path) -> None:
    """Write rows to one file, and their concatenated long values to another."""
    writer: pq.ParquetWriter | None = None
    with texts.open("wb") as file:
        try:
            for table in tables:
                short = _spill_long_values(table, file)
                writer = writer or pq.ParquetWriter(rows, short.schema, compression="lz4", use_dictionary=False)
                writer.write_table(short)
        finally:
            if writer is not None:
                writer.close()


def _spill_long_values(table: pa.Table, file: BinaryIO) -> pa.Table:
    values = column(table, "value")
    lengths = pc.binary_length(values).to_numpy(zero_copy_only=False).astype(np.int64)
    long = lengths > LONGEST_SORTED
    ends = np.cumsum(np.where(long, lengths, 0))
    starts = np.where(long, file.tell() + ends - lengths, -1)
    file.write(text_bytes(values.filter(pa.array(long))))
    short = pc.if_else(pa.array(long), pa.scalar("", TEXT), values)
    position = table.schema.get_field_index("value")
    return (
        table.set_column(position, "value", short).append_column("start", [starts]).append_column("length", [lengths])
    )


def _restore_values(table: pa.Table, texts: int) -> Iterator[pa.Table]:
    """Yield the rows with their values, in tables of at most about MAX_BYTES each."""
    starts, lengths = (column(table, name).to_numpy() for name in ("start", "length"))
    group = np.cumsum(lengths) // MAX_BYTES
    cuts = [0, *(np.flatnonzero(group[1:] != group[:-1]) + 1).tolist(), table.num_rows]
    slim = table.drop_columns(["start", "length"])
    for first, last in pairwise(cuts):
        yield _with_values(slim.slice(first, last - first), starts[first:last], lengths[first:last], texts)


def _with_values(table: pa.Table, starts: Numbers, lengths: Numbers, texts: int) -> pa.Table:
    long = starts >= 0
    contents_read = [
        _read(texts, length, start) for start, length in zip(starts[long].tolist(), lengths[long].tolist(), strict=True)
    ]
    values = pc.replace_with_mask(
        column(table, "value").cast(pa.large_binary()), pa.array(long), pa.array(contents_read, pa.large_binary())
    )
    return table.set_column(table.schema.get_field_index("value"), "value", values.cast(TEXT))


def _read(texts: int, length: int, start: int) -> bytes:
    data = os.pread(texts, length, start)
    if len(data) != length:
        raise duckdb.IOException(f"IO Error: read {len(data)} of {length} bytes of a value spilled to disk")
    return data
