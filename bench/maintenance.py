"""Benchmark of maintenance over HTTP: duration and disk use of compactions, and reads with automatic maintenance."""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import orjson

from bench.clients import QUIET, request_sequentially
from bench.data import entities
from bench.peer import figures
from tests.server import Server, running

COUNT = int(os.environ.get("MAINTAIN_ENTITIES", "100000"))
SEEN_AGAIN, DELETED = 10, 20
"""One entity in this many is seen again, or deleted."""
CHANGED, MAX_PARTIAL_SHARE = 100, 1 / 3
"""One entity in this many is changed, and the maximum duration of the following compaction: a share of the peer's
settle time or, without the peer, of our own full compaction, which is much shorter."""
FLUSHES, STATEMENTS_PER_FLUSH = int(os.environ.get("MAINTAIN_FLUSHES", "200")), 50
MAX_SLOWDOWN = 1.5
"""Maximum ratio of read times to those of a freshly compacted dataset."""
GETS = 500
CONNECTIONS = 4
MAINTENANCE_INTERVAL = 2.0


def run() -> dict[str, Any]:
    """Measure on SQLite and a local disk, on one warm Spark session."""
    results: dict[str, Any] = {"entities": COUNT}
    with tempfile.TemporaryDirectory() as name:
        path = entities(COUNT, Path(name))
        peer = figures(path)
        lines = path.read_bytes().splitlines()
        home = Path(name) / "home"
        home.mkdir()
        with running(home, "serve", **QUIET, TARN_MAINTENANCE_INTERVAL=str(MAINTENANCE_INTERVAL)) as server:
            results |= _size(BenchDataset(server, "same"), lines)
            store = BenchDataset(server, "full")
            results |= _full(store, lines)
            results |= _partial(store, lines, results["full compaction s"])
            results |= _maintained(BenchDataset(server, "daily"), lines)
    if peer is not None:
        results["peer settle s"] = peer["seconds"]["settle"]
        results["full compaction / the peer's settle"] = results["full compaction s"] / results["peer settle s"]
        results["peer MB"] = peer["bytes"] / 1e6
        results["MB / the peer's"] = results["MB"] / results["peer MB"]
        for name in ("of neighbours", "scattered"):
            results[f"after 1 % {name} / the peer's settle"] = results[f"after 1 % {name} s"] / results["peer settle s"]
    against = "full" if peer is None else "the peer's settle"
    results["met"] = (
        results.get("full compaction / the peer's settle", 1.0) <= 1.0
        and results.get("MB / the peer's", 1.0) <= 1.0
        and results[f"after 1 % of neighbours / {against}"] <= MAX_PARTIAL_SHARE
        and results[f"after 1 % scattered / {against}"] <= MAX_PARTIAL_SHARE
        and results["get maintained / compacted"] <= MAX_SLOWDOWN
        and results["stream compacted / maintained"] <= MAX_SLOWDOWN
    )
    return results


class BenchDataset:
    """A dataset without automatic maintenance, and the requests that benchmarks send for it."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.path = f"/v1/datasets/{name}"
        self._client = server.client()
        self._client.timeout = httpx.Timeout(600)
        self._client.post("/v1/datasets", json={"name": name, "policy": {"maintain": False}}).raise_for_status()

    def enable_maintenance(self) -> None:
        """Turn automatic maintenance on."""
        self._client.patch(self.path, json={"policy": {"maintain": True}}).raise_for_status()

    def add(self, lines: Sequence[bytes], commit: str = "auto") -> None:
        answer = self._client.post(
            f"{self.path}/entities?commit={commit}",
            content=b"\n".join(lines),
            headers={"Content-Type": "application/x-ndjson"},
        )
        answer.raise_for_status()
        assert commit == "auto" or answer.status_code == 200, answer.text

    def delete(self, ids: Sequence[str]) -> None:
        """Delete entities, one request each: there is no bulk delete by id."""

        def delete_some(some_ids: Sequence[str]) -> None:
            with httpx.Client(base_url=self.server.url, headers=self._client.headers, timeout=60) as client:
                for entity_id in some_ids:
                    client.delete(f"{self.path}/entities/{entity_id}").raise_for_status()

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(delete_some, [ids[number::CONNECTIONS] for number in range(CONNECTIONS)]))

    def operate(self, operation: str, **options: Any) -> tuple[float, dict[str, Any]]:
        """Run an operation; return the seconds from its start to its end, and its result."""
        return self._done(f"{self.path}/operations/{operation}", options)

    def map(self, content_hash: str, mapping: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """Store and process a mapping; return the seconds from start to end, and its result."""
        path = f"{self.path}/mappings/{content_hash}"
        self._client.put(path, json=mapping).raise_for_status()
        return self._done(f"{path}/process", {})

    def _done(self, path: str, options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        answer = self._client.post(f"{path}?wait=300", json=options)
        answer.raise_for_status()
        job = answer.json()
        assert job["state"] == "done", job
        seconds_taken = datetime.fromisoformat(job["finished"]) - datetime.fromisoformat(job["started"])
        return seconds_taken.total_seconds(), job["result"]

    def wait_until_idle(self) -> None:
        """Wait until no job has been queued or running for three maintenance intervals."""
        quiet = 0.0
        while quiet < 3 * MAINTENANCE_INTERVAL:
            time.sleep(0.5)
            jobs = self._client.get("/v1/admin/worker").raise_for_status().json()["jobs"]
            quiet = 0.0 if any(job["state"] in ("queued", "running") for job in jobs) else quiet + 0.5

    def get_p50(self, ids: Sequence[str]) -> float:
        """Return the median milliseconds for reading one entity."""
        requested = itertools.islice(itertools.cycle(ids[:: max(1, len(ids) // GETS)]), GETS + 50)
        times = request_sequentially(self.server, (f"{self.path}/entities/{entity_id}" for entity_id in requested))
        return statistics.median(times[50:]) * 1000

    def stream_rate(self) -> float:
        """Stream all entities; return entities/s, best of three runs."""
        best = 0.0
        for _ in range(3):
            lines, start = 0, time.perf_counter()
            with self._client.stream("GET", f"{self.path}/entities/stream") as answer:
                answer.raise_for_status()
                for chunk in answer.iter_raw():
                    lines += chunk.count(b"\n")
            best = max(best, lines / (time.perf_counter() - start))
        return best

    def head(self) -> dict[str, Any]:
        snapshot: dict[str, Any] = self._client.get(f"{self.path}/snapshots/latest").raise_for_status().json()
        return snapshot


def _size(store: BenchDataset, lines: list[bytes]) -> dict[str, Any]:
    """Measure the size, in megabytes, of the peer's data after a compaction. This also warms Spark up."""
    store.add(lines)
    store.operate("flush")
    store.operate("compact", force=True)
    head = store.head()
    sizes = {table: sum(file["size"] for file in head[table]["files"]) / 1e6 for table in ("statements", "translog")}
    return {"MB": sum(sizes.values()), **{f"MB of {table}": size for table, size in sizes.items()}}


