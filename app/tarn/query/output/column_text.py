"""Vectorised conversion of Arrow columns to text and JSON; row by row in Python it would be a hundred times slower."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

FETCH_ROWS = 2_048
MAX_BYTES = 16 * 1024**2
"""Rows fetched from DuckDB at once, and bytes collected before a table is yielded."""

TEXT = pa.large_string()
EMPTY = pa.scalar("", TEXT)
EPOCH = datetime(1970, 1, 1)
HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), dtype=np.uint16)
"""The two hexadecimal digits of every byte as one 16-bit number, so that one lookup gets both."""
MUST_ESCAPE = np.array([byte < 0x20 or byte in b'"\\' for byte in range(256)])

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def fetch_tables(duck: duckdb.DuckDBPyConnection, query: str, parameters: Any, batch_rows: int) -> Iterator[pa.Table]:
    """Yield a query's rows in order, in tables of up to `batch_rows` rows, fewer where values are long.

    Streams: rows not consumed yet stay in DuckDB, which spills them. The connection is busy until the last table.
    """
    reader = duck.execute(query, parameters).to_arrow_reader(min(FETCH_ROWS, batch_rows))
    batches: list[pa.RecordBatch] = []
    rows = size = 0
    try:
        for batch in reader:
            batches.append(batch)
            rows += batch.num_rows
            size += batch.nbytes
            if rows >= batch_rows or size >= MAX_BYTES:
                yield pa.Table.from_batches(batches)
                batches, rows, size = [], 0, 0
        if batches:
            yield pa.Table.from_batches(batches)
    except OSError as error:
        raise _duckdb_error(error) from None
    finally:
        reader.close()


def _duckdb_error(error: OSError) -> Exception:
    """Convert an Arrow error back into DuckDB's: Arrow keeps only the text, which begins with the kind of error."""
    kinds: dict[str, type[duckdb.Error]] = {
        "INTERRUPT Error": duckdb.InterruptException,
        "Out of Memory Error": duckdb.OutOfMemoryException,
        "IO Error": duckdb.IOException,
        "HTTP Error": duckdb.HTTPException,
    }
    kind = kinds.get(str(error).partition(":")[0])
    return error if kind is None else kind(str(error))


def column(table: pa.Table, name: str) -> pa.Array:
    """Return a column of a table as one array; strings as `large_string`, whose size is not limited."""
    array = table.column(name).combine_chunks()
    return array.cast(TEXT) if pa.types.is_string(array.type) else array


def codes(values: pa.Array) -> tuple[Numbers, list[Any]]:
    """Dictionary-encode values: return the index of each, and the distinct values."""
    encoded = values.dictionary_encode("encode")
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist()


def changes(values: pa.Array) -> Flags:
    """Return flags that are True where a value differs from the previous one, and for the first. No nulls allowed."""
    flags = np.ones(len(values), dtype=np.bool_)
    if len(values) > 1:
        flags[1:] = pc.not_equal(values[1:], values[:-1]).to_numpy(zero_copy_only=False)
    return flags


def concatenate(*parts: pa.Array | pa.Scalar | str) -> pa.Array:
    """Concatenate the parts row by row; a plain string is the same in every row."""
    arrays = [pa.scalar(part, TEXT) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*arrays, EMPTY)


def json_strings(values: pa.Array) -> pa.Array:
    """Return every text as a JSON string, the same bytes as orjson's; nulls stay null."""
    plain = concatenate('"', values, '"')
    indexes = _indexes_to_escape(values)
    if not len(indexes):
        return plain
    mask = np.zeros(len(values), dtype=np.bool_)
    mask[indexes] = True
    escaped = [orjson.dumps(value).decode() for value in values.take(pa.array(indexes)).to_pylist()]
    return pc.replace_with_mask(plain, pa.array(mask), pa.array(escaped, TEXT))


def text_bytes(texts: pa.Array) -> pa.Buffer:
    """Return the concatenated bytes of texts, without a copy. No nulls allowed."""
    offsets = _offsets(texts)
    return (texts.buffers()[2] or pa.py_buffer(b"")).slice(int(offsets[0]), int(offsets[-1] - offsets[0]))


def hexadecimal(ids: pa.Array) -> pa.Array:
    """Return statement ids, twenty bytes each, as hexadecimal text."""
    data = np.frombuffer(ids.buffers()[1 if pa.types.is_fixed_size_binary(ids.type) else 2] or b"", dtype=np.uint8)
    first = ids.offset * 20 if pa.types.is_fixed_size_binary(ids.type) else _offsets(ids)[0]
    digits = HEX[data[first : first + 20 * len(ids)]]
    offsets = np.arange(len(ids) + 1, dtype=np.int64) * 40
    return pa.LargeStringArray.from_buffers(len(ids), pa.py_buffer(offsets), pa.py_buffer(digits))


def moments(values: Numbers) -> pa.Array:
    """Return microseconds since 1970 as ISO 8601 in UTC, all of one width. Each distinct value is formatted once."""
    encoded = pa.array(values).dictionary_encode()
    distinct = encoded.dictionary.to_numpy().astype("datetime64[us]")
    return pa.array(np.datetime_as_string(distinct, timezone="UTC"), TEXT).take(encoded.indices)


def moment(value: int) -> str:
    """Return one timestamp in microseconds since 1970 in the same format."""
    return f"{(EPOCH + timedelta(microseconds=value)).isoformat(timespec='microseconds')}Z"


def _offsets(values: pa.Array) -> Numbers:
    kind = np.int64 if pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type) else np.int32
    buffer = values.buffers()[1]
    if buffer is None:
        return np.zeros(1, dtype=np.int64)
    return np.frombuffer(buffer, dtype=kind)[values.offset : values.offset + len(values) + 1].astype(np.int64)


def _indexes_to_escape(values: pa.Array) -> Numbers:
    """Return the indexes of texts that JSON must escape: with quotes, backslashes or control characters."""
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    offsets = _offsets(values)
    buffer = values.buffers()[2]
    data = np.frombuffer(buffer or b"", dtype=np.uint8)[offsets[0] : offsets[-1]]
    positions = np.flatnonzero(MUST_ESCAPE[data])
    return np.unique(np.searchsorted(offsets, positions + offsets[0], side="right") - 1)
