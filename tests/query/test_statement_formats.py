"""Statements in every output format, read back by their usual readers."""

import csv
import io
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import duckdb
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from followthemoney.statement.serialize import CSV_COLUMNS, read_csv_statements, read_json_statements
from followthemoney.statement.statement import Statement
from hypothesis import given, settings
from tarn.query.output.assembly import Row
from tarn.query.output.column_text import fetch_tables
from tarn.query.output.statement_formats import ARROW, CSV, FORMATS, JSON_COLUMNS, NDJSON, PARQUET, statement_rows

from tests.query.test_assembly import AWKWARD, iso, relation, row, statements


def shown(one: Row) -> dict[str, Any]:
    """Return a row as FtM's statement dict."""
    moments = {"first_seen": iso(one.first_seen), "last_seen": iso(one.last_seen)}
    library = Statement(**(one._asdict() | {"id": one.id.hex()} | moments))
    return {**library.to_dict(), "prop_type": library.prop_type}


def from_ndjson(data: bytes) -> list[dict[str, Any]]:
    lines = [orjson.loads(line) for line in data.splitlines()]
    assert b"".join(orjson.dumps(line) + b"\n" for line in lines) == data
    assert all(tuple(line) == JSON_COLUMNS for line in lines)
    return lines


def from_csv(data: bytes) -> list[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(data.decode(), newline=""), strict=True)
    rows = list(reader)
    assert reader.fieldnames == CSV_COLUMNS
    nullable = ("lang", "original_value")
    return [one | {name: one[name] or None for name in nullable} | {"external": one["external"] == "t"} for one in rows]


def from_table(table: pa.Table) -> list[dict[str, Any]]:
    assert table.column_names == CSV_COLUMNS
    moment = pa.timestamp("us", "UTC")
    assert [table.schema.field(name).type for name in ("id", "external", "first_seen", "last_seen")] == [
        pa.string(), pa.bool_(), moment, moment,
    ]  # fmt: skip
    numbers = {name: table[name].cast(pa.int64()).to_pylist() for name in ("first_seen", "last_seen")}
    rows = table.drop_columns(list(numbers)).to_pylist()
    return [one | {name: iso(numbers[name][place]) for name in numbers} for place, one in enumerate(rows)]


def from_parquet(data: bytes) -> list[dict[str, Any]]:
    return from_table(pq.read_table(io.BytesIO(data)))


def from_arrow(data: bytes) -> list[dict[str, Any]]:
    with pa.ipc.open_stream(data) as reader:
        return from_table(reader.read_all())


READERS: dict[str, Callable[[bytes], list[dict[str, Any]]]] = {
    NDJSON: from_ndjson,
    CSV: from_csv,
    PARQUET: from_parquet,
    ARROW: from_arrow,
}


@pytest.fixture(scope="module")
def duck() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(config={"threads": 2}) as connection:
        yield connection


def chunks_of(
    duck: duckdb.DuckDBPyConnection, query: str, parameters: Any, form: str, batch_rows: int = 3
) -> Iterator[bytes]:
    return FORMATS[form](fetch_tables(duck, query, parameters, batch_rows))


def as_form(duck: duckdb.DuckDBPyConnection, rows: list[Row], form: str, batch_rows: int = 3) -> bytes:
    duck.register("live", relation(rows))
    return b"".join(chunks_of(duck, "SELECT * FROM live", (), form, batch_rows))


@settings(max_examples=100, deadline=None)
@given(statements())
def test_rows_are_read_back_unchanged_from_every_format(duck, rows):
    expected = [shown(one) for one in rows]

    for form, read in READERS.items():
        assert read(as_form(duck, rows, form)) == expected
    assert statement_rows(duck, "SELECT * FROM live", ()) == expected


@pytest.mark.parametrize("form", [NDJSON, CSV])
def test_library_reads_the_statements_as_it_would_have_written_them(duck, form):
    read = {NDJSON: read_json_statements, CSV: read_csv_statements}[form]
    rows = [row("name", value, lang="eng", original_value=f"{value}!", external=True) for value in AWKWARD]

    statements = [{**one.to_dict(), "prop_type": one.prop_type} for one in read(io.BytesIO(as_form(duck, rows, form)))]

    assert statements == [shown(one) for one in rows]


@pytest.mark.parametrize("form", FORMATS)
def test_relation_without_rows_is_a_valid_empty_file(duck, form):
    assert READERS[form](as_form(duck, [], form)) == []


@pytest.mark.parametrize("form", FORMATS)
def test_every_batch_of_rows_is_a_separate_chunk(duck, form):
    duck.register("live", relation([row("name", str(number)) for number in range(5_000)]))

    chunks = chunks_of(duck, "SELECT * FROM live", (), form, 1_000)

    assert len(list(chunks)) >= 5


def test_row_groups_are_written_as_they_are_produced(duck):
    data = as_form(duck, [row("name", str(number)) for number in range(5_000)], PARQUET, 1_000)

    assert pq.ParquetFile(io.BytesIO(data)).metadata.num_row_groups == 5


@pytest.mark.parametrize("form", FORMATS)
def test_query_is_run_with_its_parameters_and_keeps_its_order(duck, form):
    duck.register("live", relation([row("name", str(number)) for number in range(100)]))

    data = b"".join(chunks_of(duck, "SELECT * FROM live WHERE value > ? ORDER BY value DESC", ["95"], form))

    assert [one["value"] for one in READERS[form](data)] == ["99", "98", "97", "96"]


def test_unknown_property_has_no_type(duck):
    (statement,) = from_ndjson(as_form(duck, [row("unheard", "x")], NDJSON))

    assert statement["prop_type"] is None


def test_timestamps_are_in_utc(duck):
    data = as_form(duck, [row("name", "x", first_seen=1_700_000_000_000_000)], ARROW)

    with pa.ipc.open_stream(data) as reader:
        (timestamp,) = reader.read_all()["first_seen"].to_pylist()
    assert timestamp == datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=1_700_000_000)
