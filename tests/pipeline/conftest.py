"""What pipeline tests stand on beside a flush: a worker that flushes."""

import pytest
from tarn.worker.flusher import SparkFlusher
from tarn.worker.loop import Worker

from tests.in_process_api import InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.worker.workers import make_worker


@pytest.fixture
def worker(house: InProcessApi, kernels: DirectKernels) -> Worker:
    """A worker that flushes without Spark."""
    services = house.services
    flusher = SparkFlusher(services.settings, services.database, services.store, "tester", kernels=lambda: kernels)
    return make_worker(house, flusher)
