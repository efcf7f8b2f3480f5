"""Benchmark of `tarn serve` as a client sees it: wall time from sending a request to the end of its response.

The server is started by the benchmark with its default settings, except that it flushes only on request. Cold figures
are the first of their kind after the start; warm ones are medians of `REPEATS`. The peer runs in the same run, in
process.
"""

import itertools
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import orjson
import psutil

from bench.clients import QUIET, request_sequentially
from bench.data import entities
from bench.peer import figures
from tests.server import Server, running

COUNT = 100_000
REPEATS = 5
WARM_UP_SECONDS = 15.0
"""Seconds after the start at which the first flush is requested."""
IDLE_SECONDS = 60.0
LOOKUPS = 500
AGAIN = 1_000
"""Entities that are added a second time."""
POSTS = 300


class Target(NamedTuple):
    """The goal of a figure: a minimum or a maximum."""

    measure: str
    minimum: float | None = None
    maximum: float | None = None

    def is_met(self, results: dict[str, Any]) -> bool:
        """Return whether the figure reaches its goal. A figure that was not measured does not count."""
        value = results.get(self.measure)
        return value is None or not (
            (self.minimum is not None and value < self.minimum) or (self.maximum is not None and value > self.maximum)
        )


TARGETS = [
    Target("flush of one entity ms", maximum=120),
    Target("write with commit=force ms", maximum=120),
    Target("flush of nothing ms", maximum=15),
    Target("make of nothing stale ms", maximum=15),
    Target("optimize of nothing ms", maximum=15),
    Target("first flush / tenth", maximum=1.5),
    Target("first body, peer / ours", minimum=12),
    Target("later body, peer / ours", minimum=16),
    Target("first load flushed, peer / ours", minimum=6),
    Target("later load flushed, peer / ours", minimum=8),
    Target("statistics, peer / ours", minimum=2.5),
    Target("statements.csv, peer / ours", minimum=3),
    Target("entities.ftm.json, peer / ours", minimum=12),
    Target("get, peer / ours", minimum=15),
    Target("re-add of 1000 flushed, peer / ours", minimum=10),
    Target("POST of one entity p50 ms", maximum=3),
    Target("idle CPU % of a core", maximum=1),
]


def run() -> dict[str, Any]:
    """Measure on SQLite and a local disk."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = entities(COUNT, folder)
        results = _flushes(folder) | _loads(folder, path.read_bytes())
        if (peer := figures(path)) is not None:
            _compare(results, peer["seconds"])
    missed = [target.measure for target in TARGETS if not target.is_met(results)]
    return results | {"missed": ", ".join(missed) or "none", "met": not missed}


def _flushes(folder: Path) -> dict[str, Any]:
    """Measure small operations on an otherwise empty server, the first of them `WARM_UP_SECONDS` after its start."""
    with _started(folder / "small") as client:
        client.create("small")
        time.sleep(WARM_UP_SECONDS)
        flushes = []
        for number in range(10):
            client.add("small", _person(f"f{number}"))
            flushes.append(client.operate("small", "flush"))
        results = {
            "first flush 15 s after the start ms": flushes[0] * 1000,
            "flush of one entity ms": statistics.median(flushes[-REPEATS:]) * 1000,
            "first flush / tenth": flushes[0] / statistics.median(flushes[-3:]),
            "write with commit=force ms": _median_ms(
                lambda number: client.add("small", _person(f"c{number}"), commit="force")
            ),
            "flush of nothing ms": _median_ms(lambda _: client.operate("small", "flush")),
        }
        client.operate("small", "make")
        client.operate("small", "optimize")
        results["make of nothing stale ms"] = _median_ms(lambda _: client.operate("small", "make"))
        results["optimize of nothing ms"] = _median_ms(lambda _: client.operate("small", "optimize"))
        posts = [client.add("small", _person(f"p{number}")) for number in range(POSTS)]
        results["POST of one entity p50 ms"] = statistics.median(posts[50:]) * 1000
        client.operate("small", "flush")
        results["idle CPU % of a core"] = _idle_cpu(client.server)
    return results


def _loads(folder: Path, body: bytes) -> dict[str, Any]:
    """Measure loads of `COUNT` entities into datasets of their own, flushes, exports and gets of them."""
    lines = body.splitlines(keepends=True)
    names = [f"load{number}" for number in range(REPEATS + 1)]
    with _started(folder / "loads") as client:
        bodies, flushes = [], []
        for name in names:
            client.create(name)
            bodies.append(client.add(name, body))
            flushes.append(client.operate(name, "flush"))
        results = {
            "first body s": bodies[0],
            "later body s": statistics.median(bodies[1:]),
            "first load flushed s": flushes[0],
            "later load flushed s": statistics.median(flushes[1:]),
        }
        for kind, label in (
            ("statistics", "statistics"),
            ("statements", "statements.csv"),
            ("entities", "entities.ftm.json"),
        ):
            times = [client.operate(name, "export", kinds=[kind]) for name in names]
            results |= {f"first {label} s": times[0], f"{label} s": statistics.median(times[1:])}
        ids = [orjson.loads(line)["id"] for line in lines[:: COUNT // LOOKUPS]]
        gets = request_sequentially(client.server, (f"/v1/datasets/{names[0]}/entities/{each}" for each in ids))
        results |= {"first get ms": gets[0] * 1000, "get p50 ms": statistics.median(gets[50:]) * 1000}
        some = b"".join(itertools.islice(lines, AGAIN))
        again = [client.add(name, some) + client.operate(name, "flush") for name in names]
        results[f"re-add of {AGAIN} flushed s"] = statistics.median(again[1:])
    return results


def _compare(results: dict[str, Any], peer: dict[str, float]) -> None:
    """Add the ratios of the peer's seconds to ours."""
    again = peer["journal_again"] + peer["flush_again"]
    pairs = {
        "first body": (peer["journal"], results["first body s"]),
        "later body": (peer["journal"], results["later body s"]),
        "first load flushed": (peer["flush"], results["first load flushed s"]),
        "later load flushed": (peer["flush"], results["later load flushed s"]),
        "statistics": (peer["statistics"], results["statistics s"]),
        "statements.csv": (peer["export_csv"], results["statements.csv s"]),
        "entities.ftm.json": (peer["export_entities"], results["entities.ftm.json s"]),
        "get": (peer["get"], results["get p50 ms"] / 1000),
        f"re-add of {AGAIN} flushed": (again, results[f"re-add of {AGAIN} flushed s"]),
    }
    for label, (theirs, ours) in pairs.items():
        results[f"{label}, peer / ours"] = theirs / ours


