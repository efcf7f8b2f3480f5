"""Flushes on a real Spark: in this process, on two executors, and after its JVM died."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest
from tarn.datasets.registry import Dataset
from tarn.errors import Internal, Unavailable
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.ftm.schema_buckets import buckets
from tarn.pipeline.session import Sessions
from tarn.pipeline.spark_runner import SparkTaskRunner
from tarn.pipeline.tasks.journal_slice import Journal
from tarn.settings import Settings, load_settings
from tarn.worker.flusher import SparkFlusher

from tests.in_process_api import InProcessApi
from tests.lake.manifests import dataset_of
from tests.pipeline.history import head, rows_of, shown, stored
from tests.pipeline.kernels import DyingKernel
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("spark")

PERSON = {"schema": "Person", "properties": {"name": ["Jane Doe"], "country": ["de"]}}


@pytest.fixture(scope="module")
def spark() -> Iterator[Sessions]:
    """Start one Spark session for all tests that use it unchanged. It restarts after tests that ended it."""
    sessions = Sessions(load_settings())
    yield sessions
    sessions.close()


@pytest.fixture
def flusher(api: InProcessApi, spark: Sessions) -> SparkFlusher:
    services = api.services
    flusher = SparkFlusher(services.settings, services.database, services.store, "tester")
    flusher._sessions = spark
    return flusher


def write(api: InProcessApi, dataset: str, *names: str, origin: str = "crawl") -> None:
    response = api.admin.post(
        f"/v1/datasets/{dataset}/entities?origin={origin}", [PERSON | {"id": name} for name in names]
    )
    assert response.status_code == 200, response.text


def flushed(flusher: SparkFlusher, *datasets: Dataset) -> list[Snapshot]:
    done = flusher.flush([dataset.id for dataset in datasets], lambda: None)
    assert all(outcome.error is None for outcome in done.values()), done
    return [snapshot for dataset in datasets for snapshot in done[dataset.id].snapshots]


def test_datasets_of_one_round_are_flushed_in_one_job_into_a_snapshot_each(
    api: InProcessApi, dataset: Dataset, flusher: SparkFlusher
):
    api.dataset("other")
    other = dataset_of(api.services.database, "other")
    write(api, "test", "jane", "john")
    write(api, "other", "zoe", origin="mapping:x")
    (first, second) = flushed(flusher, dataset, other)
    write(api, "test", "jane", "zoe")
    (third,) = flushed(flusher, dataset, other)

    assert [(each.dataset, each.seq, each.rows.added) for each in (first, second, third)] == [
        ("test", 1, 6),
        ("other", 1, 3),
        ("test", 2, 3),
    ]
    assert len(stored(api.services.store, dataset, head(api, dataset))) == 9


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_flush_works_after_sparks_jvm_died(api: InProcessApi, dataset: Dataset, flusher: SparkFlusher):
    write(api, "test", "jane")
    flushed(flusher, dataset)
    session = flusher._sessions.current()
    assert session.sparkContext._gateway is not None
    process = session.sparkContext._gateway.proc
    process.kill()
    process.wait()
    write(api, "test", "john")

    (published,) = flushed(flusher, dataset)

    assert (published.seq, published.rows.added) == (2, 3)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_cancelled_job_raises_our_error_and_the_session_survives(flusher: SparkFlusher, tmp_path: Path):
    context = flusher._sessions.current().sparkContext
    started = tmp_path / "started"

    def block(_: int) -> None:
        started.touch()
        time.sleep(600)

    def run() -> None:
        with flusher.translated_errors():
            context.parallelize([0], 1).map(block).collect()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        wait_until(started.exists)
        flusher.cancel()
        with pytest.raises(Internal):
            running.result(60)

    assert context.parallelize([1], 1).collect() == [1]


@pytest.mark.long
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_two_executor_processes_write_the_same_rows_of_a_segment_as_one(
    settings: Settings, api: InProcessApi, flusher: SparkFlusher
):
    def on_two(dataset: Dataset) -> int:
        return in_another_process(settings, "local-cluster[2,1,1024]", dataset.id)[dataset.id][0]

    def here(dataset: Dataset) -> int:
        (published,) = flushed(flusher, dataset)
        return published.rows.added

    published = {}
    for name, flush in (("alone", here), ("cluster", on_two)):
        api.dataset(name)
        dataset = dataset_of(api.services.database, name)
        for number in range(4):
            write(api, name, *(f"e{number}-{each}" for each in range(50)), origin=f"o{number % 2}")
        statements = flush(dataset)
        snapshot = head(api, dataset)
        rows = rows_of(api.services.store, dataset, snapshot, "statements")
        published[name] = (
            statements,
            snapshot.rows,
            Counter(
                (row["entity_id"], row["prop"], row["value"], row["origin"]) for row in rows if row["prop"] != "id"
            ),
            len(shown(stored(api.services.store, dataset, snapshot))),
        )

    assert published["alone"] == published["cluster"]
    assert published["alone"][0] == 600
    assert published["cluster"][1].added == 600


def in_another_process(settings: Settings, master: str, *dataset_ids: str) -> Any:
    command = [sys.executable, "-m", "tests.pipeline.flush_process", settings.database_url, settings.lake_uri, master]
    done = subprocess.run([*command, *dataset_ids], capture_output=True, text=True, env=os.environ, timeout=180)
    assert done.returncode == 0, done.stderr[-4000:]
    return orjson.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_task_whose_process_dies_is_retried_by_spark_and_counts_once(
    settings: Settings, api: InProcessApi, dataset: Dataset, tmp_path: Path, spark: Sessions
):
    spark.close()  # a process has one Spark session at a time, and this one allows three attempts
    services = api.services
    sessions = Sessions(settings.model_copy(update={"spark_master": "local[2,3]"}))
    kernel = DyingKernel(
        Journal.at(settings.database_url), services.store.connection, buckets(), "256m", died=str(tmp_path / "died")
    )
    flusher = SparkFlusher(
        settings,
        services.database,
        services.store,
        "tester",
        kernels=lambda: SparkTaskRunner(sessions.current(), kernel, settings.executor_timeout),
    )
    write(api, "test", "jane", "john")
    try:
        (published,) = flushed(flusher, dataset)
    finally:
        sessions.close()

    snapshot = head(api, dataset)
    live = stored(services.store, dataset, snapshot)
    files = [entry.path for entry in services.store.list("test/entities") if entry.path.endswith(".parquet")]
    assert (tmp_path / "died").exists()
    assert (published.rows.added, snapshot.rows.added, len(live)) == (6, 6, 6)
    assert len(files) == 2 * len(snapshot.statements.files + snapshot.translog.files)


@pytest.mark.long
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_job_without_executors_for_too_long_is_aborted_and_reports_it(
    settings: Settings, api: InProcessApi, dataset: Dataset, spark: Sessions
):
    """Run a job on a cluster without machines, for which Spark itself would wait forever."""
    spark.close()  # a process has one Spark session at a time
    services = api.services
    without = {"spark_master": "local-cluster[0,1,512]", "spark_memory": "512m", "executor_timeout": 0.5}
    alone = settings.model_copy(update=without)
    flusher = SparkFlusher(alone, services.database, services.store, "tester")
    write(api, "test", "jane")
    try:
        with pytest.raises(Unavailable, match=r"no executor for 0\.5 seconds"):
            flusher.flush([dataset.id], lambda: None)
    finally:
        flusher.close()
