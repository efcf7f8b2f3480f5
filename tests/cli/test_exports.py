"""Exports from the command line: what they leave out is told."""

import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.cli.conftest import Tarn
from tests.exporting import make_exports
from tests.server import Server


def load(tarn: Tarn, dataset: str, schema: str, *names: str) -> None:
    lines = "".join(json.dumps({"id": name, "schema": schema, "properties": {}}) + "\n" for name in names)
    tarn("entities", "load", dataset, "-", "--origin", schema.lower(), stdin=lines)


@pytest.fixture
def disagreeing(tarn: Tarn, dataset: str, server: Server, kernel_process: ProcessPoolExecutor) -> str:
    """A dataset of which three entities do not assemble, exported."""
    load(tarn, dataset, "Person", "ann", "bob", "cem", "dan")
    load(tarn, dataset, "Vessel", "bob", "cem", "dan")
    make_exports(server, dataset, kernel_process)
    return dataset


def test_export_ends_with_the_number_of_entities_that_the_file_leaves_out(tarn: Tarn, disagreeing: str, tmp_path: Path):
    left_out = (
        "tarn: 3 entities are left out of entities.ftm.json because their statements do not assemble: "
        f"`tarn entities invalid {disagreeing}` lists them"
    )

    printed = tarn("export", disagreeing, "entities", "-o", "-")
    written = tarn("export", disagreeing, "entities", "-o", str(tmp_path / "entities.json"))
    statements = tarn("export", disagreeing, "statements", "-o", str(tmp_path / "statements.csv"))

    assert [json.loads(line)["id"] for line in printed.stdout.splitlines()] == ["ann"]
    assert [printed.stderr.splitlines()[-1], written.stderr.splitlines()[-1]] == [left_out, left_out]
    assert "left out" not in statements.stderr


def test_job_that_exports_tells_how_many_entities_its_files_leave_out(tarn: Tarn, disagreeing: str):
    made, one = tarn("make", disagreeing), tarn("export", disagreeing, "graph")
    document = tarn.json("export", disagreeing, "entities")

    told = "tarn: 3 entities are left out because their statements do not assemble: "
    assert [made.stderr.splitlines()[-1][: len(told)], one.stderr.splitlines()[-1][: len(told)]] == [told, told]
    assert document["result"]["invalid"] == 3
    assert {line.split()[0]: line.split()[4] for line in tarn("exports", disagreeing).stdout.splitlines()[1:]} == {
        "statements.csv": "-",
        "entities.ftm.json": "3",
        "statistics.json": "3",
        "documents.csv": "0",
        "graph.cypher": "3",
        "entities.delta.json": "3",
        "index.json": "-",
    }


def test_export_that_leaves_nothing_out_says_nothing_of_it(
    tarn: Tarn, dataset: str, server: Server, kernel_process: ProcessPoolExecutor
):
    load(tarn, dataset, "Person", "ann")
    make_exports(server, dataset, kernel_process)

    assert "left out" not in tarn("export", dataset, "entities", "-o", "-").stderr
    assert "left out" not in tarn("make", dataset).stderr
