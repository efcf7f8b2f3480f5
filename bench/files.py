"""Benchmark of file uploads: speed over loopback compared with `sha256sum`, and the server's memory growth."""

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
"""Target: upload speed as a share of the speed of `sha256sum`."""
MAX_GROWTH_MB = 64.0
"""Maximum memory growth of the server during uploads, in megabytes."""
REPEATS = 3


def run() -> dict[str, Any]:
    """Measure on SQLite and a local disk, best of `REPEATS` runs."""
    with tempfile.TemporaryDirectory() as name:
        home, source = Path(name) / "home", Path(name) / "source"
        home.mkdir()
        with source.open("wb") as file:
            for _ in range(SIZE // BLOCK):
                file.write(os.urandom(BLOCK))
        size = source.stat().st_size
        hash_seconds = min(_hash(source) for _ in range(REPEATS))
        with running(home) as server:
            server.client().post("/v1/datasets", json={"name": "files"}).raise_for_status()
            _upload(server, source, "warm", 8 * BLOCK)
            process = psutil.Process(server.process.pid)
            before = process.memory_info().rss
            with watched(process) as peak:
                upload_seconds = min(_upload(server, source, f"{number}", size) for number in range(REPEATS))
    results = {
        "MB": size / 1e6,
        "sha256sum MB/s": size / 1e6 / hash_seconds,
        "upload MB/s": size / 1e6 / upload_seconds,
        "upload / sha256sum": hash_seconds / upload_seconds,
        "growth of the server MB": (peak[0] - before) / 1e6,
    }
    met = results["upload / sha256sum"] >= SPEED_TARGET and results["growth of the server MB"] < MAX_GROWTH_MB
    return results | {"met": met}


def _hash(path: Path) -> float:
    start = time.perf_counter()
    subprocess.run(["sha256sum", path], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def _upload(server: Server, source: Path, path: str, size: int) -> float:
    """Upload a file with little overhead in the client; return the seconds."""
    host, port = server.url.removeprefix("http://").split(":")
    head = f"PUT /v1/datasets/files/files?path={path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {size}\r\n"
    with socket.create_connection((host, int(port))) as connection, source.open("rb") as file:
        start = time.perf_counter()
        connection.sendall(f"{head}Authorization: Bearer {server.admin_key}\r\n\r\n".encode())
        connection.sendfile(file, count=size)
        answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 201"), answer
        return time.perf_counter() - start
