"""Files: a large upload over loopback beside `sha256sum` of the same file, and what the server grows by over it."""

import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.ingest import watched
from tests.server import Server, running

SIZE = int(os.environ.get("FILE_BYTES", str(10**9)))
BLOCK = 1 << 20
SPEED_TARGET = 0.5
"""Of the speed of `sha256sum`."""
MAX_GROWTH_MB = 64.0
"""Megabytes."""
REPEATS = 3


def run() -> dict[str, Any]:
    """Every figure on SQLite and a local disk, the best of some times."""
    with tempfile.TemporaryDirectory() as name:
        home, source = Path(name) / "home", Path(name) / "source"
        home.mkdir()
        with source.open("wb") as file:
            for _ in range(SIZE // BLOCK):
                file.write(os.urandom(BLOCK))
        size = source.stat().st_size
        hashing = min(_hash(source) for _ in range(REPEATS))
        with running(home) as server:
            server.client().post("/v1/datasets", json={"name": "files"}).raise_for_status()
            _upload(server, source, "warm", 8 * BLOCK)
            process = psutil.Process(server.process.pid)
            before = process.memory_info().rss
            with watched(process) as peak:
                sending = min(_upload(server, source, f"{number}", size) for number in range(REPEATS))
    results = {
        "MB": size / 1e6,
        "sha256sum MB/s": size / 1e6 / hashing,
        "upload MB/s": size / 1e6 / sending,
        "upload / sha256sum": hashing / sending,
        "growth of the server MB": (peak[0] - before) / 1e6,
    }
    met = results["upload / sha256sum"] >= SPEED_TARGET and results["growth of the server MB"] < MAX_GROWTH_MB
    return results | {"met": met}


def _hash(path: Path) -> float:
    begun = time.perf_counter()
    subprocess.run(["sha256sum", path], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def _upload(server: Server, source: Path, path: str, size: int) -> float:
    """The seconds that an upload takes, at so little cost to its client that the server is what is measured."""
    host, port = server.url.removeprefix("http://").split(":")
    head = f"PUT /v1/datasets/files/files?path={path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {size}\r\n"
    with socket.create_connection((host, int(port))) as connection, source.open("rb") as file:
        begun = time.perf_counter()
        connection.sendall(f"{head}Authorization: Bearer {server.admin_key}\r\n\r\n".encode())
        connection.sendfile(file, count=size)
        answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 201"), answer
        return time.perf_counter() - begun
