"""Benchmark of flushes on Spark: speed and memory of turning segments into snapshots, for empty and large datasets."""

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
from tarn.db.engine import Database
from tarn.settings import Settings, load_settings
from tarn.storage.connection import Connection
from tarn.storage.store import Store
from tarn.worker.flusher import SparkFlusher

from bench.data import entities
from bench.peer import figures
from tests.server import Server, running

COUNT = 100_000
SPEED_TARGET = 5.0
"""Target: our statements/s divided by the peer's."""
MIXED, INTO, MAX_MIXED_SECONDS = 5_000, 500_000, 1.0
"""Statements per flush, statements already in the dataset, and the maximum median duration in seconds."""
DATASETS, STATEMENTS_EACH, MAX_DATASETS_SECONDS = 1_000, 10, 60.0
SMALL, LARGE, MAX_SLOWDOWN = 100_000, 2_000_000, 2.0
"""A flush of 10 000 statements into LARGE may take at most MAX_SLOWDOWN times as long as one into SMALL."""


def run() -> dict[str, Any]:
    """Measure on SQLite and a local disk, on one warm Spark session."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, started_bench(Path(name)) as bench:
        results |= _first_load(bench, Path(name))
        results |= _many_datasets(bench)
        results |= _growing(bench, Path(name))
    results["met"] = (
        results.get("ratio to the peer", SPEED_TARGET) >= SPEED_TARGET
        and results[f"{MIXED} mixed into {INTO} p50 s"] < MAX_MIXED_SECONDS
        and results[f"{DATASETS} datasets s"] < MAX_DATASETS_SECONDS
        and results["10 000 into 2 million / into 100 000"] <= MAX_SLOWDOWN
        and results["peak memory of 2 million MB"] <= results["bound of memory MB"]
    )
    return results


def run_load() -> dict[str, Any]:
    """Measure only the first load, on warm Spark, and compare it with the peer's."""
    with tempfile.TemporaryDirectory() as name, started_bench(Path(name)) as bench:
        results = _first_load(bench, Path(name))
    return results | {"met": results.get("ratio to the peer", SPEED_TARGET) >= SPEED_TARGET}


class Bench:
    """A running server for writes, and a separate flusher whose flushes are timed."""

    def __init__(self, server: Server, flusher: SparkFlusher, settings: Settings) -> None:
        self.server = server
        self.client = server.client()
        self.flusher = flusher
        self.settings = settings
        self._ids: dict[str, str] = {}

    def dataset(self, name: str) -> str:
        if name not in self._ids:
            answer = self.client.post("/v1/datasets", json={"name": name})
            answer.raise_for_status()
            self._ids[name] = answer.json()["id"]
        return self._ids[name]

    def load(self, name: str, body: "Path | bytes") -> int:
        """Write entities, and return the number of statements."""
        self.dataset(name)
        answer = httpx.post(
            f"{self.server.url}/v1/datasets/{name}/entities",
            content=body.read_bytes() if isinstance(body, Path) else body,
            headers={"Authorization": f"Bearer {self.server.admin_key}", "Content-Type": "application/x-ndjson"},
            timeout=600,
        )
        answer.raise_for_status()
        return int(answer.json()["statements"])

    def flush(self, *names: str) -> float:
        """Flush these datasets, and return the seconds it took."""
        start = time.perf_counter()
        done = self.flusher.flush([self.dataset(name) for name in names], lambda: None)
        seconds = time.perf_counter() - start
        assert all(outcome.error is None for outcome in done.values()), done
        self.flusher.tidy()
        return seconds


@contextmanager
def started_bench(folder: Path) -> Iterator[Bench]:
    home = folder / "home"
    home.mkdir()
    with running(
        home, "serve", TARN_FLUSH_AGE="86400", TARN_FLUSH_ROWS="1000000000", TARN_FLUSH_BYTES="1" + "0" * 15
    ) as s:
        settings = load_settings(
            database_url=f"sqlite:///{home}/data/tarn.db", lake_uri=str(home / "data" / "lake"), flush_age=86400
        )
        database = Database(settings.database_url)
        flusher = SparkFlusher(settings, database, Store(Connection.from_settings(settings)), "bench")
        yield Bench(s, flusher, settings)
        flusher.close()
        database.close()


