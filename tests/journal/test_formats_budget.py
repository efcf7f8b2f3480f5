"""Columnar bodies that declare too large contents are refused before they are decompressed."""

import struct
from io import BytesIO
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from tarn.errors import BodyTooLarge, InvalidFormat
from tarn.journal.formats import arrow, budget, statement_rows

from tests.journal import decompression_bombs
from tests.journal.test_formats import LONGEST, rows
from tests.journal.test_formats_arrow import BOTH, PARQUET, STREAM

MIB = 1 << 20


def read(body: bytes, media_type: str, longest: int = 16 * MIB) -> int:
    return sum(1 for _ in statement_rows(BytesIO(body), media_type, longest))


def refused(body: bytes, media_type: str) -> BodyTooLarge:
    """Return the error of a body that is refused without decompressing it."""
    pool, watched = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(watched)
    try:
        with pytest.raises(BodyTooLarge) as error:
            read(body, media_type)
    finally:
        pa.set_memory_pool(pool)
    assert watched.max_memory() < 16 * MIB
    return error.value


def test_distinct_statements_in_very_few_bytes_are_read():
    body = decompression_bombs.numbered_parquet(120_000)
    assert len(body) < 19_025
    assert read(body, PARQUET) == 120_000


def test_more_rows_than_the_bytes_of_a_file_allow_are_refused():
    body = decompression_bombs.constant_parquet(1_000_000, entity_id="")
    assert len(body) < 10_000
    with pytest.raises(InvalidFormat, match=f"1000000 rows in {len(body)} bytes; a body of this size may have"):
        read(body, PARQUET)


def test_more_rows_than_the_bytes_of_a_stream_allow_are_refused():
    table = pa.table(
        {name: pa.repeat(value, 1_000_000).dictionary_encode() for name, value in decompression_bombs.JANE.items()}
    )
    body = decompression_bombs.as_arrow(table, max_chunksize=200_000)
    assert len(body) < 10_000
    with pytest.raises(InvalidFormat, match="rows in"):
        read(body, STREAM)


def test_page_that_declares_too_much_is_refused_with_its_size_and_the_limit():
    body = decompression_bombs.long_parquet(200 * MIB, 1)
    error = refused(body, PARQUET)
    limit = budget.LITTLE_UNPACKED + budget.UNPACKED_PER_BYTE * len(body)
    assert error.members == {"limit": limit}
    assert f"at {len(body)} bytes it may become {limit}" in error.detail


def test_buffers_that_declare_too_much_are_refused_with_their_size_and_the_limit():
    body = decompression_bombs.long_arrow(MIB, 300)
    error = refused(body, STREAM)
    assert error.members["limit"] < 100 * MIB
    assert "unpacks to 3145" in error.detail


def test_size_of_a_row_group_is_bounded_independent_of_the_file_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(budget, "MOST_IN_MEMORY", 4 * MIB)
    with pytest.raises(BodyTooLarge, match=f"at most {4 * MIB} are unpacked at once"):
        read(decompression_bombs.long_parquet(MIB, 5), PARQUET)
    assert read(decompression_bombs.long_parquet(MIB, 3), PARQUET) == 1


def test_dictionaries_of_a_stream_are_counted_with_the_batch_they_are_for(monkeypatch: pytest.MonkeyPatch):
    values = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(["x" * MIB, "y" * MIB]))
    table = pa.table(
        {name: pa.repeat(value, 2) for name, value in decompression_bombs.JANE.items()} | {"value": values}
    )
    body = decompression_bombs.as_arrow(table)
    assert read(body, STREAM) == 2
    monkeypatch.setattr(budget, "MOST_IN_MEMORY", 2 * MIB)
    with pytest.raises(BodyTooLarge, match="a dictionary unpacks to 2097"):
        read(body, STREAM)


@pytest.mark.parametrize("kind", ["dictionary", "prefixes"])
def test_value_of_many_rows_counts_once_per_row(kind: str):
    make = {"dictionary": decompression_bombs.repeated_parquet, "prefixes": decompression_bombs.prefixed_parquet}[kind]
    body = make(MIB, 2_000)
    assert len(body) < 10_000
    with pytest.raises(BodyTooLarge, match="holds text of"):
        read(body, PARQUET)


