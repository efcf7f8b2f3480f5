"""Mappings from the command line."""

import hashlib
from pathlib import Path

import pytest

from tests.cli.conftest import Tarn
from tests.server import Server, running

YAML = """
people: &people
  queries:
    - entities:
        person:
          schema: Person
          key: id
          properties: {name: {column: name}, country: {literal: no}}
"""
DATA = b"id,name\n1,Ann\n2,Bob\n"
HASH = hashlib.sha256(DATA).hexdigest()


def archive_file(server: Server, dataset: str) -> None:
    folder = server.folder / "data/lake" / dataset / "archive" / HASH[0:2] / HASH[2:4] / HASH[4:6] / HASH
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(DATA)


def test_mapping_is_put_listed_and_shown(tarn: Tarn, dataset: str):
    tarn("mapping", "put", dataset, HASH, "-", stdin=YAML)

    assert [one["content_hash"] for one in tarn.json("mapping", "ls", dataset)] == [HASH]
    shown = tarn.json("mapping", "get", dataset, HASH)
    assert shown["origin"] == f"mapping:{HASH}"
    assert shown["queries"][0]["entities"]["person"]["properties"]["country"]["literals"] == ["no"]


def test_invalid_mapping_is_refused_with_its_field(tarn: Tarn, dataset: str):
    refused = tarn("mapping", "put", dataset, HASH, "-", stdin=YAML.replace("Person", "Parson"), code=1)
    assert "queries.0.entities.person.schema" in refused.output
    assert "is neither YAML nor JSON" in tarn("mapping", "put", dataset, HASH, "-", stdin="a: [", code=2).output


def test_run_for_a_missing_file_is_refused(tarn: Tarn, dataset: str):
    tarn("mapping", "put", dataset, HASH, "-", stdin=YAML)

    assert "there is no file" in tarn("mapping", "run", dataset, HASH, code=1).output


@pytest.mark.long
def test_run_waits_for_its_job_and_prints_the_result(tmp_path: Path):
    with running(tmp_path) as server:
        tarn = Tarn(server.url, server.admin_key)
        tarn("datasets", "create", "people")
        archive_file(server, "people")
        tarn("mapping", "put", "people", HASH, "-", stdin=YAML)

        job = tarn.json("mapping", "run", "people", HASH, "--encoding", "ascii")

        assert (job["state"], job["result"]["rows"], job["result"]["entities"]) == ("done", 2, 2)
        assert "neither" in tarn("mapping", "run", "people", HASH, "--encoding", "ascii").stdout
        assert len(tarn("entities", "query", "people").stdout.splitlines()) == 2
        tarn("mapping", "put", "people", HASH, "-", stdin=YAML.replace("literal: no", "literal: Atlantis"))
        result = tarn("mapping", "run", "people", HASH)
        assert "2 values were left out: Person:country 2; the first: line 2, Person:country 'Atlantis'" in result.output
        assert "Atlantis" not in result.stdout
