"""A flush in a test: kernels in a child process, without Spark."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from tarn.datasets.registry import Dataset, find
from tarn.lake.commit import SnapshotPublisher
from tarn.model.names import DatasetName
from tarn.model.snapshot import Snapshot
from tarn.pipeline.jobs.flush import Flush
from tarn.settings import Settings

from tests.in_process_api import InProcessApi
from tests.pipeline.kernels import DirectKernels, child


@pytest.fixture(scope="session")
def kernel_process() -> Iterator[ProcessPoolExecutor]:
    with child() as pool:
        yield pool


@pytest.fixture
def kernels(settings: Settings, kernel_process: ProcessPoolExecutor) -> DirectKernels:
    return DirectKernels(settings, kernel_process)


@pytest.fixture
def dataset(house: InProcessApi) -> Dataset:
    house.dataset("test")
    with house.services.database.read() as connection:
        found = find(connection, DatasetName("test"))
    assert found is not None
    return found


@pytest.fixture
def flush(house: InProcessApi, dataset: Dataset, kernels: DirectKernels) -> Callable[[], list[Snapshot]]:
    """Flush the dataset, and get the snapshots that this makes."""
    services = house.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    flushing = Flush(services.database, services.store, publisher, lambda: kernels)

    def run() -> list[Snapshot]:
        done = flushing.run([dataset], lambda: None)[dataset.id]
        assert done.error is None, done.error
        return done.snapshots

    return run
