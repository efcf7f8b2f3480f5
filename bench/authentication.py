"""Benchmark of authentication: an authenticated read of one dataset compared with an unauthenticated request."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.server import running

ROUNDS, CALLS = 5, 200
MAX_RATIO = 12.0
"""Maximum ratio of the median of an authenticated read to that of `/healthz`."""


def run() -> dict[str, Any]:
    """Measure p50 of both alternately in one run, so that other activity affects both alike."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as server:
        client = server.client()
        client.post("/v1/datasets", json={"name": "bench"}).raise_for_status()
        bare: list[float] = []
        guarded: list[float] = []
        for _ in range(ROUNDS):
            bare += _times(lambda: client.get("/healthz"))
            guarded += _times(lambda: client.get("/v1/datasets/bench"))
    ratio = statistics.median(guarded) / statistics.median(bare)
    return {
        "healthz p50 ms": statistics.median(bare) * 1000,
        "dataset p50 ms": statistics.median(guarded) * 1000,
        "dataset p99 ms": statistics.quantiles(guarded, n=100)[98] * 1000,
        "ratio": ratio,
        "met": ratio <= MAX_RATIO,
    }


def _times(call: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call().raise_for_status()
        times.append(time.perf_counter() - start)
    return times
