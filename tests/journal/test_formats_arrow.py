"""Parquet and Arrow streams: as pyarrow and others write them, and malformed ones."""

import os
import tempfile
from contextlib import suppress
from datetime import UTC, date, datetime
from io import BytesIO
from tempfile import TemporaryFile
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from followthemoney.statement import Statement
from hypothesis import given
from hypothesis import strategies as st
from tarn.errors import BodyTooLarge, FieldError, InvalidFormat
from tarn.journal.formats import IgnoredColumns, arrow, batch, statement_rows
from tarn.journal.formats.budget import Budget

from tests.journal.test_formats import (
    LONGEST,
    NO_DEADLINE,
    STATEMENTS,
    ChunkedBody,
    Outcome,
    as_statements,
    cut,
    parse_all,
    rows,
)

PARQUET, STREAM = "application/vnd.apache.parquet", "application/vnd.apache.arrow.stream"
BOTH = pytest.mark.parametrize("media_type", [PARQUET, STREAM])
TEXT = pa.schema([(name, pa.string()) for name in ("entity_id", "prop", "schema", "value")])
JANE: dict[str, Any] = {"entity_id": "jane", "prop": "name", "schema": "Person", "value": "Jane"}
NASTY = ['say "hi"', "two\nlines", "two\r\nlines", "a\rb", "a,b", "😀", "\\", "x\x00y", ""]


def written(table: pa.Table, media_type: str, **options: Any) -> bytes:
    body = BytesIO()
    if media_type == PARQUET:
        parquet.write_table(table, body, **options)
    else:
        with pa.ipc.new_stream(body, table.schema) as stream:
            stream.write_table(table, **options)
    return body.getvalue()


def read(table: pa.Table, media_type: str, longest: int = LONGEST) -> list[Outcome]:
    return rows(written(table, media_type), media_type, longest)


def table_of(**columns: pa.Array) -> pa.Table:
    """Return statements about Jane with these columns."""
    (length,) = {len(column) for column in columns.values()}
    return pa.table({name: pa.repeat(value, length) for name, value in JANE.items()} | columns)


def stops_at(body: bytes, media_type: str) -> FieldError:
    with pytest.raises(InvalidFormat) as stopped:
        list(statement_rows(BytesIO(body), media_type, LONGEST))
    (fault,) = stopped.value.members["errors"]
    return fault


@BOTH
@NO_DEADLINE
@given(statements=STATEMENTS)
def test_statements_written_by_pyarrow_are_read_unchanged(media_type: str, statements: list[Statement]):
    optional = ["canonical_id", "dataset", "lang", "original_value", "origin", "id", "first_seen", "last_seen"]
    schema = pa.schema([*TEXT, *(pa.field(name, pa.string()) for name in optional), pa.field("external", pa.bool_())])
    table = pa.Table.from_pylist([dict(statement.to_dict()) for statement in statements], schema)
    assert as_statements(read(table, media_type)) == [dict(statement.to_csv_row()) for statement in statements]


@BOTH
@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int8(), pa.string()),
        pa.dictionary(pa.int32(), pa.large_string()),
    ],
)
def test_text_is_read_from_every_text_type(media_type: str, kind: pa.DataType):
    values = pa.array(NASTY).cast(kind) if not pa.types.is_dictionary(kind) else pa.array(NASTY).dictionary_encode()
    items = read(table_of(value=values, lang=pa.nulls(len(NASTY), pa.string())), media_type)
    assert items == [
        (number, JANE | {"value": value, "lang": None, "external": False}) for number, value in enumerate(NASTY, 1)
    ]


@BOTH
def test_times_are_datetimes_to_the_microsecond(media_type: str):
    moment = datetime(2024, 1, 2, 3, 4, 5, 678901)
    columns = {
        "first_seen": pa.array([1_704_164_645_678_901_234, None], pa.timestamp("ns")),
        "last_seen": pa.array([moment.replace(tzinfo=UTC), None], pa.timestamp("us", "America/New_York")),
    }
    (_, first), (_, second) = read(table_of(**columns), media_type)
    assert (type(first["first_seen"]), first["first_seen"]) == (datetime, moment)
    assert first["last_seen"] == moment.replace(tzinfo=UTC)
    assert (second["first_seen"], second["last_seen"]) == (None, None)


@BOTH
def test_date_is_read_as_its_midnight(media_type: str):
    ((_, row),) = read(table_of(first_seen=pa.array([date(2024, 1, 2)])), media_type)
    assert row["first_seen"] == datetime(2024, 1, 2)


@BOTH
def test_time_out_of_range_stops_the_stream_at_its_row(media_type: str):
    table = table_of(first_seen=pa.array([2**60], pa.timestamp("us")))
    assert stops_at(written(table, media_type), media_type) == FieldError(line=1, reason="date value out of range")


