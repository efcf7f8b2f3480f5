"""Exports: what each takes as a job on warm Spark, beside the peer's; and a make that finds nothing stale."""

import os
import tempfile
from pathlib import Path
from typing import Any

from bench.clients import QUIET
from bench.data import entities
from bench.maintenance import Store
from bench.peer import figures
from tests.server import running

COUNT = int(os.environ.get("EXPORT_ENTITIES", "100000"))
TIMES = 3
PEERS = {"entities": ("export_entities", 5.0), "statements": ("export_csv", 1.5), "statistics": ("statistics", 2.0)}
"""By kind: what the peer calls it, and how many times as fast it is to be."""
NOTHING_STALE = 100.0
"""Milliseconds."""
A_FEW = 200


def run() -> dict[str, Any]:
    """Every figure on SQLite and a local disk, the best of some times."""
    results: dict[str, Any] = {"entities": COUNT}
    with tempfile.TemporaryDirectory() as name:
        path = entities(COUNT, Path(name))
        peer = figures(path)
        lines = path.read_bytes().splitlines()
        home = Path(name) / "home"
        home.mkdir()
        with running(home, "serve", **QUIET) as server:
            store = Store(server, "big")
            store.add(lines)
            store.operate("flush")
            store.operate("export", kinds=["documents"])
            for kind in PEERS:
                results[f"{kind} s"] = min(store.operate("export", kinds=[kind], force=True)[0] for _ in range(TIMES))
            results["make everything s"], _ = store.operate("make", force=True)
            results["make of nothing stale ms"] = min(store.operate("make")[0] for _ in range(TIMES)) * 1000
            store.add(lines[:A_FEW])
            store.operate("flush")
            results["statistics after a small flush s"], _ = store.operate("export", kinds=["statistics"])
            results["make after a small flush s"], _ = store.operate("make")
    results["met"] = results["make of nothing stale ms"] <= NOTHING_STALE
    if peer is not None:
        for kind, (theirs, wanted) in PEERS.items():
            results[f"peer {kind} s"] = peer["seconds"][theirs]
            results[f"peer {kind} / ours"] = peer["seconds"][theirs] / results[f"{kind} s"]
            results["met"] = results["met"] and results[f"peer {kind} / ours"] >= wanted
    return results
