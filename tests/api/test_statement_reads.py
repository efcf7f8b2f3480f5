"""Read statements over HTTP: in pages, and as streams in every format."""

import csv
import io
from collections.abc import Callable
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from followthemoney.statement.serialize import CSV_COLUMNS
from httpx2 import Response
from tarn.datasets.registry import Dataset
from tarn.model.datasets.snapshot import Snapshot
from tarn.query.output.statement_formats import ARROW, CSV, NDJSON, PARQUET

from tests.api.test_entity_reads import ENTITIES, SQL, add, entity, merge, problem, refusal
from tests.in_process_api import InProcessApi

Flushing = Callable[[], list[Snapshot]]

STATEMENTS = "/v1/datasets/test/statements"


@pytest.fixture(autouse=True)
def _sample(api: InProcessApi, dataset: Dataset, flush: Flushing) -> None:
    """Write statements of two origins, half of them flushed; `q` merges two entities."""
    add(api, entity("ada", name="Ada", country="gb"), entity("acme", "Company", name='Acme, "Inc"\n'))
    merge(api, "q", "q1")
    flush()
    add(api, entity("ada", name="Ada"), origin="wiki")
    merge(api, "q", "q2")


def rows_of(response: Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    rows: list[dict[str, Any]] = response.json()["results"]
    return rows


def stream(api: InProcessApi, form: str, query: str = "") -> Response:
    return api.admin.get(f"{STATEMENTS}/stream?{query}", headers={"Accept": form})


FILTERED = {
    "": 11,
    "id=ada": 5,
    "id=q1": 4,
    "id=q": 4,
    "id=q1&id=acme": 6,
    "id=nobody": 0,
    "canonical_id=q": 4,
    "canonical_id=q1": 0,
    "id=q2&canonical_id=q": 4,
    "schema=Company": 2,
    "schema=LegalEntity": 0,
    "schemata=LegalEntity": 11,
    "schemata=Organization": 2,
    "origin=wiki": 2,
    "origin=wiki&origin=crawl": 11,
    "origin=nobody": 0,
    "prop=name": 5,
    "prop=id&prop=country": 6,
    "prop=country&id=ada&origin=crawl": 1,
    "prop=country&id=ada&origin=wiki": 0,
}


def test_list_and_stream_return_rows_that_match_every_filter(api: InProcessApi):
    listed = {filters: rows_of(api.admin.get(f"{STATEMENTS}?{filters}")) for filters in FILTERED}
    streamed = {filters: stream(api, NDJSON, filters).content.splitlines() for filters in FILTERED}

    assert {filters: len(rows) for filters, rows in listed.items()} == FILTERED
    assert {filters: [orjson.loads(line) for line in lines] for filters, lines in streamed.items()} == listed


@pytest.mark.parametrize("limit", [1, 4, 11, 1000])
def test_pages_contain_every_statement_once_in_order(api: InProcessApi, limit: int):
    rows = rows_of(api.admin.get(STATEMENTS))
    paged: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    while True:
        page = api.admin.get(STATEMENTS, params={"limit": limit, **cursor}).json()
        paged += page["results"]
        if page["next"] is None:
            break
        cursor = {"cursor": page["next"]}

    assert paged == rows
    keys = [(row["canonical_id"], row["id"], row["origin"]) for row in paged]
    assert keys == sorted(set(keys))


def test_every_format_contains_the_same_statements(api: InProcessApi):
    listed = rows_of(api.admin.get(STATEMENTS))

    lines = [orjson.loads(line) for line in stream(api, NDJSON).content.splitlines()]
    table = list(csv.DictReader(io.StringIO(stream(api, CSV).text, newline="")))
    parquet = pq.read_table(io.BytesIO(stream(api, PARQUET).content))
    arrow = pa.ipc.open_stream(stream(api, ARROW).content).read_all()

    assert lines == listed
    assert list(table[0]) == parquet.column_names == arrow.column_names == list(CSV_COLUMNS)
    assert parquet == arrow
    same = ("id", "entity_id", "canonical_id", "schema", "prop", "value", "dataset", "origin")
    expected = [{name: row[name] for name in same} for row in listed]
    assert [{name: row[name] for name in same} for row in table] == expected
    assert arrow.select(same).to_pylist() == expected


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (None, NDJSON),
        ("*/*", NDJSON),
        ("text/*", CSV),
        ("text/csv; charset=utf-8", CSV),
        ("application/*", NDJSON),
        (f"text/csv;q=0.5, {PARQUET};q=0.9", PARQUET),
        (f"text/html, {ARROW}", ARROW),
    ],
)
def test_accept_selects_the_format(api: InProcessApi, accept: str | None, form: str):
    # The test client sends an Accept of its own, which only an empty one replaces.
    response = api.admin.get(f"{STATEMENTS}/stream", headers={"Accept": accept or ""})

    assert response.status_code == 200
    assert response.headers["Content-Type"].partition(";")[0] == form


