"""Files when the server is killed or clients disconnect: partial files are never visible, and retries complete."""

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
"""Kilobytes by which a process may grow while it transfers a large file."""

MAX_POLLS = 600
"""Polls of the server's log, twenty a second, after which a test fails instead of hanging."""


@pytest.fixture
def dataset(server: Server) -> str:
    """Create a dataset for this test on the shared server; return its name."""
    name = f"n{uuid4().hex[:12]}"
    server.client().post("/v1/datasets", json={"name": name}).raise_for_status()
    return name


def paths(client: Any, dataset: str) -> list[str]:
    files = client.get(f"/v1/datasets/{dataset}/files").raise_for_status().json()["results"]
    return [file["path"] for file in files]


def stored_files(server: Server, dataset: str) -> list[Path]:
    root = server.folder / "data" / "lake" / dataset
    return [path for folder in ("archive", "uploads") for path in (root / folder).rglob("*") if path.is_file()]


def send_half_of_file(server: Server, dataset: str) -> socket.socket:
    """Open a connection and send the first half of a file."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"PUT /v1/datasets/{dataset}/files?path=half HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.admin_key}"
    connection.sendall(f"{head}\r\nContent-Length: {2 * len(CONTENT)}\r\n\r\n".encode() + CONTENT)
    return connection


def wait_for_log_line(server: Server, path: str, status: int) -> None:
    """Wait until the log has a request with this path and status, whose client may have disconnected."""
    for _ in range(MAX_POLLS):
        lines = [orjson.loads(line) for line in server.log.read_bytes().splitlines() if path.encode() in line]
        if any((line.get("path"), line.get("status")) == (path, status) for line in lines):
            return
        Event().wait(0.05)
    raise TimeoutError(f"no request for {path} ended with status {status}")


@pytest.mark.contract("W3")
def test_upload_whose_client_disconnects_leaves_nothing(server: Server, dataset: str):
    send_half_of_file(server, dataset).close()
    wait_for_log_line(server, f"/v1/datasets/{dataset}/files", 499)

    client = server.client()
    assert (paths(client, dataset), stored_files(server, dataset)) == ([], [])
    client.put(f"/v1/datasets/{dataset}/files?path=half", content=CONTENT).raise_for_status()
    assert paths(client, dataset) == ["half"]


def test_server_killed_during_uploads_shows_no_partial_file_and_uploads_can_be_completed(tmp_path: Path):
    files, uploads = "/v1/datasets/test/files", "/v1/datasets/test/uploads"
    with running(tmp_path) as server:
        client = server.client()
        client.post("/v1/datasets", json={"name": "test"}).raise_for_status()
        client.put(f"{files}?path=before", content=b"before").raise_for_status()
        upload = client.post(uploads, json={"length": len(CONTENT), "path": "blocks"}).headers["Location"]
        client.put(f"{upload}?offset={HALF}", content=CONTENT[HALF:]).raise_for_status()
        with closing(send_half_of_file(server, "test")):
            server.stop(signal.SIGKILL)
    with running(tmp_path) as server:
        client = server.client()
        assert paths(client, "test") == ["before"]
        assert client.get(upload).json()["missing"] == [{"start": 0, "end": HALF}]

        client.put(f"{upload}?offset=0", content=CONTENT[:HALF]).raise_for_status()
        committed = client.post(f"{upload}/commit").raise_for_status().json()
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
    with client.stream("GET", f"{files}/{file['checksum']}/data") as response:
        read = sum(len(chunk) for chunk in response.iter_bytes())

    assert read == file["size"] == 200 << 20
    assert peak() - before < MEMORY
