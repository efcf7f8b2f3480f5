"""Every record of a body is stored or reported: in every format, around every threshold, in the API and in a parser
process.
"""

import csv
import io
import json
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from followthemoney.statement import Statement
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tarn.api.http import ingest
from tarn.journal import formats
from tarn.journal.formats.counting import Counted, RecordsLost
from tarn.journal.parsing.event_buffer import Events
from tarn.journal.parsing.event_chunks import BodyReader, ReadOptions, ReadReport
from tarn.journal.parsing.parser_pool import BodyParser, ForkServer, ParserPool
from tarn.model.ftm.entity import Exploder
from tarn.model.names import DatasetName

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.journal import decompression_bombs, journal, parser_with_low_limits
from tests.journal.test_formats import PACK, written

NDJSON, JSON = "application/x-ndjson", "application/json"
PARQUET, STREAM = "application/vnd.apache.parquet", "application/vnd.apache.arrow.stream"
COLUMNS = ("entity_id", "schema", "prop", "value")

Row = dict[str, Any]


def as_lines(rows: list[Row]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def as_csv(rows: list[Row]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_table(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist(rows, pa.schema([(name, pa.string()) for name in COLUMNS]))


def as_parquet(rows: list[Row]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(as_table(rows), file, row_group_size=17, data_page_size=50, write_batch_size=3)
    return file.getvalue()


def as_arrow(rows: list[Row]) -> bytes:
    file, table = io.BytesIO(), as_table(rows)
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, 7)
    return file.getvalue()


def as_entity(row: Row) -> Row:
    return {"id": row["entity_id"], "schema": row["schema"], "properties": {row["prop"]: [row["value"]]}}


def as_pack(rows: list[Row]) -> bytes:
    return written([Statement(dataset="test", **row) for row in rows], "pack")


FORMATS: dict[tuple[str, str], Callable[[list[Row]], bytes]] = {
    ("entities", NDJSON): lambda rows: as_lines([as_entity(row) for row in rows]),
    ("entities", JSON): lambda rows: json.dumps([as_entity(row) for row in rows]).encode(),
    ("statements", NDJSON): as_lines,
    ("statements", JSON): lambda rows: json.dumps(rows).encode(),
    ("statements", "text/csv"): as_csv,
    ("statements", PACK): as_pack,
    ("statements", PARQUET): as_parquet,
    ("statements", STREAM): as_arrow,
}
EVERY_FORMAT = pytest.mark.parametrize(
    ("records", "media_type"), list(FORMATS), ids=lambda part: part.rpartition(".")[2].rpartition("/")[2]
)

LENGTHS = st.integers(0, 40) | st.sampled_from(
    [
        size + step
        for size in (
            parser_with_low_limits.ROWS,
            parser_with_low_limits.CHUNK_ROWS,
            2 * parser_with_low_limits.CHUNK_ROWS,
        )
        for step in (-1, 0, 1)
    ]
)
VALUES = st.sampled_from(["a", "Jane", "x" * 20, "x" * 150, "ä" * 70, "y" * 290, "z" * 700])


@st.composite
def bodies(draw: st.DrawFn) -> list[Row]:
    """Draw rows, some of which are invalid, of sizes around the thresholds."""
    length, value = draw(LENGTHS), draw(VALUES)
    bad = draw(st.sets(st.integers(0, 60)))
    return [
        {"entity_id": "" if n in bad else f"p{n}", "schema": "Person", "prop": "name", "value": f"{value}{n}"}
        for n in range(length)
    ]


@pytest.fixture(scope="module")
def low_parsers() -> Iterator[ParserPool]:
    class LowServer(ForkServer):
        module = "tests.journal.parser_with_low_limits"

    with pytest.MonkeyPatch.context() as patch, closing(ParserPool(2, wait=120)) as parsers:
        patch.setattr("tarn.journal.parsing.parser_pool.ForkServer", LowServer)
        patch.setenv("PYTHONPATH", os.getcwd(), prepend=os.pathsep)
        parsers.start()
        yield parsers


def terms(records: str, media_type: str) -> ReadOptions:
    return ReadOptions(
        records=records,
        media_type=media_type,
        dataset=DatasetName("test"),
        origin=None,
        moment=0,
        longest=1 << 20,
        on_error="skip",
    )


def stored(reading: BodyParser, body: bytes) -> tuple[list[tuple[str, str]], int, int]:
    """Return entity and value of every stored statement except BASE ones; the chunks; and the rejected records."""
    chunks = list(reading.chunks(io.BytesIO(body)))
    rows = [row for chunk in chunks for row in chunk.table(1).to_pylist()]
    assert reading.rows == len(rows)
    return (
        [(row["entity_id"], row["value"]) for row in rows if row["prop"] != "id"],
        len(chunks),
        reading.report.rejected,
    )


@EVERY_FORMAT
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=bodies())
def test_every_row_read_is_stored_or_reported(
    low_parsers: ParserPool, monkeypatch: pytest.MonkeyPatch, records: str, media_type: str, rows: list[Row]
):
    parser_with_low_limits.lower(monkeypatch.setattr)
    body = FORMATS[records, media_type](rows)
    valid = [(row["entity_id"], row["value"]) for row in rows if row["entity_id"]]

    here = stored(BodyReader(terms(records, media_type), Exploder()), body)
    with low_parsers.parser(terms(records, media_type)) as reading:
        there = stored(reading, body)

    assert here == there
    assert (here[0], here[2]) == (valid, len(rows) - len(valid))


@EVERY_FORMAT
@ONE_DATABASE
@pytest.mark.parametrize("small", [1 << 20, 0], ids=["event-loop", "parser"])
@pytest.mark.parametrize("count", [12, 25])
def test_request_stores_every_row_in_either_process(
    api: InProcessApi, monkeypatch: pytest.MonkeyPatch, records: str, media_type: str, small: int, count: int
):
    api.dataset("test")
    monkeypatch.setattr(ingest, "SMALL", small)
    monkeypatch.setattr(ingest, "SMALL_SECONDS", 60.0)
    monkeypatch.setattr("tarn.journal.parsing.event_chunks.CHUNK_ROWS", 12)
    rows = [
        {"entity_id": f"p{n}" if n != 3 else "", "schema": "Person", "prop": "name", "value": f"Name {n}"}
        for n in range(count)
    ]

    answer = api.admin(
        "POST",
        f"/v1/datasets/test/{records}?on_error=skip",
        content=FORMATS[records, media_type](rows),
        headers={"Content-Type": media_type},
    )

    stored_values = sorted((row["entity_id"], row["value"]) for row in journal.rows(api) if row["prop"] != "id")
    assert answer.status_code == 200, answer.text
    assert answer.json()["rejected"] == 1
    assert stored_values == sorted((row["entity_id"], row["value"]) for row in rows if row["entity_id"])


@ONE_DATABASE
@pytest.mark.parametrize("staged", [False, True])
def test_small_file_of_many_chunks_is_stored_completely(api: InProcessApi, staged: bool):
    api.dataset("test")
    path = "/v1/datasets/test/statements"
    if staged:
        stage = api.admin.post("/v1/datasets/test/stages", {}).json()["id"]
        path = f"/v1/datasets/test/stages/{stage}/statements"
    body = decompression_bombs.numbered_parquet(120_000)
    assert len(body) < 19_025

    answer = api.admin("POST", path, content=body, headers={"Content-Type": PARQUET})

    assert (answer.status_code, answer.json()["statements"], answer.json()["rejected"]) == (200, 120_000, 0)
    assert sum(batch["rows"] for batch in journal.batches(api) if not batch["is_stage"]) == 120_000


@ONE_DATABASE
@pytest.mark.parametrize("media_type", [PARQUET, STREAM])
def test_columnar_body_is_never_parsed_by_the_api(api: InProcessApi, monkeypatch: pytest.MonkeyPatch, media_type: str):
    api.dataset("test")

    def refuse(*_: object) -> Iterator[object]:
        raise AssertionError("parsed in the process of the API")

    monkeypatch.setitem(formats._STATEMENTS, media_type, refuse)
    row = {"entity_id": "p", "schema": "Person", "prop": "name", "value": "Jane"}
    answer = api.admin(
        "POST",
        "/v1/datasets/test/statements",
        content=FORMATS["statements", media_type]([row]),
        headers={"Content-Type": media_type},
    )
    assert (answer.status_code, answer.json()["statements"]) == (200, 1)


@ONE_DATABASE
@pytest.mark.parametrize(
    "body",
    [
        b"x\n" * 8000,
        b"{}\n" * 5000,
        as_lines([as_entity({**decompression_bombs.JANE, "prop": "country", "value": "Germany"})]),
    ],
    ids=["not-json", "empty", "slow-value"],
)
def test_small_slow_body_is_passed_to_a_parser(api: InProcessApi, monkeypatch: pytest.MonkeyPatch, body: bytes):
    api.dataset("test")
    monkeypatch.setattr(ingest, "SMALL_SECONDS", 0.0)
    monkeypatch.setattr(Exploder, "explode", lambda *_: pytest.fail("parsed on the event loop"))
    monkeypatch.setattr(ReadReport, "reject", lambda *_: pytest.fail("parsed on the event loop"))

    answer = api.admin(
        "POST", "/v1/datasets/test/entities?on_error=skip", content=body, headers={"Content-Type": NDJSON}
    )

    assert answer.status_code == 200
    assert answer.json()["entities"] + answer.json()["rejected"] == body.count(b"\n")


@ONE_DATABASE
@pytest.mark.parametrize("count", [5, 5_000], ids=["small", "large"])
def test_body_with_an_inconsistent_row_count_is_refused_and_nothing_is_stored(
    api: InProcessApi, monkeypatch: pytest.MonkeyPatch, count: int
):
    api.dataset("test")
    monkeypatch.setattr(ingest, "SMALL", 1 << 20)
    monkeypatch.setattr(ingest, "SMALL_SECONDS", 60.0)
    rows = [as_entity({**decompression_bombs.JANE, "entity_id": f"p{n}"}) for n in range(count)]
    monkeypatch.setattr(BodyReader, "_counted", _one_more)

    answer = api.admin("POST", "/v1/datasets/test/entities", content=as_lines(rows), headers={"Content-Type": NDJSON})

    assert (answer.status_code, answer.json()["type"]) == (500, "/problems/internal")
    assert journal.count(api) == 0


def _one_more(intake: BodyReader, events: Events) -> Events:
    intake.entities += events.entities
    intake.statements += events.statements
    intake.rows += len(events) + 1
    return events


def test_format_that_yields_fewer_records_than_it_counts_raises_an_error():
    def records() -> Generator[int, None, int]:
        yield from range(3)
        return 4

    with pytest.raises(RecordsLost, match="3 records were read and 4 are in the body"):
        list(Counted(records()))


def test_record_that_is_neither_stored_nor_reported_raises_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ReadReport, "reject", lambda *_: None)
    intake = BodyReader(terms("entities", NDJSON), Exploder())
    with pytest.raises(RecordsLost, match="1 records were stored or reported and 2 were read"):
        list(intake.chunks(io.BytesIO(as_lines([as_entity(decompression_bombs.JANE), {}]))))
