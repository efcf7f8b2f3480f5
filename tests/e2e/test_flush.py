"""From a POST to a snapshot end to end: a server, its worker, Spark and the command line."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from deltalake import DeltaTable

from tests.server import Server, clean_environment, running

JANE = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}


def tarn(server: Server, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tarn.cli", *arguments],
        cwd=server.folder,
        env=clean_environment(TARN_URL=server.url, TARN_KEY=server.admin_key),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.xdist_group("spark")
def test_written_entities_are_flushed_shown_and_readable_without_the_server(tmp_path: Path):
    # The first flush starts Spark, which takes a while where other tests run.
    with running(tmp_path, TARN_FLUSH_AGE="1", TARN_COMMIT_WAIT="300") as server:
        client = server.client()
        client.timeout = 330
        assert client.post("/v1/datasets", json={"name": "leaks"}).status_code == 201
        written = client.post("/v1/datasets/leaks/entities?commit=wait_for&origin=crawl", json=[JANE]).json()
        client.post("/v1/datasets/leaks/entities?origin=crawl", json=[JANE | {"id": "john"}])
        tarn(server, "flush", "leaks")
        log = json.loads(tarn(server, "log", "leaks", "--json"))
        shown = json.loads(tarn(server, "snapshot", "show", "leaks", "--json"))
        spark = [
            child for child in psutil.Process(server.process.pid).children(recursive=True) if "java" in child.name()
        ]
        assert server.stop() == 0

    assert written["snapshot"]["seq"] == 1
    assert [entry["seq"] for entry in log] == [2, 1]
    assert (shown["seq"], shown["rows"]["live"]) == (2, 4)
    assert len(spark) == 1
    assert not any(child.is_running() for child in spark)
    table = DeltaTable(str(tmp_path / "data" / "lake" / "leaks" / "entities" / "statements"))
    assert sorted(table.to_pyarrow_table()["entity_id"].to_pylist()) == ["jane", "jane", "john", "john"]
