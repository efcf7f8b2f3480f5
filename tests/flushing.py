"""Fixtures that flush in a test: kernels in a child process, without Spark."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from tarn.datasets.registry import Dataset, find
from tarn.lake.commit import SnapshotPublisher
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.names import DatasetName
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
def dataset(api: InProcessApi) -> Dataset:
    api.dataset("test")
    with api.services.database.read() as connection:
        dataset = find(connection, DatasetName("test"))
    assert dataset is not None
    return dataset


@pytest.fixture
def flush(api: InProcessApi, dataset: Dataset, kernels: DirectKernels) -> Callable[[], list[Snapshot]]:
    """Return a function that flushes the dataset and returns the new snapshots."""
    services = api.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    flushing = Flush(services.database, services.store, publisher, lambda: kernels)

    def run() -> list[Snapshot]:
        outcome = flushing.run([dataset], lambda: None)[dataset.id]
        assert outcome.error is None, outcome.error
        return outcome.snapshots

    return run
