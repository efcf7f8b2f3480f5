"""Maintenance over HTTP: what a compaction takes, what it leaves on the disk, and how a store reads that is kept in
shape by itself."""

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
"""One entity of so many."""
TOUCHED, A_THIRD = 100, 1 / 3
"""One entity of so many, and the share of the peer's settling that a compaction after it may take; without the peer, of
a full one of ours, which is much less."""
FLUSHES, OF_STATEMENTS = int(os.environ.get("MAINTAIN_FLUSHES", "200")), 50
MAX_SLOWDOWN = 1.5
"""How many times as long reads may take as on a freshly compacted store."""
GETS = 500
CONNECTIONS = 4
MAINTENANCE_INTERVAL = 2.0


def run() -> dict[str, Any]:
    """Every figure on SQLite and a local disk, on one warm Spark session."""
    results: dict[str, Any] = {"entities": COUNT}
    with tempfile.TemporaryDirectory() as name:
        path = entities(COUNT, Path(name))
        peer = figures(path)
        lines = path.read_bytes().splitlines()
        home = Path(name) / "home"
        home.mkdir()
        with running(home, "serve", **QUIET, TARN_UPKEEP_EVERY=str(MAINTENANCE_INTERVAL)) as server:
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
        and results[f"after 1 % of neighbours / {against}"] <= A_THIRD
        and results[f"after 1 % scattered / {against}"] <= A_THIRD
        and results["get kept in shape / compacted"] <= MAX_SLOWDOWN
        and results["stream compacted / kept in shape"] <= MAX_SLOWDOWN
    )
    return results


class BenchDataset:
    """A dataset that is maintained only when it is asked for, and what can be asked of it."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.path = f"/v1/datasets/{name}"
        self._client = server.client()
        self._client.timeout = httpx.Timeout(600)
        self._client.post("/v1/datasets", json={"name": name, "policy": {"maintain": False}}).raise_for_status()

    def maintained(self) -> None:
        """From now on the worker maintains it unasked."""
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
        """Delete entities, one request each: there is no other way to end many of one origin."""

        def some(own: Sequence[str]) -> None:
            with httpx.Client(base_url=self.server.url, headers=self._client.headers, timeout=60) as client:
                for one in own:
                    client.delete(f"{self.path}/entities/{one}").raise_for_status()

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(some, [ids[number::CONNECTIONS] for number in range(CONNECTIONS)]))

    def operate(self, operation: str, **options: Any) -> tuple[float, dict[str, Any]]:
        """The seconds that a job took once it was begun, and its result."""
        return self._done(f"{self.path}/operations/{operation}", options)

    def map(self, content_hash: str, mapping: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """The same of making entities of an archived file's rows."""
        path = f"{self.path}/mappings/{content_hash}"
        self._client.put(path, json=mapping).raise_for_status()
        return self._done(f"{path}/process", {})

    def _done(self, path: str, options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        answer = self._client.post(f"{path}?wait=300", json=options)
        answer.raise_for_status()
        job = answer.json()
        assert job["state"] == "done", job
        took = datetime.fromisoformat(job["finished"]) - datetime.fromisoformat(job["started"])
        return took.total_seconds(), job["result"]

    def settle(self) -> None:
        """Wait until the worker has looked twice and found nothing to do."""
        quiet = 0.0
        while quiet < 3 * MAINTENANCE_INTERVAL:
            time.sleep(0.5)
            jobs = self._client.get("/v1/admin/worker").raise_for_status().json()["jobs"]
            quiet = 0.0 if any(one["state"] in ("queued", "running") for one in jobs) else quiet + 0.5

    def get_p50(self, ids: Sequence[str]) -> float:
        """Milliseconds for one entity."""
        wanted = itertools.islice(itertools.cycle(ids[:: max(1, len(ids) // GETS)]), GETS + 50)
        return (
            statistics.median(request_sequentially(self.server, (f"{self.path}/entities/{one}" for one in wanted))[50:])
            * 1000
        )

    def stream_rate(self) -> float:
        """Entities/s, all of them, the best of three times."""
        best = 0.0
        for _ in range(3):
            lines, begun = 0, time.perf_counter()
            with self._client.stream("GET", f"{self.path}/entities/stream") as answer:
                answer.raise_for_status()
                for chunk in answer.iter_raw():
                    lines += chunk.count(b"\n")
            best = max(best, lines / (time.perf_counter() - begun))
        return best

    def head(self) -> dict[str, Any]:
        found: dict[str, Any] = self._client.get(f"{self.path}/snapshots/latest").raise_for_status().json()
        return found


def _size(store: BenchDataset, lines: list[bytes]) -> dict[str, Any]:
    """Megabytes of the same data as the peer's, compacted. It warms Spark up for what is timed."""
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
    seconds, made = store.operate("compact", force=True)
    return {"full compaction s": seconds, "full compaction rows": made["rows"]}


def _partial(store: BenchDataset, lines: list[bytes], full: float) -> dict[str, Any]:
    """Compactions that nobody forces, on a compacted store of which one entity in a hundred says something new."""
    ranked = sorted(lines, key=_id)
    few, middle = len(lines) // TOUCHED, len(lines) // 2
    results: dict[str, Any] = {}
    for name, chosen in (
        ("of neighbours", ranked[middle : middle + few]),
        ("scattered", ranked[TOUCHED // 2 :: TOUCHED]),
    ):
        store.add([_changed(line, name) for line in chosen])
        store.operate("flush")
        seconds, made = store.operate("compact")
        results[f"after 1 % {name} s"] = seconds
        results[f"after 1 % {name} rows"] = made["rows"]
        results[f"after 1 % {name} / full"] = seconds / full
        store.operate("compact", force=True)
    return results


def _maintained(store: BenchDataset, lines: list[bytes]) -> dict[str, Any]:
    """Reads after many small flushes with automatic maintenance, beside those after a forced compaction.

    Each flush brings what is known, what is new, and the end of an entity that the one before brought.
    """
    store.add(lines)
    store.operate("flush")
    store.operate("compact", force=True)
    store.maintained()
    few = OF_STATEMENTS // 10
    begun = time.perf_counter()
    for number in range(FLUSHES):
        known = lines[number :: max(1, len(lines) // few)][:few]
        fresh = [_changed(line, f"x{number}", f"fresh-{number}-{place}") for place, line in enumerate(known)]
        store.delete([f"fresh-{number - 1}-0"])
        store.add([*known, *fresh], commit="force")
    took = time.perf_counter() - begun
    store.settle()
    head, ids = store.head(), [_id(line) for line in lines]
    found: dict[str, Any] = {
        f"{FLUSHES} flushes s": took,
        "files kept in shape": len(head["statements"]["files"]) + len(head["translog"]["files"]),
        "get kept in shape ms": store.get_p50(ids),
        "entities/s kept in shape": store.stream_rate(),
    }
    store.operate("compact", force=True)
    found |= {"get compacted ms": store.get_p50(ids), "entities/s compacted": store.stream_rate()}
    found["get kept in shape / compacted"] = found["get kept in shape ms"] / found["get compacted ms"]
    found["stream compacted / kept in shape"] = found["entities/s compacted"] / found["entities/s kept in shape"]
    return found


def _id(line: bytes) -> str:
    return str(orjson.loads(line)["id"])


def _changed(line: bytes, note: str, name: str | None = None) -> bytes:
    """The entity with one property more; with a name, another one that is otherwise alike."""
    entity = orjson.loads(line)
    entity["properties"].setdefault("summary", []).append(f"changed {note}")
    return orjson.dumps(entity if name is None else entity | {"id": name})