def _first_load(bench: Bench, folder: Path) -> dict[str, Any]:
    path = entities(COUNT, folder)
    peer = figures(path)
    bench.load("warm", path)
    bench.flush("warm")
    seconds, statements = min(_flush_new_dataset(bench, path, number) for number in range(3))
    results: dict[str, Any] = {"statements/s": statements / seconds}
    if peer is not None:
        results["peer statements/s"] = peer["statements"] / peer["seconds"]["flush"]
        results["ratio to the peer"] = results["statements/s"] / results["peer statements/s"]
    return results


def _flush_new_dataset(bench: Bench, path: Path, number: int) -> tuple[float, int]:
    statements = bench.load(f"fresh{number}", path)
    return bench.flush(f"fresh{number}"), statements


def _many_datasets(bench: Bench) -> dict[str, Any]:
    names = [f"tiny{number}" for number in range(DATASETS)]
    for name in names:
        bench.load(name, _people(name, STATEMENTS_EACH // 2))
    return {f"{DATASETS} datasets s": bench.flush(*names)}


def _growing(bench: Bench, folder: Path) -> dict[str, Any]:
    """Measure flushes of new, known and deleted statements into datasets of growing size."""
    results: dict[str, Any] = {}
    draw = 0
    into: dict[int, float] = {}
    per_entity = 5.7
    for size in (SMALL, INTO, LARGE):
        name = f"store{size}"
        path = entities(int(size / per_entity), folder)
        bench.load(name, path)
        with _watch_memory() as peak:
            bench.flush(name)
        if size == LARGE:
            results["peak memory of 2 million MB"] = peak[0]
            results["bound of memory MB"] = _bound(bench.settings)
        lines = path.read_bytes().splitlines()
        if size == INTO:
            times = []
            for _ in range(5):
                draw += 1
                _write_mixed(bench, name, lines, MIXED, draw)
                times.append(bench.flush(name))
            results[f"{MIXED} mixed into {INTO} p50 s"] = statistics.median(times)
        else:
            times = []
            for _ in range(3):
                draw += 1
                _write_mixed(bench, name, lines, 10_000, draw)
                times.append(bench.flush(name))
            into[size] = statistics.median(times)
            results[f"10 000 into {size} s"] = into[size]
    results["10 000 into 2 million / into 100 000"] = into[LARGE] / into[SMALL]
    return results


def _write_mixed(bench: Bench, name: str, lines: list[bytes], statements: int, draw: int) -> None:
    """Write about this many statements, half of them known and half new, and delete some entities."""
    step = len(lines) // (statements // 12)
    known = lines[draw :: max(1, step)][: statements // 12]
    bench.load(name, b"\n".join(known) + b"\n" + _people(f"new{draw}", statements // 4))
    for line in lines[draw + 7 :: max(1, len(lines) // 20)][:20]:
        bench.client.delete(f"/v1/datasets/{name}/entities/{orjson.loads(line)['id']}").raise_for_status()


def _people(prefix: str, count: int) -> bytes:
    return b"".join(
        orjson.dumps({"id": f"{prefix}-{number}", "schema": "Person", "properties": {"name": [f"{prefix} {number}"]}})
        + b"\n"
        for number in range(count)
    )


def _bound(settings: Settings) -> float:
    """Return the memory limit in megabytes: the JVM plus one Python process per core."""
    return _megabytes(settings.spark_memory) + psutil.cpu_count() * _megabytes(settings.kernel_memory)


def _megabytes(text: str) -> float:
    return int(text[:-1]) * (1024 if text.endswith("g") else 1) * 1.048576


@contextmanager
def _watch_memory() -> Iterator[list[float]]:
    """Measure the peak memory, in megabytes, of the JVM and its children while the context is open."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            total = 0.0
            for process in psutil.Process().children(recursive=True):
                try:
                    line = " ".join(process.cmdline())
                    if any(
                        ours in line
                        for ours in (
                            "tarn.cli",
                            "tarn.journal.sqlite_loader_process",
                            "tarn.journal.parsing.parser_process",
                        )
                    ):
                        continue
                    # Forked workers share pages with their daemon: only unique memory (USS) is counted.
                    total += process.memory_full_info().uss / 1e6
                except psutil.Error:
                    continue
            peak[0] = max(peak[0], total)

    thread = threading.Thread(target=watch)
    thread.start()
    yield peak
    done.set()
    thread.join()
