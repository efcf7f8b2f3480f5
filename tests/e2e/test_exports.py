"""Exports end to end: requested on the command line, written by Spark, downloaded, and repaired after a worker was
killed.
"""

import json
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_flush import tarn
from tests.server import running
from tests.waiting import wait_until

pytestmark = pytest.mark.long


@pytest.mark.xdist_group("spark")
def test_exports_are_written_downloaded_and_rewritten_after_the_worker_was_killed(tmp_path: Path):
    with running(tmp_path, TARN_LEASE_SECONDS="2") as server:
        client = server.client()
        client.timeout = 120
        client.post("/v1/datasets", json={"name": "leaks"}).raise_for_status()
        people = [
            {"id": f"p{number:03}", "schema": "Person", "properties": {"name": [f"P {number}"]}}
            for number in range(300)
        ]
        client.post("/v1/datasets/leaks/entities?origin=crawl", json=people[:200]).raise_for_status()
        export_job = json.loads(tarn(server, "make", "leaks", "--json"))
        first = tarn(server, "export", "leaks", "entities", "-o", "-")
        listed = json.loads(tarn(server, "exports", "leaks", "--json"))
        client.post("/v1/datasets/leaks/entities?origin=crawl", json=people[200:]).raise_for_status()
        requested = client.post("/v1/datasets/leaks/operations/make").raise_for_status().json()
        (worker,) = (child for child in psutil.Process(server.process.pid).children() if "worker" in child.cmdline())
        wait_until(lambda: client.get(f"/v1/jobs/{requested['id']}").json()["state"] != "queued", 300)
        for process in [*worker.children(recursive=True), worker]:
            process.send_signal(signal.SIGKILL)
        between = client.get("/v1/datasets/leaks/exports/entities.ftm.json").content.splitlines()
        tarn(server, "export", "leaks", "statements.csv", "-o", "out.csv")
        tarn(server, "make", "leaks")
        second = client.get("/v1/datasets/leaks/exports/entities.ftm.json").content
        read = client.get("/v1/datasets/leaks/entities/stream").content
        fresh = client.get("/v1/datasets/leaks/freshness").json()["exports"]
        (done,) = (job for job in client.get("/v1/jobs").json()["results"] if job["id"] == requested["id"])
        assert server.stop() == 0

    assert [one["kind"] for one in export_job["result"]["made"]] == [one["kind"] for one in listed]
    assert len(first.splitlines()) == 200
    assert len(between) in (200, 300)
    assert second == read
    assert len(second.splitlines()) == 300
    assert len((tmp_path / "out.csv").read_bytes().splitlines()) == 601
    assert all(one["fresh"] for one in fresh)
    assert done["state"] in ("done", "running", "queued")
