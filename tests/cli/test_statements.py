"""Statements from the command line, in every form, there and back."""

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
def filled(tarn: Tarn, dataset: str) -> str:
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
def test_query_prints_the_statements_that_match(tarn: Tarn, filled: str, args: list[str], expected: list[object]):
    assert rows(tarn("statements", "query", filled, *args).stdout) == expected


def test_get_prints_the_statements_of_entities(tarn: Tarn, filled: str):
    assert rows(tarn("statements", "get", filled, "ann").stdout) == ALL[1:]
    assert rows(tarn("statements", "get", filled, "ann", "acme", "--prop", "name").stdout) == [ALL[0], *ALL[2:]]


def test_every_form_holds_the_same_statements(tarn: Tarn, filled: str, tmp_path: Path):
    lines = [json.loads(line) for line in tarn("statements", "query", filled).stdout.splitlines()]
    ids = [row["id"] for row in lines]
    files = {form: tmp_path / f"statements.{form}" for form in ("csv", "parquet", "arrow", "ndjson")}
    for file in files.values():
        tarn("statements", "query", filled, "-o", str(file))

    as_csv = tarn("statements", "query", filled, "--format", "csv").stdout

    assert [row["id"] for row in csv.DictReader(io.StringIO(as_csv))] == ids
    assert files["csv"].read_bytes().decode() == as_csv
    assert pq.read_table(files["parquet"]).column("id").to_pylist() == ids
    assert pa.ipc.open_stream(files["arrow"]).read_all().column("id").to_pylist() == ids
    assert [json.loads(line) for line in files["ndjson"].read_text().splitlines()] == lines


@pytest.mark.parametrize("form", ["csv", "parquet", "arrow", "ndjson"])
def test_what_was_written_can_be_loaded_into_another_dataset(
    tarn: Tarn, filled: str, name: str, tmp_path: Path, form: str
):
    file = str(tmp_path / f"statements.{form}")
    tarn("datasets", "create", f"{name}_copy")
    tarn("statements", "query", filled, "-o", file)

    written = tarn.json("statements", "load", f"{name}_copy", file, "--origin", "copied")

    assert (written["statements"], written["rejected"]) == (6, 0)
    assert rows(tarn("statements", "query", f"{name}_copy", "--origin", "copied").stdout) == ALL


def test_strict_load_refuses_the_statements_of_another_dataset(tarn: Tarn, filled: str, name: str):
    tarn("datasets", "create", f"{name}_copy")
    lines = tarn("statements", "query", filled).stdout

    refused = tarn("statements", "load", f"{name}_copy", "-", "--strict", stdin=lines, code=1)

    assert "(schema-violation)" in refused.stderr
    assert tarn.json("statements", "load", filled, "-", "--strict", stdin=lines)["statements"] == 6


def test_pack_is_loaded_when_it_is_called_one(tarn: Tarn, dataset: str):
    pack = "entity_id,prop,value\nann,Person:name,Ann\n"

    tarn("statements", "load", dataset, "-", stdin=pack, code=2)
    tarn("statements", "load", dataset, "-", "--format", "pack", stdin=pack)

    assert rows(tarn("statements", "get", dataset, "ann").stdout) == [("ann", "name", "Ann")]


def test_statement_is_deleted_by_its_id(tarn: Tarn, filled: str):
    doomed = json.loads(tarn("statements", "get", filled, "ann", "--prop", "country").stdout)["id"]

    assert tarn.json("statements", "delete", filled, doomed, "--origin", "other")["tombstones"] == 0
    assert tarn.json("statements", "delete", filled, doomed)["tombstones"] == 1
    assert rows(tarn("statements", "get", filled, "ann", "--prop", "country").stdout) == []


def test_unknown_property_is_the_servers_problem(tarn: Tarn, filled: str):
    refused = tarn("statements", "query", filled, "--prop", "nonsense", code=1)

    assert (refused.stdout, "(schema-violation)" in refused.stderr) == ("", True)
