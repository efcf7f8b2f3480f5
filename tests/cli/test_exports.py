"""Exports from the command line: omitted entities are reported."""

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
def mixed_dataset(tarn: Tarn, dataset: str, server: Server, kernel_process: ProcessPoolExecutor) -> str:
    """Create and export a dataset with one valid and three invalid entities."""
    load(tarn, dataset, "Person", "ann", "bob", "cem", "dan")
    load(tarn, dataset, "Vessel", "bob", "cem", "dan")
    make_exports(server, dataset, kernel_process)
    return dataset


def test_downloaded_export_reports_the_number_of_omitted_entities(tarn: Tarn, mixed_dataset: str, tmp_path: Path):
    left_out = (
        "tarn: 3 entities are left out of entities.ftm.json because their statements do not assemble: "
        f"`tarn entities invalid {mixed_dataset}` lists them"
    )

    printed = tarn("export", mixed_dataset, "entities", "-o", "-")
    written = tarn("export", mixed_dataset, "entities", "-o", str(tmp_path / "entities.json"))
    statements = tarn("export", mixed_dataset, "statements", "-o", str(tmp_path / "statements.csv"))

    assert [json.loads(line)["id"] for line in printed.stdout.splitlines()] == ["ann"]
    assert [printed.stderr.splitlines()[-1], written.stderr.splitlines()[-1]] == [left_out, left_out]
    assert "left out" not in statements.stderr


def test_finished_export_job_reports_the_number_of_omitted_entities(tarn: Tarn, mixed_dataset: str):
    all_kinds, one_kind = tarn("make", mixed_dataset), tarn("export", mixed_dataset, "graph")
    document = tarn.json("export", mixed_dataset, "entities")

    message = "tarn: 3 entities are left out because their statements do not assemble: "
    assert [all_kinds.stderr.splitlines()[-1][: len(message)], one_kind.stderr.splitlines()[-1][: len(message)]] == [
        message,
        message,
    ]
    assert document["result"]["invalid"] == 3
    assert {line.split()[0]: line.split()[4] for line in tarn("exports", mixed_dataset).stdout.splitlines()[1:]} == {
        "statements.csv": "-",
        "entities.ftm.json": "3",
        "statistics.json": "3",
        "documents.csv": "0",
        "graph.cypher": "3",
        "entities.delta.json": "3",
        "index.json": "-",
    }


def test_complete_export_reports_no_omitted_entities(
    tarn: Tarn, dataset: str, server: Server, kernel_process: ProcessPoolExecutor
):
    load(tarn, dataset, "Person", "ann")
    make_exports(server, dataset, kernel_process)

    assert "left out" not in tarn("export", dataset, "entities", "-o", "-").stderr
    assert "left out" not in tarn("make", dataset).stderr
