"""From columns to text, a column at a time: what a row of Python objects would make a hundred times slower."""

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
"""How many rows come from DuckDB at once, and how many bytes are gathered before they are passed on."""

TEXT = pa.large_string()
EMPTY = pa.scalar("", TEXT)
EPOCH = datetime(1970, 1, 1)
HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), dtype=np.uint16)
"""The two digits of every byte, as one number: so they are looked up at once."""
MUST_ESCAPE = np.array([byte < 0x20 or byte in b'"\\' for byte in range(256)])

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def fetch_tables(duck: duckdb.DuckDBPyConnection, query: str, parameters: Any, batch_rows: int) -> Iterator[pa.Table]:
    """A query's rows in their order, in tables of up to `batch_rows` rows, fewer where values are long.

    Streams: rows not taken yet stay in DuckDB, which spills them. The connection is busy until the last one.
    """
    reader = duck.execute(query, parameters).to_arrow_reader(min(FETCH_ROWS, batch_rows))
    held: list[pa.RecordBatch] = []
    rows = size = 0
    try:
        for batch in reader:
            held.append(batch)
            rows += batch.num_rows
            size += batch.nbytes
            if rows >= batch_rows or size >= MAX_BYTES:
                yield pa.Table.from_batches(held)
                held, rows, size = [], 0, 0
        if held:
            yield pa.Table.from_batches(held)
    except OSError as error:
        raise _duckdb_error(error) from None
    finally:
        reader.close()


def _duckdb_error(error: OSError) -> Exception:
    """DuckDB's own error. Arrow passes on its text, which begins with its kind, and no more."""
    kinds: dict[str, type[duckdb.Error]] = {
        "INTERRUPT Error": duckdb.InterruptException,
        "Out of Memory Error": duckdb.OutOfMemoryException,
        "IO Error": duckdb.IOException,
        "HTTP Error": duckdb.HTTPException,
    }
    kind = kinds.get(str(error).partition(":")[0])
    return error if kind is None else kind(str(error))


def column(table: pa.Table, name: str) -> pa.Array:
    """A column of a table in one piece; text in the form that has room for any amount of it."""
    found = table.column(name).combine_chunks()
    return found.cast(TEXT) if pa.types.is_string(found.type) else found


def codes(values: pa.Array) -> tuple[Numbers, list[Any]]:
    """Each value as its place among the distinct ones, and the distinct ones."""
    encoded = values.dictionary_encode("encode")
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist()


def changes(values: pa.Array) -> Flags:
    """Whether a value is another than the one before it; the first one is. No value may be null."""
    flags = np.ones(len(values), dtype=np.bool_)
    if len(values) > 1:
        flags[1:] = pc.not_equal(values[1:], values[:-1]).to_numpy(zero_copy_only=False)
    return flags


def concatenate(*parts: pa.Array | pa.Scalar | str) -> pa.Array:
    """The parts of every row one after the other, a text being the same in each of them."""
    arrays = [pa.scalar(part, TEXT) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*arrays, EMPTY)


def json_strings(values: pa.Array) -> pa.Array:
    """Every text as a JSON string, null where there is none; the same bytes as orjson's."""
    plain = concatenate('"', values, '"')
    awkward = _indexes_to_escape(values)
    if not len(awkward):
        return plain
    mask = np.zeros(len(values), dtype=np.bool_)
    mask[awkward] = True
    escaped = [orjson.dumps(value).decode() for value in values.take(pa.array(awkward)).to_pylist()]
    return pc.replace_with_mask(plain, pa.array(mask), pa.array(escaped, TEXT))


def text_bytes(texts: pa.Array) -> pa.Buffer:
    """Texts end to end, without a copy. None may be null."""
    offsets = _offsets(texts)
    return (texts.buffers()[2] or pa.py_buffer(b"")).slice(int(offsets[0]), int(offsets[-1] - offsets[0]))


def hexadecimal(ids: pa.Array) -> pa.Array:
    """Statement ids, twenty bytes each, as text."""
    data = np.frombuffer(ids.buffers()[1 if pa.types.is_fixed_size_binary(ids.type) else 2] or b"", dtype=np.uint8)
    first = ids.offset * 20 if pa.types.is_fixed_size_binary(ids.type) else _offsets(ids)[0]
    digits = HEX[data[first : first + 20 * len(ids)]]
    offsets = np.arange(len(ids) + 1, dtype=np.int64) * 40
    return pa.LargeStringArray.from_buffers(len(ids), pa.py_buffer(offsets), pa.py_buffer(digits))


def moments(values: Numbers) -> pa.Array:
    """Microseconds since 1970 as ISO 8601 in UTC, all of one width; the few distinct ones are written out once."""
    encoded = pa.array(values).dictionary_encode()
    distinct = encoded.dictionary.to_numpy().astype("datetime64[us]")
    return pa.array(np.datetime_as_string(distinct, timezone="UTC"), TEXT).take(encoded.indices)


def moment(value: int) -> str:
    """One such moment."""
    return f"{(EPOCH + timedelta(microseconds=value)).isoformat(timespec='microseconds')}Z"


def _offsets(values: pa.Array) -> Numbers:
    kind = np.int64 if pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type) else np.int32
    buffer = values.buffers()[1]
    if buffer is None:
        return np.zeros(1, dtype=np.int64)
    return np.frombuffer(buffer, dtype=kind)[values.offset : values.offset + len(values) + 1].astype(np.int64)


def _indexes_to_escape(values: pa.Array) -> Numbers:
    """The places of texts that JSON writes otherwise than they are: with quotes, backslashes or control characters."""
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    offsets = _offsets(values)
    buffer = values.buffers()[2]
    data = np.frombuffer(buffer or b"", dtype=np.uint8)[offsets[0] : offsets[-1]]
    found = np.flatnonzero(MUST_ESCAPE[data])
    return np.unique(np.searchsorted(offsets, found + offsets[0], side="right") - 1)
