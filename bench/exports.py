"""Benchmark of exports as jobs on warm Spark, compared with the peer's, and of `make` when nothing is stale."""

import os
import tempfile
from pathlib import Path
from typing import Any

from bench.clients import QUIET
from bench.data import entities
from bench.maintenance import BenchDataset
from bench.peer import figures
from tests.server import running

COUNT = int(os.environ.get("EXPORT_ENTITIES", "100000"))
REPEATS = 3
PEER_TARGETS = {
    "entities": ("export_entities", 5.0),
    "statements": ("export_csv", 1.5),
    "statistics": ("statistics", 2.0),
}
"""By kind: the name of the peer's figure, and the target for its duration divided by ours."""
MAX_NOTHING_STALE_MS = 100.0
"""Maximum milliseconds for a `make` when no export is stale."""
SMALL_CHANGE = 200


def run() -> dict[str, Any]:
    """Measure on SQLite and a local disk, best of `REPEATS` runs."""
    results: dict[str, Any] = {"entities": COUNT}
    with tempfile.TemporaryDirectory() as name:
        path = entities(COUNT, Path(name))
        peer = figures(path)
        lines = path.read_bytes().splitlines()
        home = Path(name) / "home"
        home.mkdir()
        with running(home, "serve", **QUIET) as server:
            store = BenchDataset(server, "big")
            store.add(lines)
            store.operate("flush")
            store.operate("export", kinds=["documents"])
            for kind in PEER_TARGETS:
                results[f"{kind} s"] = min(store.operate("export", kinds=[kind], force=True)[0] for _ in range(REPEATS))
            results["make everything s"], _ = store.operate("make", force=True)
            results["make of nothing stale ms"] = min(store.operate("make")[0] for _ in range(REPEATS)) * 1000
            store.add(lines[:SMALL_CHANGE])
            store.operate("flush")
            results["statistics after a small flush s"], _ = store.operate("export", kinds=["statistics"])
            results["make after a small flush s"], _ = store.operate("make")
    results["met"] = results["make of nothing stale ms"] <= MAX_NOTHING_STALE_MS
    if peer is not None:
        for kind, (figure, target) in PEER_TARGETS.items():
            results[f"peer {kind} s"] = peer["seconds"][figure]
            results[f"peer {kind} / ours"] = peer["seconds"][figure] / results[f"{kind} s"]
            results["met"] = results["met"] and results[f"peer {kind} / ours"] >= target
    return results