def test_unknown_format_is_not_acceptable(api: InProcessApi):
    response = stream(api, "application/json")

    assert problem(response) == (406, "not-acceptable")
    assert response.json()["supported"] == [NDJSON, CSV, PARQUET, ARROW]
    assert problem(stream(api, f"{NDJSON};q=0")) == (406, "not-acceptable")
    assert problem(api.admin.get(STATEMENTS, headers={"Accept": CSV})) == (406, "not-acceptable")


@pytest.mark.parametrize("form", [CSV, PARQUET, ARROW])
def test_trailer_line_is_refused_in_formats_without_lines(api: InProcessApi, form: str):
    assert refusal(stream(api, form, "end=true")) == (400, ["query.end"])


def test_trailer_line_has_the_snapshot_and_the_count(api: InProcessApi):
    response = stream(api, NDJSON, "end=true&origin=crawl")

    lines = [orjson.loads(line) for line in response.content.splitlines()]
    assert lines[-1] == {"$end": {"snapshot": response.headers["Tarn-Snapshot"], "count": 9}}
    assert len(lines) == 10


def test_result_without_rows_is_an_empty_stream_of_its_format(api: InProcessApi):
    assert stream(api, NDJSON, "id=nobody").content == b""
    assert len(list(csv.reader(io.StringIO(stream(api, CSV, "id=nobody").text)))) == 1
    assert pq.read_table(io.BytesIO(stream(api, PARQUET, "id=nobody").content)).num_rows == 0
    assert pa.ipc.open_stream(stream(api, ARROW, "id=nobody").content).read_all().num_rows == 0


INVALID_PARAMETERS = {
    "limit=0": "query.limit",
    "limit=1001": "query.limit",
    "colour=red": "query.colour",
    "sort=id": "query.sort",
    "schema=Colour": "query.schema",
    "schemata=%27": "query.schemata",
    "prop=colour": "query.prop",
    "prop=%27%3B--": "query.prop",
    "origin=%27": "query.origin.0",
    "id=%00": "query.id",
    "canonical_id=a%00": "query.canonical_id",
    "id=" + "&id=".join("a" * 1001): "query.id",
    "cursor=abc": "query.cursor",
}


def test_invalid_parameter_is_refused_with_its_name(api: InProcessApi):
    refusals = {parameters: refusal(api.admin.get(f"{STATEMENTS}?{parameters}")) for parameters in INVALID_PARAMETERS}

    assert refusals == {parameters: (422, [field]) for parameters, field in INVALID_PARAMETERS.items()}


def test_sql_in_an_id_is_treated_as_a_string(api: InProcessApi):
    by_text = {text: rows_of(api.admin.get(STATEMENTS, params={"id": text, "canonical_id": text})) for text in SQL}
    assert by_text == {text: [] for text in SQL}
    assert len(rows_of(api.admin.get(STATEMENTS))) == FILTERED[""]


def test_deleted_statement_is_gone_from_every_read(api: InProcessApi, flush: Flushing):
    (statement,) = rows_of(api.admin.get(f"{STATEMENTS}?prop=country"))

    assert api.admin.delete(f"{STATEMENTS}/{statement['id']}").json()["tombstones"] == 1

    assert rows_of(api.admin.get(f"{STATEMENTS}?prop=country")) == []
    assert api.admin.get(f"{ENTITIES}/ada").json()["properties"] == {"name": ["Ada"]}
    flush()
    assert rows_of(api.admin.get(f"{STATEMENTS}?prop=country")) == []
