"""Benchmark of reads over HTTP: single entities, streams of entities and statements, and many readers with a writer."""

import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
import orjson

from bench.clients import QUIET, Requests, request_sequentially
from bench.data import entities
from bench.peer import figures
from tests.server import Server, running

COUNT = 100_000
LOOKUPS = 1_000
UNFLUSHED = 50_000
LOOKUP_TARGET = 3.0
"""Target: the peer's time for one entity, in process, divided by ours."""
MAX_P99_MS = 50.0
"""Maximum p99, in milliseconds, of reading one entity while UNFLUSHED rows are in the journal."""
STREAM_TARGET = 5.0
"""Target: entities/s of the stream divided by the peer's."""
CSV_TARGET = 200_000.0
"""Target: statements/s of the CSV stream."""
READERS, SECONDS = 16, 8.0
WRITER_TARGET = 0.75
"""Target: speed of a writer with concurrent readers, as a share of its speed alone."""


def run() -> dict[str, Any]:
    """Measure on SQLite and a local disk."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        path = entities(COUNT, Path(name))
        peer = figures(path)
        ids = [orjson.loads(line)["id"] for line in path.open("rb")]
        home = Path(name) / "home"
        home.mkdir()
        with running(home, "serve", **QUIET) as server:
            _load(server, "big", path.read_bytes())
            _flush(server, "big")
            results |= _lookups(server, ids, "get")
            results |= _streams(server)
            results |= _with_readers(server, ids)
            _load(server, "big", _people("late", UNFLUSHED // 5))
            late = [f"late-{number}" for number in range(0, UNFLUSHED // 5, 50)]
            results |= _lookups(server, [*ids[:: COUNT // 800], *late], f"get with {UNFLUSHED} unflushed")
    if peer is not None:
        own = results["get p50 ms"]
        results["peer get ms"] = peer["seconds"]["get"] * 1000
        results["peer get / ours"] = results["peer get ms"] / own
        results["peer entities/s"] = peer["entities"] / peer["seconds"]["export_entities"]
        results["entities/s / the peer's"] = results["entities/s"] / results["peer entities/s"]
    results["met"] = (
        results.get("peer get / ours", LOOKUP_TARGET) >= LOOKUP_TARGET
        and results[f"get with {UNFLUSHED} unflushed p99 ms"] < MAX_P99_MS
        and results.get("entities/s / the peer's", STREAM_TARGET) >= STREAM_TARGET
        and results["statements/s as CSV"] >= CSV_TARGET
        and results["writer with 16 readers / alone"] >= WRITER_TARGET
    )
    return results


def _lookups(server: Server, ids: list[str], name: str) -> dict[str, Any]:
    requested = itertools.islice(itertools.cycle(ids[:: max(1, len(ids) // LOOKUPS)]), LOOKUPS + 50)
    times = request_sequentially(server, (f"/v1/datasets/big/entities/{entity_id}" for entity_id in requested))[50:]
    ranked = sorted(times)
    return {
        f"{name} p50 ms": statistics.median(times) * 1000,
        f"{name} p99 ms": ranked[int(len(ranked) * 0.99)] * 1000,
    }


def _streams(server: Server) -> dict[str, Any]:
    rates = {}
    for label, path, accept in (
        ("entities/s", "entities/stream", "application/x-ndjson"),
        ("statements/s as CSV", "statements/stream", "text/csv"),
    ):
        best = 0.0
        for _ in range(3):
            lines, start = 0, time.perf_counter()
            with httpx.stream(
                "GET",
                f"{server.url}/v1/datasets/big/{path}",
                headers={"Authorization": f"Bearer {server.admin_key}", "Accept": accept},
                timeout=600,
            ) as answer:
                answer.raise_for_status()
                for chunk in answer.iter_raw():
                    lines += chunk.count(b"\n")
            best = max(best, lines / (time.perf_counter() - start))
        rates[label] = best
    return rates


def _with_readers(server: Server, ids: list[str]) -> dict[str, Any]:
    """Measure statements/s of a client that writes bodies in sequence: alone, with readers, and alone again."""
    server.client().post("/v1/datasets", json={"name": "concurrent"}).raise_for_status()
    bodies = itertools.cycle(_people(f"b{number}", 2_000) for number in range(20))
    headers = {"Authorization": f"Bearer {server.admin_key}", "Content-Type": "application/x-ndjson"}
    path = f"{server.url}/v1/datasets/concurrent/entities"

    def rate() -> float:
        written, start = 0, time.perf_counter()
        with httpx.Client(headers=headers, timeout=600) as client:
            while time.perf_counter() - start < SECONDS:
                answer = client.post(path, content=next(bodies))
                answer.raise_for_status()
                written += int(answer.json()["statements"])
        return written / (time.perf_counter() - start)

    rate()
    before = rate()
    with _reading(server, ids) as read:
        loaded = rate()
    after = rate()
    return {
        "writer alone statements/s": (before + after) / 2,
        "writer with 16 readers / alone": loaded * 2 / (before + after),
        "16 readers gets/s": read[0] / SECONDS,
    }


@contextmanager
def _reading(server: Server, ids: list[str]) -> Iterator[list[int]]:
    """Run readers in a child process while the context is open, each sending requests without a pause."""
    context = multiprocessing.get_context("spawn")
    done, counted = context.Event(), context.Value("q", 0)
    read = [0]
    process = context.Process(target=_read, args=(server.url, server.admin_key, ids[::97], done, counted))
    process.start()
    while not counted.value:
        time.sleep(0.05)
    yield read
    read[0] = counted.value
    done.set()
    process.join()


def _read(url: str, key: str, ids: list[str], done: Event, counted: Any) -> None:
    paths = (f"/v1/datasets/big/entities/{entity_id}" for entity_id in itertools.cycle(ids))
    with Requests(url, key, READERS, paths) as readers:
        while not done.is_set():
            readers.poll()
            counted.value = readers.answered


def _load(server: Server, dataset: str, body: bytes) -> int:
    client = server.client()
    if client.get(f"/v1/datasets/{dataset}").status_code == 404:
        client.post("/v1/datasets", json={"name": dataset}).raise_for_status()
    answer = httpx.post(
        f"{server.url}/v1/datasets/{dataset}/entities",
        content=body,
        headers={"Authorization": f"Bearer {server.admin_key}", "Content-Type": "application/x-ndjson"},
        timeout=600,
    )
    answer.raise_for_status()
    return int(answer.json()["statements"])


def _flush(server: Server, dataset: str) -> None:
    answer = server.client().post(f"/v1/datasets/{dataset}/operations/flush?wait=300", timeout=400)
    answer.raise_for_status()
    assert answer.json()["state"] == "done", answer.text


def _people(prefix: str, count: int) -> bytes:
    return b"".join(
        orjson.dumps(
            {
                "id": f"{prefix}-{number}",
                "schema": "Person",
                "properties": {
                    "name": [f"{prefix} {number}"],
                    "birthDate": ["1970-01-01"],
                    "country": ["de"],
                    "summary": [f"number {number}"],
                },
            }
        )
        + b"\n"
        for number in range(count)
    )
