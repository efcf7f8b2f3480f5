"""Memory does not grow with the body: large bodies are generated, parsed and never in memory completely."""

import tracemalloc
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import chain, repeat
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from followthemoney.statement import Statement
from tarn.journal.formats import BadRecord, entity_records, statement_rows
from tarn.journal.formats.record import BLOCK

from tests.journal.test_formats import CSV, JSON, NDJSON, PACK, ChunkedBody, written
from tests.journal.test_formats_arrow import PARQUET, STREAM, table_of

LARGEST = 16 * BLOCK
ENTITY = orjson.dumps({"id": "jane", "schema": "Person", "properties": {"notes": ["x" * 1000, 'a"b', "é"] * 3}})


def peak(items: Iterator[Any]) -> tuple[int, int]:
    """Return the number of items, and the peak memory while reading them."""
    tracemalloc.start()
    try:
        return sum(1 for _ in items), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_ndjson_of_200_mb():
    block = (ENTITY + b"\n") * (BLOCK // len(ENTITY))
    count, memory = peak(entity_records(ChunkedBody(repeat(block, 200)), NDJSON, 1 << 20))
    assert count == 200 * (BLOCK // len(ENTITY))
    assert memory < LARGEST


def test_a_json_array_of_200_mb():
    block = (ENTITY + b",\n") * (BLOCK // len(ENTITY))
    body = chain([b"["], repeat(block, 200), [ENTITY, b"]"])
    count, memory = peak(entity_records(ChunkedBody(body), JSON, 1 << 20))
    assert count == 200 * (BLOCK // len(ENTITY)) + 1
    assert memory < LARGEST


@pytest.mark.parametrize(("form", "media_type"), [("csv", CSV), ("pack", PACK)])
def test_csv_and_pack_of_20_mb(form: str, media_type: str):
    statement = Statement(entity_id="jane", prop="notes", schema="Person", value="x" * 500 + '"\n', dataset="test")
    header, row = written([statement], form).split(b"\n", 1)
    block = row * (BLOCK // len(row))
    count, memory = peak(statement_rows(ChunkedBody(chain([header, b"\n"], repeat(block, 20))), media_type, 1 << 20))
    assert count == 20 * (BLOCK // len(row))
    assert memory < LARGEST


def test_an_arrow_stream_of_100_mb():
    body = BytesIO()
    table = table_of(value=pa.array(["x" * 1000] * 1000))
    with pa.ipc.new_stream(body, table.schema) as stream:
        stream.write_table(table)
        start = body.tell()
        stream.write_table(table)
        end = body.tell()
    once, again, rest = body.getvalue()[:start], body.getvalue()[start:end], body.getvalue()[end:]
    before = pa.total_allocated_bytes()
    count, memory = peak(statement_rows(ChunkedBody(chain([once], repeat(again, 100), [rest])), STREAM, 1 << 20))
    assert count == 101_000
    assert memory < LARGEST
    assert pa.total_allocated_bytes() - before < LARGEST


def test_a_row_group_of_300_000_different_values():
    body = BytesIO()
    parquet.write_table(table_of(value=pa.array([f"{number:0100}" for number in range(300_000)])), body)
    body.seek(0)
    before = pa.total_allocated_bytes()
    allocated = [pa.total_allocated_bytes() - before for _ in statement_rows(body, PARQUET, 1 << 20)]
    assert len(allocated) == 300_000
    assert max(allocated) < LARGEST


@pytest.mark.parametrize(
    ("parse", "media_type", "before", "endless", "after"),
    [
        (entity_records, NDJSON, b"", b"x", b"\n"),
        (entity_records, JSON, b'["', b"x", b'"]'),
        (entity_records, JSON, b"[[", b"{},", b"{}]]"),
        (entity_records, JSON, b"[", b"1", b"]"),
        (statement_rows, CSV, b"entity_id,prop,schema,value\n", b"x", b"\n"),
        (statement_rows, CSV, b'entity_id,prop,schema,value\n"', b'""', b'"\n'),
    ],
)
def test_record_of_50_mb_is_bad_and_never_in_memory(parse: Callable, media_type: str, before, endless, after):
    body = chain([before], repeat(endless * (BLOCK // len(endless)), 50), [after])
    seen: list[Any] = []
    _, memory = peak(map(seen.append, parse(ChunkedBody(body), media_type, 1 << 20)))
    assert memory < LARGEST
    (bad,) = seen
    assert isinstance(bad, BadRecord)
    assert bad.reason == f"longer than {1 << 20} bytes"
