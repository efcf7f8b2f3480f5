"""Files, with the server killed and clients that go away: no half file is ever seen, and a retry completes."""

import random
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any
from uuid import uuid4

import orjson
import pytest

from tests.server import Server, running

CONTENT = random.Random(3).randbytes(6 << 20)
HALF = len(CONTENT) // 2

MEMORY = 64 << 10
"""Kilobytes by which a process may grow over a large file."""

PATIENCE = 600
"""Looks at the server's log, twenty a second, after which a test fails instead of hanging."""


@pytest.fixture
def dataset(server: Server) -> str:
    """A dataset of its own on the shared server."""
    name = f"n{uuid4().hex[:12]}"
    server.client().post("/v1/datasets", json={"name": name}).raise_for_status()
    return name


def paths(client: Any, dataset: str) -> list[str]:
    found = client.get(f"/v1/datasets/{dataset}/files").raise_for_status().json()["results"]
    return [file["path"] for file in found]


def on_disk(server: Server, dataset: str) -> list[Path]:
    root = server.folder / "data" / "lake" / dataset
    return [place for folder in ("archive", "uploads") for place in (root / folder).rglob("*") if place.is_file()]


def half_sent(server: Server, dataset: str) -> socket.socket:
    """A connection over which half of a file has come, and the rest has not."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"PUT /v1/datasets/{dataset}/files?path=half HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.admin_key}"
    connection.sendall(f"{head}\r\nContent-Length: {2 * len(CONTENT)}\r\n\r\n".encode() + CONTENT)
    return connection


def await_line(server: Server, path: str, status: int) -> None:
    """Return once the log has a request that ended so; its client may not have been there to hear of it."""
    for _ in range(PATIENCE):
        lines = [orjson.loads(line) for line in server.log.read_bytes().splitlines() if path.encode() in line]
        if any((line.get("path"), line.get("status")) == (path, status) for line in lines):
            return
        Event().wait(0.05)
    raise TimeoutError(f"no request of {path} ended with {status}")


@pytest.mark.contract("W3")
def test_client_that_goes_away_leaves_no_trace(server: Server, dataset: str):
    half_sent(server, dataset).close()
    await_line(server, f"/v1/datasets/{dataset}/files", 499)

    client = server.client()
    assert (paths(client, dataset), on_disk(server, dataset)) == ([], [])
    client.put(f"/v1/datasets/{dataset}/files?path=half", content=CONTENT).raise_for_status()
    assert paths(client, dataset) == ["half"]


def test_server_killed_amid_uploads_shows_no_half_file_and_all_can_be_finished(tmp_path: Path):
    files, uploads = "/v1/datasets/test/files", "/v1/datasets/test/uploads"
    with running(tmp_path) as server:
        client = server.client()
        client.post("/v1/datasets", json={"name": "test"}).raise_for_status()
        client.put(f"{files}?path=before", content=b"before").raise_for_status()
        place = client.post(uploads, json={"length": len(CONTENT), "path": "blocks"}).headers["Location"]
        client.put(f"{place}?offset={HALF}", content=CONTENT[HALF:]).raise_for_status()
        with closing(half_sent(server, "test")):
            server.stop(signal.SIGKILL)
    with running(tmp_path) as server:
        client = server.client()
        assert paths(client, "test") == ["before"]
        assert client.get(place).json()["missing"] == [{"start": 0, "end": HALF}]

        client.put(f"{place}?offset=0", content=CONTENT[:HALF]).raise_for_status()
        committed = client.post(f"{place}/commit").raise_for_status().json()
        again = client.put(f"{files}?path=half", content=CONTENT).raise_for_status().json()

        assert committed["checksum"] == again["checksum"]
        assert client.get(f"{files}/{again['checksum']}/data").content == CONTENT
        assert paths(client, "test") == ["before", "blocks", "half"]


@pytest.mark.contract("X4")
def test_memory_does_not_grow_with_the_size_of_a_file(server: Server, dataset: str):
    files = f"/v1/datasets/{dataset}/files"

    def large(megabytes: int) -> Iterator[bytes]:
        for number in range(megabytes):
            yield number.to_bytes(4, "big") * (1 << 18)

    def peak() -> int:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0])

    client = server.client()
    client.put(f"{files}?path=warm", content=CONTENT).raise_for_status()
    before = peak()

    file = client.put(f"{files}?path=large", content=large(200)).raise_for_status().json()
    with client.stream("GET", f"{files}/{file['checksum']}/data") as answer:
        read = sum(len(chunk) for chunk in answer.iter_bytes())

    assert read == file["size"] == 200 << 20
    assert peak() - before < MEMORY
