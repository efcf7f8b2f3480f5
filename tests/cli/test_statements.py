"""Statements from the command line: query, get, load and delete, in every format."""

import csv
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.conftest import Tarn

ENTITIES = (
    '{"id": "ann", "schema": "Person", "properties": {"name": ["Ann", "Anna"], "country": ["Germany"]}}\n'
    '{"id": "acme", "schema": "Company", "properties": {"name": ["Acme"]}}\n'
)


@pytest.fixture
def people(tarn: Tarn, dataset: str) -> str:
    tarn("entities", "load", dataset, "-", "--origin", "crawl", stdin=ENTITIES)
    return dataset


def rows(printed: str) -> list[tuple[str, str, str]]:
    statements = (json.loads(line) for line in printed.splitlines())
    return sorted((row["entity_id"], row["prop"], row["value"]) for row in statements if row["prop"] != "id")


ALL = [("acme", "name", "Acme"), ("ann", "country", "de"), ("ann", "name", "Ann"), ("ann", "name", "Anna")]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], ALL),
        (["--prop", "name"], [ALL[0], *ALL[2:]]),
        (["--id", "acme"], ALL[:1]),
        (["--canonical-id", "ann", "--prop", "country"], [ALL[1]]),
        (["--schema", "LegalEntity"], []),
        (["--schemata", "LegalEntity", "--origin", "crawl"], ALL),
        (["--origin", "other"], []),
        (["--fresh", "snapshot"], []),
    ],
)
def test_query_prints_matching_statements(tarn: Tarn, people: str, args: list[str], expected: list[object]):
    assert rows(tarn("statements", "query", people, *args).stdout) == expected


def test_get_prints_the_statements_of_entities(tarn: Tarn, people: str):
    assert rows(tarn("statements", "get", people, "ann").stdout) == ALL[1:]
    assert rows(tarn("statements", "get", people, "ann", "acme", "--prop", "name").stdout) == [ALL[0], *ALL[2:]]


def test_every_format_has_the_same_statements(tarn: Tarn, people: str, tmp_path: Path):
    lines = [json.loads(line) for line in tarn("statements", "query", people).stdout.splitlines()]
    ids = [row["id"] for row in lines]
    files = {
        format_name: tmp_path / f"statements.{format_name}" for format_name in ("csv", "parquet", "arrow", "ndjson")
    }
    for file in files.values():
        tarn("statements", "query", people, "-o", str(file))

    as_csv = tarn("statements", "query", people, "--format", "csv").stdout

    assert [row["id"] for row in csv.DictReader(io.StringIO(as_csv))] == ids
    assert files["csv"].read_bytes().decode() == as_csv
    assert pq.read_table(files["parquet"]).column("id").to_pylist() == ids
    assert pa.ipc.open_stream(files["arrow"]).read_all().column("id").to_pylist() == ids
    assert [json.loads(line) for line in files["ndjson"].read_text().splitlines()] == lines


@pytest.mark.parametrize("format_name", ["csv", "parquet", "arrow", "ndjson"])
def test_written_file_can_be_loaded_into_another_dataset(
    tarn: Tarn, people: str, name: str, tmp_path: Path, format_name: str
):
    file = str(tmp_path / f"statements.{format_name}")
    tarn("datasets", "create", f"{name}_copy")
    tarn("statements", "query", people, "-o", file)

    written = tarn.json("statements", "load", f"{name}_copy", file, "--origin", "copied")

    assert (written["statements"], written["rejected"]) == (6, 0)
    assert rows(tarn("statements", "query", f"{name}_copy", "--origin", "copied").stdout) == ALL


def test_strict_load_refuses_the_statements_of_another_dataset(tarn: Tarn, people: str, name: str):
    tarn("datasets", "create", f"{name}_copy")
    lines = tarn("statements", "query", people).stdout

    refused = tarn("statements", "load", f"{name}_copy", "-", "--strict", stdin=lines, code=1)

    assert "(schema-violation)" in refused.stderr
    assert tarn.json("statements", "load", people, "-", "--strict", stdin=lines)["statements"] == 6


def test_pack_from_standard_input_needs_the_option_format(tarn: Tarn, dataset: str):
    pack = "entity_id,prop,value\nann,Person:name,Ann\n"

    tarn("statements", "load", dataset, "-", stdin=pack, code=2)
    tarn("statements", "load", dataset, "-", "--format", "pack", stdin=pack)

    assert rows(tarn("statements", "get", dataset, "ann").stdout) == [("ann", "name", "Ann")]


def test_statement_is_deleted_by_its_id(tarn: Tarn, people: str):
    statement_id = json.loads(tarn("statements", "get", people, "ann", "--prop", "country").stdout)["id"]

    assert tarn.json("statements", "delete", people, statement_id, "--origin", "other")["tombstones"] == 0
    assert tarn.json("statements", "delete", people, statement_id)["tombstones"] == 1
    assert rows(tarn("statements", "get", people, "ann", "--prop", "country").stdout) == []


def test_unknown_property_is_a_problem(tarn: Tarn, people: str):
    refused = tarn("statements", "query", people, "--prop", "nonsense", code=1)

    assert (refused.stdout, "(schema-violation)" in refused.stderr) == ("", True)
