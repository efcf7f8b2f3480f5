"""A crawl on Spark whose worker is killed midway: another worker completes it with the same result."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.archive.web import answer, page, scripted
from tests.cli.conftest import Tarn
from tests.server import running

pytestmark = pytest.mark.long

TIMEOUT = 300
"""Seconds after which the test fails instead of hanging."""

NAMES = [f"{number}.txt" for number in range(8)]


@pytest.mark.xdist_group("spark")
def test_worker_killed_during_a_crawl_leaves_no_partial_file_and_another_completes_it(tmp_path: Path):
    halfway, killed = threading.Event(), threading.Event()

    def partial_response() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"
        halfway.set()
        killed.wait(TIMEOUT)

    environment = {"TARN_FETCH_PRIVATE_HOSTS": "127.0.0.1", "TARN_WORKER_SILENT_AFTER": "3"}
    with scripted() as web, running(tmp_path, **environment) as server:
        web.scripts = {"/files/": page(*NAMES)} | {f"/files/{name}": answer(name.encode()) for name in NAMES}
        web.scripts["/files/5.txt"] = partial_response
        client = server.client()
        client.post("/v1/datasets", json={"name": "test"}).raise_for_status()
        uri = f"http://127.0.0.1:{web.port}/files/"
        location = client.post("/v1/datasets/test/operations/crawl", json={"uri": uri}).headers["Location"]
        assert halfway.wait(TIMEOUT)
        (worker,) = (child for child in psutil.Process(server.process.pid).children() if "worker" in child.cmdline())
        worker.send_signal(signal.SIGKILL)
        seen = client.get("/v1/datasets/test/files").json()["results"]
        web.scripts["/files/5.txt"] = answer(b"5.txt")
        killed.set()

        tarn = Tarn(server.url, server.admin_key)
        job = tarn.json("jobs", "show", location.rsplit("/", 1)[-1], "--wait", str(TIMEOUT))

        # The next worker skips the files that a task of the dead worker stored, which may be all of them.
        result = job["result"]
        assert (job["state"], result["files"] + result["skipped"], result["failed"]) == ("done", 8, 0), job
        assert result["files"] <= 8 - len(seen)
        files = client.get("/v1/datasets/test/files").json()["results"]
        assert [file["path"] for file in files] == NAMES
        assert {file["size"] for file in files} == {5}
        found = client.get("/v1/datasets/test/entities?limit=100").json()["results"]
        assert [entity["schema"] for entity in found] == ["PlainText"] * 8

        again = tarn.json("crawl", "test", uri, "--exclude", "7*", "--quiet")
        assert (again["result"]["skipped"], again["result"]["files"]) == (7, 0)
