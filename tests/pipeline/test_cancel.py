"""Cancellation of running jobs: they end within seconds, in a loop, in a query or on Spark.

The jobs read endless input, so that only the cancellation can end them.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest
from tarn.archive.fetching.fetch import Fetcher
from tarn.archive.fetching.sources import ListingFailure
from tarn.datasets.registry import Dataset
from tarn.errors import SourceFailed
from tarn.integrity import row_checks
from tarn.model.ftm.schema_buckets import buckets
from tarn.model.work.cancellation import Cancellation, check, checked, current
from tarn.model.work.job import JobStopped
from tarn.pipeline.tasks.data_files import FilePuts
from tarn.pipeline.tasks.journal_slice import Journal
from tarn.pipeline.tasks.task import TaskContext
from tarn.storage.store import CHUNK, Entry, Store
from tarn.worker.flusher import SparkFlusher
from tarn.worker.loop import Worker

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_mapping import COMPANIES, HEADER, MappingJobs
from tests.waiting import wait_until
from tests.worker.flushers import SqlFlusher
from tests.worker.workers import make_worker, working

BOUND = 10
"""Seconds within which a cancelled job must end; about one is usual."""

DATASET = "/v1/datasets/test"


class EndlessStore(Store):
    """A store in which chosen folders and files are endless until the test ends them."""

    def __init__(self, inner: Store) -> None:
        self.__dict__ = inner.__dict__
        self.endless: Callable[[str], bool] = lambda _: False
        self.reading, self.over = threading.Event(), threading.Event()

    def list(self, prefix: str, after: str | None = None) -> Iterator[Entry]:
        return self._repeated(prefix, super().list(prefix, after))

    def stream(self, path: str, start: int = 0, end: int | None = None, chunk_size: int = CHUNK) -> Iterator[bytes]:
        chunks = super().stream(path, start, end, chunk_size)
        return chunks if end is not None else self._repeated(path, chunks)

    def _repeated(self, path: str, items: Iterable[Any]) -> Iterator[Any]:
        last: Any = None
        for last in items:
            yield last
        if last is not None and self.endless(path):
            self.reading.set()
            while not self.over.is_set():
                yield last


@pytest.fixture
def store(store: Store) -> Iterator[EndlessStore]:
    endless = EndlessStore(store)
    yield endless
    endless.over.set()


@pytest.fixture
def job_worker(api: InProcessApi, kernels: DirectKernels) -> Worker:
    services = api.services
    flusher = SparkFlusher(services.settings, services.database, services.store, "tester", kernels=lambda: kernels)
    return make_worker(api, flusher, flusher.maintenance())


def flushed(api: InProcessApi, worker: Worker, *names: str) -> None:
    people = [{"id": name, "schema": "Person", "properties": {"name": [name]}} for name in names]
    assert api.admin.post(f"{DATASET}/entities", people).status_code == 200
    assert api.admin.post(f"{DATASET}/operations/flush").status_code == 202
    assert worker.flush()


def cancelled(
    api: InProcessApi,
    worker: Worker,
    path: str,
    options: Any,
    running: Callable[[], object],
    then: Callable[[], None] = lambda: None,
) -> float:
    """Cancel a job when it reaches the step in question; return the seconds until it ended."""
    response = api.admin.post(path, options)
    assert response.status_code == 202, response.text
    job = response.json()["id"]
    with working(worker):
        wait_until(running)
        assert api.admin.delete(f"/v1/jobs/{job}").status_code == 202
        took = wait_until(lambda: api.admin.get(f"/v1/jobs/{job}").json()["state"] == "cancelled", BOUND)
        then()
    print(f"cancelled after {took:.2f} s: {path}")  # noqa: T201 - the measurement
    return took


@ONE_DATABASE
@pytest.mark.parametrize("folder", ["entities/statements", "snapshots", "archive", "versions"])
def test_cancelled_vacuum_ends_while_listing(
    api: InProcessApi, dataset: Dataset, job_worker: Worker, store: EndlessStore, folder: str
):
    flushed(api, job_worker, "ann")
    assert api.admin.patch(DATASET, {"title": "Test"}).status_code == 200
    assert api.admin.put(f"{DATASET}/files?path=a.txt", content=b"text").status_code == 201
    store.endless = lambda path: path.endswith(f"test/{folder}")

    cancelled(api, job_worker, f"{DATASET}/operations/vacuum", {}, store.reading.is_set)


@ONE_DATABASE
@pytest.mark.parametrize("folder", ["entities/statements", "snapshots", "archive"])
def test_cancelled_verify_ends_while_listing(
    api: InProcessApi, dataset: Dataset, job_worker: Worker, store: EndlessStore, folder: str
):
    flushed(api, job_worker, "ann")
    assert api.admin.put(f"{DATASET}/files?path=a.txt", content=b"text").status_code == 201
    store.endless = lambda path: path.endswith(f"test/{folder}")

    cancelled(api, job_worker, f"{DATASET}/operations/verify", {}, store.reading.is_set)


@ONE_DATABASE
def test_cancelled_verify_ends_while_reading_a_file(api: InProcessApi, job_worker: Worker, store: EndlessStore):
    api.dataset("test", checksum="sha256")
    flushed(api, job_worker, "ann")
    store.endless = lambda path: path.endswith(".parquet")

    cancelled(api, job_worker, f"{DATASET}/operations/verify", {}, store.reading.is_set)


@ONE_DATABASE
def test_cancelled_export_ends_while_joining_parts(
    api: InProcessApi, dataset: Dataset, job_worker: Worker, store: EndlessStore
):
    flushed(api, job_worker, "ann")
    store.endless = lambda path: "entities-0" in path

    cancelled(api, job_worker, f"{DATASET}/operations/export", {"kinds": ["entities"]}, store.reading.is_set)

    assert api.admin.get(f"{DATASET}/exports/entities.ftm.json").status_code == 404


@ONE_DATABASE
def test_cancelled_mapping_ends_while_reading_a_file(
    api: InProcessApi, dataset: Dataset, job_worker: Worker, store: EndlessStore, kernels: DirectKernels
):
    content_hash = MappingJobs(api, dataset, kernels).put(f"{HEADER}\n".encode() + b"x" * 1_000_000, COMPANIES)
    store.endless = lambda path: path.endswith("/data")

    path = f"{DATASET}/mappings/{content_hash}/process"
    cancelled(api, job_worker, path, {}, store.reading.is_set)

    assert api.admin.get(f"{DATASET}/journal").json()["rows"] == 0


@ONE_DATABASE
def test_cancelled_crawl_ends_while_listing(
    api: InProcessApi, dataset: Dataset, job_worker: Worker, monkeypatch, tmp_path: Path
):
    begun, over = threading.Event(), threading.Event()

    def listed(*_: object) -> Iterator[ListingFailure]:
        begun.set()
        while not over.is_set():
            yield ListingFailure("a.txt", SourceFailed("it is broken"))

    monkeypatch.setattr(Fetcher, "check", lambda *_: None)
    monkeypatch.setattr(Fetcher, "sources", listed)
    try:
        cancelled(api, job_worker, f"{DATASET}/operations/crawl", {"uri": "https://example.com/"}, begun.is_set)
    finally:
        over.set()


@ONE_DATABASE
def test_cancelled_flush_ends_while_its_round_continues(api: InProcessApi, dataset: Dataset):
    flusher = SqlFlusher(api.services.database)
    flusher.resumed.clear()
    try:
        cancelled(
            api,
            make_worker(api, flusher),
            f"{DATASET}/operations/flush",
            None,
            flusher.entered.is_set,
            flusher.resumed.set,
        )
    finally:
        flusher.resumed.set()


# Queries of DuckDB in the driver


@contextmanager
def in_rows(api: InProcessApi, tmp_path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    services = api.services
    with row_checks.opened(services.store, services.settings) as duck:
        yield duck


@contextmanager
def in_task(api: InProcessApi, tmp_path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    services = api.services
    journal = Journal.at(services.settings.database_url)
    with FilePuts() as puts, ExitStack() as opened:
        context = TaskContext(services.store, puts, journal, buckets(), "256m", 1, str(tmp_path), opened)
        yield context.duckdb_connection


@ONE_DATABASE
@pytest.mark.parametrize("opened", [in_rows, in_task])
def test_cancelled_job_ends_while_a_query_runs(api: InProcessApi, tmp_path: Path, opened: Any):
    cancellation = Cancellation()
    ended = threading.Event()

    def interrupt() -> None:
        cancellation.set()
        while not ended.wait(0.05):
            cancellation.interrupt()

    with cancellation.active(), opened(api, tmp_path) as duck:
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        try:
            with pytest.raises(duckdb.InterruptException):
                duck.execute("SELECT sum(a.range * b.range) FROM range(10_000_000) a, range(1_000_000) b").fetchall()
        finally:
            ended.set()
            interrupting.join()


# The signal itself


def test_thread_without_a_job_is_never_cancelled():
    check()
    assert list(checked([1, 2])) == [1, 2]
    assert not current().is_set()


def test_iteration_stops_before_the_next_item_and_closes_its_source():
    closed = threading.Event()
    cancellation = Cancellation()

    def items() -> Iterator[int]:
        try:
            yield from range(10)
        finally:
            closed.set()

    seen = []
    with cancellation.active():
        with pytest.raises(JobStopped):
            for item in checked(items()):
                seen.append(item)
                if item == 2:
                    cancellation.set()
        assert closed.is_set()
        with pytest.raises(JobStopped):
            check()
    check()
    assert seen == [0, 1, 2]


def test_failing_interrupt_does_not_prevent_others_and_none_is_called_after_its_block():
    cancellation = Cancellation()
    called: list[str] = []

    def broken() -> None:
        called.append("broken")
        raise RuntimeError

    with cancellation.interrupting(broken), cancellation.interrupting(lambda: called.append("second")):
        cancellation.interrupt()
    cancellation.interrupt()

    assert called == ["broken", "second"]
