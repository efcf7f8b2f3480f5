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
from tarn.model.flush import Flushed
from tarn.model.schema_buckets import buckets
from tarn.pipeline.session import Sessions
from tarn.pipeline.spark_runner import SparkKernels
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
    """One Spark for all who take it as it is. It starts again by itself after who ended it."""
    sessions = Sessions(load_settings())
    yield sessions
    sessions.close()


@pytest.fixture
def flusher(house: InProcessApi, spark: Sessions) -> SparkFlusher:
    services = house.services
    flusher = SparkFlusher(services.settings, services.database, services.store, "tester")
    flusher._sessions = spark
    return flusher


def write(house: InProcessApi, dataset: str, *names: str, origin: str = "crawl") -> None:
    answer = house.admin.post(
        f"/v1/datasets/{dataset}/entities?origin={origin}", [PERSON | {"id": name} for name in names]
    )
    assert answer.status_code == 200, answer.text


def flushed(flusher: SparkFlusher, *datasets: Dataset) -> list[Flushed]:
    done = flusher.flush([dataset.id for dataset in datasets], lambda: None)
    assert all(isinstance(made, list) for made in done.values()), done
    return [each for dataset in datasets for each in done[dataset.id]]


def test_datasets_of_one_round_are_flushed_in_one_job_each_into_its_own_snapshot(
    house: InProcessApi, dataset: Dataset, flusher: SparkFlusher
):
    house.dataset("other")
    other = dataset_of(house.services.database, "other")
    write(house, "test", "jane", "john")
    write(house, "other", "zoe", origin="mapping:x")
    (first, second) = flushed(flusher, dataset, other)
    write(house, "test", "jane", "zoe")
    (third,) = flushed(flusher, dataset, other)

    assert [(each.dataset, each.seq, each.statements) for each in (first, second, third)] == [
        ("test", 1, 6),
        ("other", 1, 3),
        ("test", 2, 3),
    ]
    assert len(stored(house.services.store, dataset, head(house, dataset))) == 9


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_flush_goes_on_after_sparks_jvm_died(house: InProcessApi, dataset: Dataset, flusher: SparkFlusher):
    write(house, "test", "jane")
    flushed(flusher, dataset)
    session = flusher._sessions.current()
    assert session.sparkContext._gateway is not None
    process = session.sparkContext._gateway.proc
    process.kill()
    process.wait()
    write(house, "test", "john")

    (made,) = flushed(flusher, dataset)

    assert (made.seq, made.statements) == (2, 3)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_job_that_is_cancelled_ends_in_an_error_of_ours_and_the_session_lives(flusher: SparkFlusher, tmp_path: Path):
    context = flusher._sessions.current().sparkContext
    started = tmp_path / "started"

    def stand_still(_: int) -> None:
        started.touch()
        time.sleep(600)

    def run() -> None:
        with flusher.answering():
            context.parallelize([0], 1).map(stand_still).collect()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        wait_until(started.exists)
        flusher.cancel()
        with pytest.raises(Internal):
            running.result(60)

    assert context.parallelize([1], 1).collect() == [1]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_two_executor_processes_make_the_same_of_a_segment_as_one(
    settings: Settings, house: InProcessApi, flusher: SparkFlusher
):
    def on_two(dataset: Dataset) -> int:
        return in_another_process(settings, "local-cluster[2,1,1024]", dataset.id)[dataset.id][0][3]

    def here(dataset: Dataset) -> int:
        (made,) = flushed(flusher, dataset)
        return made.statements

    made = {}
    for name, flush in (("alone", here), ("cluster", on_two)):
        house.dataset(name)
        dataset = dataset_of(house.services.database, name)
        for number in range(4):
            write(house, name, *(f"e{number}-{each}" for each in range(50)), origin=f"o{number % 2}")
        statements = flush(dataset)
        snapshot = head(house, dataset)
        rows = rows_of(house.services.store, dataset, snapshot, "statements")
        made[name] = (
            statements,
            snapshot.rows,
            Counter(
                (row["entity_id"], row["prop"], row["value"], row["origin"]) for row in rows if row["prop"] != "id"
            ),
            len(shown(stored(house.services.store, dataset, snapshot))),
        )

    assert made["alone"] == made["cluster"]
    assert made["alone"][0] == 600
    assert made["cluster"][1].added == 600


def in_another_process(settings: Settings, master: str, *dataset_ids: str) -> Any:
    command = [sys.executable, "-m", "tests.pipeline.flush_process", settings.database_url, settings.lake_uri, master]
    done = subprocess.run([*command, *dataset_ids], capture_output=True, text=True, env=os.environ, timeout=180)
    assert done.returncode == 0, done.stderr[-4000:]
    return orjson.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_task_whose_process_dies_is_run_again_by_spark_and_counts_once(
    settings: Settings, house: InProcessApi, dataset: Dataset, tmp_path: Path, spark: Sessions
):
    spark.close()  # a process has one Spark at a time, and this one tries thrice
    services = house.services
    sessions = Sessions(settings.model_copy(update={"spark_master": "local[2,3]"}))
    kernel = DyingKernel(
        Journal.at(settings.database_url), services.store.connection, buckets(), "256m", died=str(tmp_path / "died")
    )
    flusher = SparkFlusher(
        settings,
        services.database,
        services.store,
        "tester",
        kernels=lambda: SparkKernels(sessions.current(), kernel, settings.spark_patience),
    )
    write(house, "test", "jane", "john")
    try:
        (made,) = flushed(flusher, dataset)
    finally:
        sessions.close()

    snapshot = head(house, dataset)
    live = stored(services.store, dataset, snapshot)
    files = [entry.path for entry in services.store.list("test/entities") if entry.path.endswith(".parquet")]
    assert (tmp_path / "died").exists()
    assert (made.statements, snapshot.rows.added, len(live)) == (6, 6, 6)
    assert len(files) == 2 * len(snapshot.statements.files + snapshot.translog.files)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_job_that_has_no_executor_for_too_long_is_given_up_and_says_so(
    settings: Settings, house: InProcessApi, dataset: Dataset, spark: Sessions
):
    """A cluster without a machine: Spark would wait for one without an end."""
    spark.close()  # a process has one Spark at a time
    services = house.services
    without = {"spark_master": "local-cluster[0,1,512]", "spark_memory": "512m", "spark_patience": 0.5}
    alone = settings.model_copy(update=without)
    flusher = SparkFlusher(alone, services.database, services.store, "tester")
    write(house, "test", "jane")
    try:
        with pytest.raises(Unavailable, match=r"no executor for 0\.5 seconds"):
            flusher.flush([dataset.id], lambda: None)
    finally:
        flusher.close()
