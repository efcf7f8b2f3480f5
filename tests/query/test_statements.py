"""Streams of statements in storage order, within bounded memory."""

from collections.abc import Callable
from itertools import islice

import duckdb
import pytest
from tarn.query.output.column_text import fetch_tables
from tarn.query.statements import StatementPosition, sorted_rows

QUERY = "SELECT * FROM live"


@pytest.fixture
def small(tmp_path) -> Callable[[int], duckdb.DuckDBPyConnection]:
    """Return a DuckDB with little memory, and statements with values of so many characters."""

    def make(length: int) -> duckdb.DuckDBPyConnection:
        connection = duckdb.connect(config={"memory_limit": "64MB", "threads": 2, "temp_directory": str(tmp_path)})
        connection.execute(
            f"""CREATE VIEW live AS SELECT 'one' AS dataset, 'e' || (i * 7919) % 9973 AS canonical_id,
            canonical_id AS entity_id, unhex(sha1(i::VARCHAR)) AS id, 'Person' AS schema, 'notes' AS prop,
            'row ' || i || repeat('.', {length}) AS value, NULL::VARCHAR AS lang, NULL::VARCHAR AS original_value,
            false AS external, ['a', 'b'][1 + i % 2] AS origin, i AS first_seen, i AS last_seen
            FROM range(50000) t(i)"""
        )
        return connection

    return make


def places(duck: duckdb.DuckDBPyConnection) -> list[StatementPosition]:
    tables = sorted_rows(duck, QUERY, [])
    return [
        StatementPosition(*row.values())
        for table in tables
        for row in table.select(StatementPosition._fields).to_pylist()
    ]


def test_more_text_than_memory_is_streamed_in_order(small, tmp_path):
    with small(2000) as duck:
        with pytest.raises(duckdb.OutOfMemoryException):
            duck.execute(f"{QUERY} ORDER BY canonical_id, id, origin").fetchmany(1)
        streamed = places(duck)

    assert len(streamed) == 50_000
    assert streamed == sorted(streamed)
    assert list(tmp_path.glob("spilled-*")) == []


def test_out_of_memory_midway_neither_omits_nor_repeats_rows(small, monkeypatch):
    """The sort fails after it has returned some rows, as it may when others use the memory."""

    def failing(duck, query, parameters, batch_rows):
        tables = fetch_tables(duck, query, parameters, 10_000)
        if "ORDER BY" not in query:
            yield from tables
            return
        yield from islice(tables, 2)
        raise duckdb.OutOfMemoryException("Out of Memory Error: as it were")

    with small(10) as duck:
        expected = places(duck)
        monkeypatch.setattr("tarn.query.statements.fetch_tables", failing)
        streamed = places(duck)

    assert streamed == expected