def _full(store: BenchDataset, lines: list[bytes]) -> dict[str, Any]:
    store.add(lines)
    store.operate("flush")
    store.add(lines[::SEEN_AGAIN])
    store.delete([_id(line) for line in lines[DELETED // 2 :: DELETED]])
    store.operate("flush")
    seconds, result = store.operate("compact", force=True)
    return {"full compaction s": seconds, "full compaction rows": result["rows"]}


def _partial(store: BenchDataset, lines: list[bytes], full: float) -> dict[str, Any]:
    """Measure compactions without `force`, on a compacted dataset after one entity in a hundred has changed."""
    ranked = sorted(lines, key=_id)
    count, middle = len(lines) // CHANGED, len(lines) // 2
    results: dict[str, Any] = {}
    for name, changed in (
        ("of neighbours", ranked[middle : middle + count]),
        ("scattered", ranked[CHANGED // 2 :: CHANGED]),
    ):
        store.add([_changed(line, name) for line in changed])
        store.operate("flush")
        seconds, result = store.operate("compact")
        results[f"after 1 % {name} s"] = seconds
        results[f"after 1 % {name} rows"] = result["rows"]
        results[f"after 1 % {name} / full"] = seconds / full
        store.operate("compact", force=True)
    return results


def _maintained(store: BenchDataset, lines: list[bytes]) -> dict[str, Any]:
    """Compare reads after many small flushes with automatic maintenance to reads after a forced compaction.

    Each flush has known entities, new ones, and the deletion of an entity that the previous flush added.
    """
    store.add(lines)
    store.operate("flush")
    store.operate("compact", force=True)
    store.enable_maintenance()
    count = STATEMENTS_PER_FLUSH // 10
    start = time.perf_counter()
    for number in range(FLUSHES):
        known = lines[number :: max(1, len(lines) // count)][:count]
        fresh = [_changed(line, f"x{number}", f"fresh-{number}-{index}") for index, line in enumerate(known)]
        store.delete([f"fresh-{number - 1}-0"])
        store.add([*known, *fresh], commit="force")
    seconds_taken = time.perf_counter() - start
    store.wait_until_idle()
    head, ids = store.head(), [_id(line) for line in lines]
    results: dict[str, Any] = {
        f"{FLUSHES} flushes s": seconds_taken,
        "files maintained": len(head["statements"]["files"]) + len(head["translog"]["files"]),
        "get maintained ms": store.get_p50(ids),
        "entities/s maintained": store.stream_rate(),
    }
    store.operate("compact", force=True)
    results |= {"get compacted ms": store.get_p50(ids), "entities/s compacted": store.stream_rate()}
    results["get maintained / compacted"] = results["get maintained ms"] / results["get compacted ms"]
    results["stream compacted / maintained"] = results["entities/s compacted"] / results["entities/s maintained"]
    return results


def _id(line: bytes) -> str:
    return str(orjson.loads(line)["id"])


def _changed(line: bytes, note: str, name: str | None = None) -> bytes:
    """Return the entity with one more value; with a name, a copy of it under that id."""
    entity = orjson.loads(line)
    entity["properties"].setdefault("summary", []).append(f"changed {note}")
    return orjson.dumps(entity if name is None else entity | {"id": name})
