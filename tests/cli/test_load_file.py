"""`tarn load`: loads files and pipes of FtM's tools, with their format detected."""

import gzip
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Tarn
from tests.cli.test_progress import on_terminal
from tests.server import Server

JANE = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}
FACT = {"entity_id": "joe", "canonical_id": "joe", "schema": "Person", "prop": "name", "value": "Joe"}
CSV = "canonical_id,entity_id,prop,schema,value\njim,jim,name,Person,Jim\n"


@pytest.mark.parametrize(
    ("suffix", "content", "entity"),
    [
        ("ftm.json", json.dumps(JANE) + "\n", "jane"),
        ("json", json.dumps([JANE], indent=2), "jane"),
        ("ndjson", json.dumps(FACT), "joe"),
        ("json", json.dumps([FACT]), "joe"),
        ("csv", CSV, "jim"),
        ("txt", CSV, "jim"),
    ],
)
def test_load_detects_the_format_of_a_file_and_takes_the_dataset_from_its_name(
    tarn: Tarn, name: str, tmp_path: Path, suffix: str, content: str, entity: str
):
    file = tmp_path / f"{name}.{suffix}"
    file.write_text(content)

    tarn("load", str(file), "--create", "--origin", "crawl")

    assert tarn.json("entities", "get", name, entity)["origin"] == ["crawl"]


def test_load_reads_pipes_and_compressed_files_into_the_named_dataset(tarn: Tarn, dataset: str, tmp_path: Path):
    file = tmp_path / "entities.ftm.json.gz"
    file.write_bytes(gzip.compress(json.dumps(JANE).encode()))

    piped = tarn.json("load", "--dataset", dataset, stdin=json.dumps(JANE | {"id": "joe"}))
    read = tarn.json("load", str(file), "-d", dataset, "--create")

    assert (piped["entities"], read["entities"]) == (1, 1)
    assert len(tarn("entities", "query", dataset).stdout.splitlines()) == 2


def test_load_without_a_dataset_or_of_an_unknown_format_changes_nothing(tarn: Tarn, name: str, tmp_path: Path):
    (tmp_path / name).write_bytes(b"what is this")
    (tmp_path / f"{name}.json").write_text(json.dumps(JANE))

    nowhere = tarn("load", stdin=json.dumps(JANE), code=2)
    unknown = tarn("load", str(tmp_path / name), "--create", code=2)
    missing = tarn("load", str(tmp_path / f"{name}.json"), code=1)

    assert "give --dataset" in nowhere.stderr
    assert "has no recognizable format" in unknown.stderr
    assert "(dataset-not-found)" in missing.stderr
    tarn("datasets", "show", name, code=1)


def test_load_shows_the_number_of_rows_on_a_terminal(server: Server, dataset: str, tmp_path: Path):
    people = [JANE | {"id": f"p{number}"} for number in range(2000)]
    file = tmp_path / f"{dataset}.ftm.json"
    file.write_text("".join(f"{json.dumps(person)}\n" for person in people))

    code, printed, seen = on_terminal(server, "load", str(file))

    assert (code, "2000" in printed) == (0, True)
    assert f"loading entities into {dataset}" in seen
    assert "2,000 rows, " in seen


UNCLEAN = JANE | {"properties": {"name": ["Jane Doe"], "country": ["Atlantis"]}, "collection_id": 7}


def test_load_stores_uncleaned_values_and_reports_ignored_fields(tarn: Tarn, dataset: str):
    loaded = tarn("load", "--dataset", dataset, stdin=json.dumps(UNCLEAN))

    assert tarn.json("entities", "get", dataset, "jane")["properties"]["country"] == ["Atlantis"]
    assert "fields ignored: collection_id 1" in loaded.stderr


def test_load_reports_omitted_values(tarn: Tarn, dataset: str):
    cleaned = tarn("load", "--dataset", dataset, "--values", "clean", stdin=json.dumps(UNCLEAN))
    refused = tarn("load", "--dataset", dataset, "--values", "clean", "--strict", stdin=json.dumps(UNCLEAN), code=1)

    assert "left out: line 1, Person:country: 'Atlantis' (rejected by FollowTheMoney's cleaning of country)" in (
        cleaned.stderr
    )
    assert "values left out: 1 (Person:country 1)" in cleaned.stderr
    assert "Atlantis" in refused.stderr


def test_load_applies_the_changes_of_a_diff(tarn: Tarn, dataset: str):
    tarn("load", "--dataset", dataset, stdin=json.dumps(JANE) + "\n" + json.dumps(JANE | {"id": "joe"}))
    changes = [
        {"op": "DEL", "id": "joe", "entity": JANE | {"id": "joe"}},
        {"op": "ADD", "entity": JANE | {"id": "jim"}},
    ]

    loaded = tarn.json("load", "--dataset", dataset, stdin="\n".join(json.dumps(change) for change in changes))

    assert (loaded["entities"], loaded["deleted"]) == (1, 1)
    ids = [json.loads(line)["id"] for line in tarn("entities", "query", dataset).stdout.splitlines()]
    assert ids == ["jane", "jim"]
