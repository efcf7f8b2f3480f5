"""Running jobs that are cancelled end within seconds, wherever they are: in a loop, in a query, or on Spark.

What a job reads has no end here, so that nothing but the cancellation can end it.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest
from tarn.archive.fetch import Fetcher
from tarn.archive.sources import ListingFailure
from tarn.datasets.registry import Dataset
from tarn.errors import SourceFailed
from tarn.integrity import row_checks
from tarn.model.cancellation import Cancellation, check, checked, current
from tarn.model.job import Stopped
from tarn.model.schema_buckets import buckets
from tarn.pipeline.tasks.journal_slice import Journal
from tarn.pipeline.tasks.kernel import Kernel
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
"""Seconds within which a cancelled job is over; about one is usual."""

DATASET = "/v1/datasets/test"


class EndlessStore(Store):
    """A store in which chosen folders and files have no end, until the test does."""

    def __init__(self, inner: Store) -> None:
        self.__dict__ = inner.__dict__
        self.endless: Callable[[str], bool] = lambda _: False
        self.reading, self.over = threading.Event(), threading.Event()

    def list(self, prefix: str, after: str | None = None) -> Iterator[Entry]:
        return self._repeated(prefix, super().list(prefix, after))

    def stream(self, path: str, start: int = 0, end: int | None = None, chunk_size: int = CHUNK) -> Iterator[bytes]:
        found = super().stream(path, start, end, chunk_size)
        return found if end is not None else self._repeated(path, found)

    def _repeated(self, path: str, found: Iterable[Any]) -> Iterator[Any]:
        last: Any = None
        for last in found:
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
def job_worker(house: InProcessApi, kernels: DirectKernels) -> Worker:
    services = house.services
    flusher = SparkFlusher(services.settings, services.database, services.store, "tester", kernels=lambda: kernels)
    return make_worker(house, flusher, flusher.maintenance())


def flushed(house: InProcessApi, worker: Worker, *names: str) -> None:
    people = [{"id": name, "schema": "Person", "properties": {"name": [name]}} for name in names]
    assert house.admin.post(f"{DATASET}/entities", people).status_code == 200
    assert house.admin.post(f"{DATASET}/operations/flush").status_code == 202
    assert worker.flush()


def cancelled(
    house: InProcessApi,
    worker: Worker,
    path: str,
    options: Any,
    running: Callable[[], object],
    then: Callable[[], None] = lambda: None,
) -> float:
    """Cancel a job as soon as it is where it is to be cancelled; the seconds until it was over."""
    asked = house.admin.post(path, options)
    assert asked.status_code == 202, asked.text
    job = asked.json()["id"]
    with working(worker):
        wait_until(running)
        assert house.admin.delete(f"/v1/jobs/{job}").status_code == 202
        took = wait_until(lambda: house.admin.get(f"/v1/jobs/{job}").json()["state"] == "cancelled", BOUND)
        then()
    print(f"cancelled after {took:.2f} s: {path}")  # noqa: T201 - what is measured
    return took


@ONE_DATABASE
@pytest.mark.parametrize("folder", ["entities/statements", "snapshots", "archive", "versions"])
def test_vacuum_that_lists_for_ever(
    house: InProcessApi, dataset: Dataset, job_worker: Worker, store: EndlessStore, folder: str
):
    flushed(house, job_worker, "ann")
    assert house.admin.patch(DATASET, {"title": "Test"}).status_code == 200
    assert house.admin.put(f"{DATASET}/files?path=a.txt", content=b"text").status_code == 201
    store.endless = lambda path: path.endswith(f"test/{folder}")

    cancelled(house, job_worker, f"{DATASET}/operations/vacuum", {}, store.reading.is_set)


@ONE_DATABASE
@pytest.mark.parametrize("folder", ["entities/statements", "snapshots", "archive"])
def test_verify_that_lists_for_ever(
    house: InProcessApi, dataset: Dataset, job_worker: Worker, store: EndlessStore, folder: str
):
    flushed(house, job_worker, "ann")
    assert house.admin.put(f"{DATASET}/files?path=a.txt", content=b"text").status_code == 201
    store.endless = lambda path: path.endswith(f"test/{folder}")

    cancelled(house, job_worker, f"{DATASET}/operations/verify", {}, store.reading.is_set)


@ONE_DATABASE
def test_verify_that_reads_a_file_for_ever(house: InProcessApi, job_worker: Worker, store: EndlessStore):
    house.dataset("test", checksum="sha256")
    flushed(house, job_worker, "ann")
    store.endless = lambda path: path.endswith(".parquet")

    cancelled(house, job_worker, f"{DATASET}/operations/verify", {}, store.reading.is_set)


@ONE_DATABASE
def test_export_that_joins_parts_for_ever(
    house: InProcessApi, dataset: Dataset, job_worker: Worker, store: EndlessStore
):
    flushed(house, job_worker, "ann")
    store.endless = lambda path: "entities-0" in path

    cancelled(house, job_worker, f"{DATASET}/operations/export", {"kinds": ["entities"]}, store.reading.is_set)

    assert house.admin.get(f"{DATASET}/exports/entities.ftm.json").status_code == 404


@ONE_DATABASE
def test_mapping_of_a_file_without_an_end(
    house: InProcessApi, dataset: Dataset, job_worker: Worker, store: EndlessStore, kernels: DirectKernels
):
    content_hash = MappingJobs(house, dataset, kernels).put(f"{HEADER}\n".encode() + b"x" * 1_000_000, COMPANIES)
    store.endless = lambda path: path.endswith("/data")

    path = f"{DATASET}/mappings/{content_hash}/process"
    cancelled(house, job_worker, path, {}, store.reading.is_set)

    assert house.admin.get(f"{DATASET}/journal").json()["rows"] == 0


@ONE_DATABASE
def test_crawl_whose_listing_has_no_end(
    house: InProcessApi, dataset: Dataset, job_worker: Worker, monkeypatch, tmp_path: Path
):
    begun, over = threading.Event(), threading.Event()

    def listed(*_: object) -> Iterator[ListingFailure]:
        begun.set()
        while not over.is_set():
            yield ListingFailure("a.txt", SourceFailed("it is broken"))

    monkeypatch.setattr(Fetcher, "check", lambda *_: None)
    monkeypatch.setattr(Fetcher, "sources", listed)
    try:
        cancelled(house, job_worker, f"{DATASET}/operations/crawl", {"uri": "https://example.com/"}, begun.is_set)
    finally:
        over.set()


@ONE_DATABASE
def test_flush_in_a_round_that_goes_on(house: InProcessApi, dataset: Dataset):
    flusher = SqlFlusher(house.services.database)
    flusher.goes_on.clear()
    try:
        cancelled(
            house,
            make_worker(house, flusher),
            f"{DATASET}/operations/flush",
            None,
            flusher.entered.is_set,
            flusher.goes_on.set,
        )
    finally:
        flusher.goes_on.set()


# Queries of DuckDB in the driver


@contextmanager
def in_rows(house: InProcessApi, tmp_path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    services = house.services
    with row_checks.opened(services.store, services.settings) as duck:
        yield duck


@contextmanager
def in_kernel(house: InProcessApi, tmp_path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    services = house.services
    journal = Journal.at(services.settings.database_url)
    with Kernel(journal, services.store.connection, buckets(), "256m")._duckdb(str(tmp_path)) as duck:
        yield duck


@ONE_DATABASE
@pytest.mark.parametrize("opened", [in_rows, in_kernel])
def test_query_of_a_job_is_interrupted(house: InProcessApi, tmp_path: Path, opened: Any):
    cancellation = Cancellation()
    ended = threading.Event()

    def interrupt() -> None:
        cancellation.set()
        while not ended.wait(0.05):
            cancellation.interrupt()

    with cancellation.active(), opened(house, tmp_path) as duck:
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        try:
            with pytest.raises(duckdb.InterruptException):
                duck.execute("SELECT sum(a.range * b.range) FROM range(10_000_000) a, range(1_000_000) b").fetchall()
        finally:
            ended.set()
            interrupting.join()


# The signal itself


def test_thread_without_a_job_is_never_stopped():
    check()
    assert list(checked([1, 2])) == [1, 2]
    assert not current().is_set()


def test_items_end_before_the_next_one_and_their_source_is_closed():
    closed = threading.Event()
    cancellation = Cancellation()

    def items() -> Iterator[int]:
        try:
            yield from range(10)
        finally:
            closed.set()

    seen = []
    with cancellation.active():
        with pytest.raises(Stopped):
            for item in checked(items()):
                seen.append(item)
                if item == 2:
                    cancellation.set()
        assert closed.is_set()
        with pytest.raises(Stopped):
            check()
    check()
    assert seen == [0, 1, 2]


def test_interrupt_that_fails_keeps_no_other_from_being_called_and_none_is_called_after_its_block():
    cancellation = Cancellation()
    called: list[str] = []

    def broken() -> None:
        called.append("broken")
        raise RuntimeError

    with cancellation.interrupting(broken), cancellation.interrupting(lambda: called.append("second")):
        cancellation.interrupt()
    cancellation.interrupt()

    assert called == ["broken", "second"]
