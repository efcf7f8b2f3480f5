"""Sorting rows whose values are too long to be sorted with them.

DuckDB's sort spills, but it holds two thousand whole rows of every run in memory while it merges: with texts of some
kilobytes that is more than there is. Here the texts wait in a file, and the sort moves their places.
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

from tarn.query.column_text import MAX_BYTES, TEXT, Numbers, column, fetch_tables, text_bytes

LONGEST_SORTED = 64
"""Bytes of a value that are sorted with its row; a longer one is set aside."""


def sort_spilled(
    duck: duckdb.DuckDBPyConnection, tables: Iterable[pa.Table], order: str, batch_rows: int
) -> Iterator[pa.Table]:
    """Tables that have a column `value`, sorted by other columns, in tables of bounded size."""
    folder = Path(duck.execute("SELECT current_setting('temp_directory')").fetchall()[0][0])
    # DuckDB makes it when it first spills.
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="aside-", dir=folder) as scratch:
        rows, texts = Path(scratch, "rows.parquet"), Path(scratch, "values")
        _write_spilled(tables, rows, texts)
        if not rows.exists():
            return
        query = f"SELECT * FROM read_parquet(?) ORDER BY {order}"  # noqa: S608 (columns of ours)
        with texts.open("rb") as file:
            for table in fetch_tables(duck, query, [str(rows)], batch_rows):
                yield from _restore_values(table, file.fileno())


def _write_spilled(tables: Iterable[pa.Table], rows: Path, texts: Path) -> None:
    """Write rows to one file and their long values, end to end, to another."""
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
    place = table.schema.get_field_index("value")
    return table.set_column(place, "value", short).append_column("start", [starts]).append_column("length", [lengths])


def _restore_values(table: pa.Table, texts: int) -> Iterator[pa.Table]:
    """The rows with their values, in as many tables as keep each of them within bounds."""
    starts, lengths = (column(table, name).to_numpy() for name in ("start", "length"))
    share = np.cumsum(lengths) // MAX_BYTES
    cuts = [0, *(np.flatnonzero(share[1:] != share[:-1]) + 1).tolist(), table.num_rows]
    slim = table.drop_columns(["start", "length"])
    for first, last in pairwise(cuts):
        yield _with_values(slim.slice(first, last - first), starts[first:last], lengths[first:last], texts)


def _with_values(table: pa.Table, starts: Numbers, lengths: Numbers, texts: int) -> pa.Table:
    long = starts >= 0
    found = [
        _read(texts, length, start) for start, length in zip(starts[long].tolist(), lengths[long].tolist(), strict=True)
    ]
    values = pc.replace_with_mask(
        column(table, "value").cast(pa.large_binary()), pa.array(long), pa.array(found, pa.large_binary())
    )
    return table.set_column(table.schema.get_field_index("value"), "value", values.cast(TEXT))


def _read(texts: int, length: int, start: int) -> bytes:
    found = os.pread(texts, length, start)
    if len(found) != length:
        raise duckdb.IOException("IO Error: a value that was set aside is not all there")
    return found
