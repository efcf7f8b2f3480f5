"""Fixtures of pipeline tests: a worker that flushes."""

import pytest
from tarn.worker.flusher import SparkFlusher
from tarn.worker.loop import Worker

from tests.in_process_api import InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.worker.workers import make_worker


@pytest.fixture
def worker(api: InProcessApi, kernels: DirectKernels) -> Worker:
    """Return a worker that flushes without Spark."""
    services = api.services
    flusher = SparkFlusher(services.settings, services.database, services.store, "tester", kernels=lambda: kernels)
    return make_worker(api, flusher)