def test_rows_with_large_pages_are_read_in_small_batches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrow, "LARGEST_BATCH", 10_000)
    columns = {name: pa.repeat(value, 100) for name, value in decompression_bombs.JANE.items()}
    columns["value"] = pa.array([f"{number}" * 1000 for number in range(100)])
    file = BytesIO(
        decompression_bombs.as_parquet(pa.table(columns), use_dictionary=False, data_page_size=1, write_batch_size=1)
    )
    opened = parquet.ParquetFile(file)
    (group,) = arrow.check_pages(file, opened.metadata, budget.Budget(len(file.getvalue())), opened.schema_arrow.names)
    assert group.rows == 4
    assert read(file.getvalue(), PARQUET) == 100


def test_usual_pages_are_read_in_large_batches():
    columns = {name: pa.repeat(value, 100_000) for name, value in decompression_bombs.JANE.items()}
    columns["value"] = pa.array([f"{number}" * 10 for number in range(100_000)])
    for options in ({}, {"data_page_size": 100 * MIB}, {"data_page_version": "2.0"}, {"use_dictionary": False}):
        file = BytesIO(decompression_bombs.as_parquet(pa.table(columns), **options))
        opened = parquet.ParquetFile(file)
        (group,) = arrow.check_pages(
            file, opened.metadata, budget.Budget(len(file.getvalue())), opened.schema_arrow.names
        )
        assert group.rows == 8192, options


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", None])
@pytest.mark.parametrize("compression", ["NONE", "snappy", "zstd", "gzip", "brotli", "lz4"])
def test_files_of_every_encoding_and_compression_are_read(version: str, encoding: str | None, compression: str):
    columns = {name: pa.repeat(value, 1_000) for name, value in decompression_bombs.JANE.items()}
    columns["value"] = pa.array([None if number % 7 == 0 else f"v{number}" for number in range(1_000)])
    file = BytesIO()
    parquet.write_table(
        pa.table(columns),
        file,
        compression=compression,
        data_page_version=version,
        data_page_size=100,
        write_batch_size=10,
        row_group_size=300,
        use_dictionary=encoding is None,
        column_encoding=None if encoding is None else dict.fromkeys(columns, encoding),
    )
    items = rows(file.getvalue(), PARQUET)
    assert [row["value"] for _, row in items] == columns["value"].to_pylist()


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_streams_of_either_framing_and_every_compression_are_read(legacy: bool, compression: str | None):
    columns = {name: pa.repeat(value, 1_000) for name, value in decompression_bombs.JANE.items()}
    columns["lang"] = pa.array(["eng", None] * 500).dictionary_encode()
    file = BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression, use_legacy_format=legacy, emit_dictionary_deltas=True)
    table = pa.table(columns)
    with pa.ipc.new_stream(file, table.schema, options=options) as stream:
        stream.write_table(table, 300)
    assert read(file.getvalue(), STREAM) == 1_000


def test_pages_with_another_number_of_values_than_declared_are_refused():
    columns = {name: pa.repeat(value, 40) for name, value in decompression_bombs.JANE.items()}
    file = BytesIO()
    parquet.write_table(pa.table(columns), file, compression="NONE", use_dictionary=False, write_statistics=False)
    body = file.getvalue()
    # A data page of 40 values, plain, with levels in run lengths: the number is 80, as Thrift zigzags it.
    header = b"\x2c\x15\x50\x15\x00\x15\x06\x15\x06"
    assert body.count(header) == 4
    lying = body.replace(header, header.replace(b"\x50", b"\x4e"), 1)
    with pytest.raises(InvalidFormat, match=r"the header of a page|have .* values in a group of 40 rows|lies outside"):
        read(lying, PARQUET)


def test_buffer_with_a_false_decompressed_size_is_refused():
    body = decompression_bombs.long_arrow(MIB, 10)
    length = struct.pack("<q", 10 * MIB)
    assert body.count(length) >= 1
    for size in (-2, 1 << 40, 1 << 62):
        with pytest.raises((BodyTooLarge, InvalidFormat)):
            read(body.replace(length + b"\x28\xb5\x2f\xfd", struct.pack("<q", size) + b"\x28\xb5\x2f\xfd"), STREAM)


@BOTH
def test_body_with_another_number_of_rows_than_declared_is_refused(media_type: str):
    table = pa.table({name: pa.repeat(value, 10_000) for name, value in decompression_bombs.JANE.items()})
    body = (
        decompression_bombs.as_parquet(table)
        if media_type == PARQUET
        else decompression_bombs.as_arrow(table, max_chunksize=3_000)
    )
    items = statement_rows(BytesIO(body), media_type, LONGEST)
    assert sum(1 for _ in islice(items, 10_000)) == 10_000
    with pytest.raises(StopIteration) as end:
        next(items)
    assert end.value.value == 10_000