class Client:
    """One client of a server, which measures its requests."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._http = server.client()
        self._http.timeout = 600

    def create(self, dataset: str) -> None:
        self._http.post("/v1/datasets", json={"name": dataset}).raise_for_status()

    def add(self, dataset: str, body: bytes, **parameters: str) -> float:
        """Send entities, and return the seconds until they were acknowledged."""
        headers = {"Content-Type": "application/x-ndjson"}
        path = f"/v1/datasets/{dataset}/entities"
        return self._timed(lambda: self._http.post(path, content=body, headers=headers, params=parameters))

    def operate(self, dataset: str, operation: str, **arguments: object) -> float:
        """Run an operation, and return the seconds until its job was done."""
        path = f"/v1/datasets/{dataset}/operations/{operation}?wait=300"
        return self._timed(lambda: self._http.post(path, json=arguments or None))

    @staticmethod
    def _timed(request: Callable[[], httpx.Response]) -> float:
        start = time.perf_counter()
        answer = request()
        seconds = time.perf_counter() - start
        answer.raise_for_status()
        assert answer.json().get("state", "done") == "done", answer.text
        return seconds


@contextmanager
def _started(folder: Path) -> Iterator[Client]:
    """Start a server with default settings, without automatic flushes."""
    folder.mkdir()
    with running(folder, "serve", **QUIET, TARN_SPARK_WARM_UP="true") as server:
        yield Client(server)


def _median_ms(measure: Callable[[int], float]) -> float:
    return statistics.median(measure(number) for number in range(REPEATS)) * 1000


def _idle_cpu(server: Server) -> float:
    """Return the CPU time of all processes of an idle server, in percent of one core."""
    time.sleep(5)
    before = _cpu_seconds(server.process)
    time.sleep(IDLE_SECONDS)
    return (_cpu_seconds(server.process) - before) / IDLE_SECONDS * 100


def _cpu_seconds(process: "subprocess.Popen[str]") -> float:
    parent = psutil.Process(process.pid)
    times = [each.cpu_times() for each in [parent, *parent.children(recursive=True)]]
    return sum(each.user + each.system for each in times)


def _person(name: str) -> bytes:
    return orjson.dumps({"id": name, "schema": "Person", "properties": {"name": [f"Jane {name}"]}}) + b"\n"