@BOTH
def test_external_is_a_boolean_or_its_text(media_type: str):
    flags = read(table_of(external=pa.array([True, False, None])), media_type)
    assert [row["external"] for _, row in flags] == [True, False, False]
    first, second, third = read(table_of(external=pa.array(["t", "maybe", None])), media_type)
    assert (first[1]["external"], third[1]["external"]) == (True, False)
    assert second == ("bad", 2, "neither true nor false", "external")


@BOTH
@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (pa.table({"entity_id": ["jane"], "value": ["Jane"]}), "the header lacks columns: prop, schema"),
        (table_of(value=pa.array([5])), "the column value has the unsupported type int64"),
        (table_of(value=pa.nulls(1)), "the column value has the unsupported type null"),
        (table_of(lang=pa.array([["eng"]])), "the column lang has the unsupported type list<"),
        (table_of(lang=pa.array([True])), "the column lang has the unsupported type bool"),
        (table_of(external=pa.array([1])), "the column external has the unsupported type int64"),
        (table_of(value=pa.array([b"Jane"])), "the column value has the unsupported type binary"),
    ],
)
def test_columns_that_make_no_statement_are_refused_and_named(media_type: str, table: pa.Table, reason: str):
    assert stops_at(written(table, media_type), media_type).reason.startswith(reason)


@BOTH
def test_unknown_columns_are_ignored_and_named(media_type: str):
    strange = {
        "colour": pa.array(["red"]),
        "sizes": pa.array([[1, 2, 3]]),
        "nested": pa.array([{"a": 1, "b": ["x", "y"]}]),
        "coded": pa.array(["x"]).dictionary_encode(),
    }
    items = read(table_of(lang=pa.nulls(1), **strange), media_type)
    assert items == [IgnoredColumns(tuple(strange)), *read(table_of(lang=pa.nulls(1)), media_type)]


def test_duplicate_column_is_refused():
    table = pa.Table.from_arrays([pa.array(["x"])] * 5, names=[*TEXT.names, "value"])
    assert stops_at(written(table, STREAM), STREAM).reason == "the header repeats columns: value"


@BOTH
def test_rows_are_numbered_across_batches_row_groups_and_slices(media_type: str):
    table = table_of(value=pa.array([str(number) for number in range(1, 20_001)]))
    cuts = {"row_group_size": 9_000} if media_type == PARQUET else {"max_chunksize": 9_000}
    items = rows(written(table, media_type, **cuts), media_type)
    assert [(number, row["value"]) for number, row in items] == [(n, str(n)) for n in range(1, 20_001)]


@BOTH
@pytest.mark.parametrize(
    "encode", [pa.Array.dictionary_encode, lambda array: array, lambda array: array.cast(pa.string_view())]
)
def test_an_over_long_row_is_bad_and_the_next_one_is_read(media_type: str, encode: Any):
    values = ["a", None, "é" * 100, "x" * 200, "b", "y" * 181, "z" * 182]
    items = read(table_of(value=encode(pa.array(values))), media_type, 195)
    bad = "longer than 195 bytes"
    assert [item[0] for item in items] == [1, 2, "bad", "bad", 5, 6, "bad"]
    assert [item[1:3] for item in items if item[0] == "bad"] == [(3, bad), (4, bad), (7, bad)]


@pytest.mark.parametrize(("share", "portion"), [(4_000, 2), (10_000, 1), (20_000, 1), (1, 1_000)])
def test_value_shared_by_many_rows_is_not_copied_for_each(monkeypatch: pytest.MonkeyPatch, share: int, portion: int):
    monkeypatch.setattr(batch, "BYTES", 10_000 + 14_000 * (portion == 1_000))
    portions: list[int] = []
    of_portion = batch._values

    def counted(columns: Any, start: int, end: int) -> list[list[Any]]:
        portions.append(end - start)
        return of_portion(columns, start, end)

    monkeypatch.setattr(batch, "_values", counted)
    items = read(table_of(value=pa.array(["x" * share] * 1_000).dictionary_encode()), PARQUET)
    assert [len(row["value"]) for _, row in items] == [share] * 1_000
    assert set(portions) == {portion}


def test_parquet_rows_with_long_dictionary_values_are_decoded_in_small_batches(monkeypatch):
    monkeypatch.setattr(arrow, "LARGEST_BATCH", 100_000)
    values = ["a"] * 5_000 + ["x" * 20_000] * 50
    body = BytesIO(written(table_of(value=pa.array(values)), PARQUET, row_group_size=5_000))
    opened = parquet.ParquetFile(body)
    schema = parquet.read_schema(body)
    groups = arrow.check_pages(body, opened.metadata, Budget(len(body.getvalue())), schema.names)
    sizes = [len(piece) for piece in arrow._batches(body, opened, schema, schema.names, groups)]
    assert sizes == [5_000] + [4] * 12 + [2]


