"""The export documents.csv: a line for each document, with every value intact."""

import csv
from collections.abc import Iterator
from io import StringIO
from typing import Any

import duckdb
import orjson
import pyarrow.csv
import pytest
from followthemoney.model import Model
from hypothesis import given, settings
from hypothesis import strategies as st
from tarn.query.output.assembly import entity_lines
from tarn.query.output.documents_csv import COLUMNS, HEADER, PROPERTIES, documents, rows

from tests.query.live_rows import Row, engine, fill, moment
from tests.query.test_assembly import AWKWARD

SCHEMATA = ["Document", "Pages", "Folder", "Email", "Thing", "Person", "Page", "Gone"]
PROPS = ["id", "bodyText", "name", "subject", *PROPERTIES.values()]


@pytest.fixture(scope="module")
def duck() -> duckdb.DuckDBPyConnection:
    return engine()


def written(duck: duckdb.DuckDBPyConnection, table: list[Row]) -> bytes:
    fill(duck, table)
    return HEADER + b"".join(rows(entity_lines(duck, documents(), batch_rows=3)))


def read(data: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(data.decode(), newline=""), strict=True))


def entities(duck: duckdb.DuckDBPyConnection) -> Iterator[dict[str, Any]]:
    for batch in entity_lines(duck):
        for line in batch.column("line").to_pylist():
            yield orjson.loads(line)


def test_no_documents_leave_a_file_with_a_header(duck: duckdb.DuckDBPyConnection) -> None:
    assert written(duck, []) == written(duck, [Row("a", "Person", "name", "x")]) == HEADER
    assert pyarrow.csv.read_csv(pyarrow.BufferReader(HEADER)).column_names == list(COLUMNS)


def test_document_line_has_the_expected_columns(duck: duckdb.DuckDBPyConnection) -> None:
    seen: dict[str, Any] = {"first_seen": moment("2020-01-01"), "last_seen": moment("2021-01-01")}
    values = {
        "fileName": "report.pdf",
        "title": "The report",
        "mimeType": "application/pdf",
        "fileSize": "12345",
        "contentHash": "deadbeef",
        "parent": "folder",
        "sourceUrl": "https://example.org/report.pdf",
        "author": "Ann",
        "date": "2019",
        "authoredAt": "2019-01-02",
        "publishedAt": "2019-02",
        "modifiedAt": "2019-03-01",
        "bodyText": "a long text",
    }
    document_rows = [Row("doc", "Pages", prop, value, **seen) for prop, value in values.items()]
    document_rows += [Row("doc", "Document", "language", value, origin="by.hand", **seen) for value in ("eng", "deu")]
    document_rows += [Row("doc", "Document", "country", "de", **seen), Row("page", "Page", "bodyText", "x")]
    assert read(written(duck, document_rows)) == [
        {
            "id": "doc",
            "schema": "Pages",
            "caption": "report.pdf",
            "file_name": "report.pdf",
            "title": "The report",
            "mime_type": "application/pdf",
            "file_size": "12345",
            "content_hash": "deadbeef",
            "parent": "folder",
            "source_url": "https://example.org/report.pdf",
            "author": "Ann",
            "date": "2019",
            "authored_at": "2019-01-02",
            "published_at": "2019-02",
            "modified_at": "2019-03-01",
            "languages": "deu; eng",
            "countries": "de",
            "origin": "by.hand; crawl",
            "first_seen": "2020-01-01T00:00:00.000000Z",
            "last_seen": "2021-01-01T00:00:00.000000Z",
        }
    ]


def test_empty_fields_are_not_quoted_and_others_are(duck: duckdb.DuckDBPyConnection) -> None:
    line = written(duck, [Row("a", "Folder", "title", "x")]).splitlines()[1]
    seen = b'"1970-01-01T00:00:00.000000Z","1970-01-01T00:00:00.000000Z"'
    assert line == b'"a","Folder","x",,"x",,,,,,,,,,,,,"crawl",' + seen


@given(
    table=st.lists(
        st.builds(
            Row,
            st.sampled_from(["a", "b", "c", "d", '"e', "é", "\U0001f600"]),
            st.sampled_from(SCHEMATA),
            st.sampled_from(PROPS),
            st.sampled_from(AWKWARD) | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9),
            origin=st.sampled_from(["crawl", "by.hand"]),
            first_seen=st.integers(0, 9),
            last_seen=st.integers(10, 19),
        ),
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_lines_are_those_of_document_entities_with_unchanged_values(
    duck: duckdb.DuckDBPyConnection, table: list[Row]
) -> None:
    content = written(duck, table)
    expected = [
        {
            **{name: entity[name] for name in ("id", "schema", "caption", "first_seen", "last_seen")},
            **{column: "; ".join(entity["properties"].get(prop, [])) for column, prop in PROPERTIES.items()},
            "origin": "; ".join(entity["origin"]),
        }
        for entity in entities(duck)
        if "$invalid" not in entity and Model.instance()[entity["schema"]].is_a("Document")
    ]
    assert read(content) == expected
    assert HEADER + b"".join(rows(entity_lines(duck))) == content
