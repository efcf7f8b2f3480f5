"""Benchmark of crawls: small files stored per second on warm Spark, and known files skipped per second."""

import os
import random
import tempfile
from pathlib import Path
from typing import Any

from bench.clients import QUIET
from bench.maintenance import BenchDataset
from tests.server import running

COUNT = int(os.environ.get("CRAWL_FILES", "10000"))
MIN_SIZE, MAX_SIZE = 200, 8_000
"""Minimum and maximum size of a file, in bytes."""
FOLDERS = 100
WARM_UP_FILES = 200
TARGET_RATE = 500.0
"""Files per second."""


def run() -> dict[str, Any]:
    """Measure on SQLite and a local disk."""
    results: dict[str, Any] = {"files": COUNT}
    with tempfile.TemporaryDirectory() as name:
        source, home = Path(name) / "source", Path(name) / "home"
        home.mkdir()
        _fill(source / "warm", WARM_UP_FILES)
        _fill(source / "many", COUNT)
        with running(home, "serve", **QUIET, TARN_FETCH_ROOTS=str(source)) as server:
            BenchDataset(server, "warm").operate("crawl", uri=str(source / "warm"))
            store = BenchDataset(server, "many")
            seconds, done = store.operate("crawl", uri=str(source / "many"))
            assert (done["files"], done["failed"]) == (COUNT, 0), done
            results["files/s"] = COUNT / seconds
            seconds, done = store.operate("crawl", uri=str(source / "many"))
            assert done["skipped"] == COUNT, done
            results["known files/s, by path"] = COUNT / seconds
            seconds, done = store.operate("crawl", uri=str(source / "many"), existing="skip_checksum")
            assert done["skipped"] == COUNT, done
            results["known files/s, by checksum"] = COUNT / seconds
    results["met"] = results["files/s"] >= TARGET_RATE
    return results


def _fill(folder: Path, count: int) -> None:
    draw = random.Random(count)
    for number in range(count):
        path = folder / f"folder-{number % FOLDERS}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"{number} {draw.randbytes(draw.randint(MIN_SIZE, MAX_SIZE) // 2).hex()}".encode())