def test_parquet_file_is_spilled_to_disk_and_deleted_after_the_read(monkeypatch: pytest.MonkeyPatch):
    opened: list[Any] = []

    def temporary() -> Any:
        opened.append(TemporaryFile())  # noqa: SIM115
        return opened[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", temporary)
    body = written(table_of(value=pa.array(NASTY)), PARQUET)
    items = statement_rows(BytesIO(body), PARQUET, LONGEST)
    next(items)
    (file,) = opened
    assert os.fstat(file.fileno()).st_size == len(body)
    assert len(list(items)) == len(NASTY) - 1
    assert file.closed


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_arrow_stream_does_not_depend_on_chunks(size: int):
    body = written(table_of(value=pa.array(NASTY)), STREAM)
    assert parse_all(statement_rows(ChunkedBody(cut(body, [size])), STREAM, LONGEST)) == rows(body, STREAM)


def test_arrow_stream_truncated_anywhere_is_refused():
    body = written(table_of(value=pa.array(["a", "b"])), STREAM, max_chunksize=1)
    ends = [rows(body[:length], STREAM)[-1][0] for length in range(1, len(body))]
    assert set(ends) == {"broken"}


def test_parquet_file_truncated_anywhere_is_refused():
    body = written(table_of(value=pa.array(["a", "b"])), PARQUET)
    ends = [rows(body[:length], PARQUET)[-1][0] for length in range(1, len(body))]
    assert set(ends) == {"broken"}


@BOTH
@pytest.mark.parametrize("body", [b"x", b"{}\n" * 1000, b"PAR1PAR1", b"\xff" * 64, b"\x00" * 64])
def test_body_of_another_type_is_refused(media_type: str, body: bytes):
    assert rows(body, media_type)[-1][0] == "broken"


def test_bytes_after_the_end_of_an_arrow_stream_are_refused():
    body = written(table_of(value=pa.array(["a"])), STREAM)
    assert stops_at(body * 2, STREAM).reason == "expected nothing after the end of the stream"


def test_a_batch_too_large_to_read_at_once_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrow, "LARGEST_BATCH", LONGEST)
    body = written(table_of(value=pa.array(["x" * 1000] * 100)), STREAM)
    assert stops_at(body, STREAM).reason.endswith(f"the maximum is {LONGEST}")
    small = written(table_of(value=pa.array(["x" * 1000] * 100)), STREAM, max_chunksize=10)
    assert len(rows(small, STREAM)) == 100


@BOTH
def test_text_that_is_not_utf8_stops_the_stream(media_type: str):
    offsets = pa.py_buffer(b"\x00\x00\x00\x00\x02\x00\x00\x00")
    broken = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xff\xfe")])
    fault = stops_at(written(table_of(value=broken), media_type), media_type)
    assert fault.line == 1
    assert "Invalid UTF8" in fault.reason


def test_offsets_that_point_outside_their_buffer_stop_the_stream():
    body = written(table_of(value=pa.array(["needle"])), STREAM)
    at = body.rindex(b"needle")
    lying = body[: at - 60] + body[at - 60 : at].replace(b"\x06\x00\x00\x00", b"\x06\x00\x00\x70") + body[at:]
    assert lying != body
    assert stops_at(lying, STREAM).line == 1


# Of Parquet in tests/fuzz/test_parsers.py, in a child process: pyarrow aborts on some damaged footers.
@NO_DEADLINE
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4))
def test_damage_is_reported_as_an_invalid_format_or_not_detected(flips):
    languages = pa.array(["eng", None, "deu", "eng"]).dictionary_encode()
    seen = pa.array([1, None, 2, 3], pa.timestamp("ns", "UTC"))
    table = table_of(value=pa.array(["a", "é" * 20, "", "b"]), lang=languages, first_seen=seen)
    body = bytearray(written(table, STREAM, max_chunksize=2))
    for at, byte in flips:
        body[at % len(body)] = byte
    with suppress(BodyTooLarge):  # a size that is declared may be the one that is damaged
        items = rows(bytes(body), STREAM)
        # The name of an optional column may be damaged, which is then one that no statement has.
        assert {type(item) for item in items} <= {tuple, IgnoredColumns}


@BOTH
def test_a_column_whose_name_is_not_utf8_is_refused(media_type: str):
    body = written(table_of(value=pa.array(["a"])), media_type).replace(b"entity_id", b"entity_\xffd")
    assert "decode" in stops_at(body, media_type).reason


class FailingSource:
    def read(self, size: int, /) -> bytes:
        raise ConnectionResetError("gone")


@BOTH
def test_failing_source_is_not_reported_as_an_invalid_body(media_type: str):
    with pytest.raises(ConnectionResetError):
        list(statement_rows(FailingSource(), media_type, LONGEST))


def test_source_that_fails_within_an_arrow_stream_is_not_reported_as_an_invalid_body():
    def pieces():
        yield written(table_of(value=pa.array(["a"])), STREAM)[:100]
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        list(statement_rows(ChunkedBody(pieces()), STREAM, LONGEST))
