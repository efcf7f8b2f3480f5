"""Jobs on a real Spark: several threads on one session, and tasks that do not end by themselves."""

import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tarn.datasets.registry import Dataset
from tarn.errors import Unavailable
from tarn.model.schema_buckets import buckets
from tarn.pipeline.session import Sessions
from tarn.pipeline.spark_runner import SparkKernels
from tarn.pipeline.tasks.journal_slice import Journal
from tarn.settings import Settings, load_settings
from tarn.worker.flusher import SparkFlusher

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.pipeline.kernels import BusyKernel
from tests.waiting import wait_until
from tests.worker.workers import make_worker, working

pytestmark = pytest.mark.xdist_group("spark")

BOUND = 10
"""Seconds within which a cancelled job is over; about one is usual."""


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    sessions = Sessions(load_settings(spark_master="local[2]", spark_memory="512m"))
    sessions.current()
    yield sessions
    sessions.close()


def flusher_of(house: InProcessApi, settings: Settings, sessions: Sessions, busy: Path) -> SparkFlusher:
    services = house.services
    kernel = BusyKernel(Journal.at(settings.database_url), services.store.connection, buckets(), "256m", busy=str(busy))
    flusher = SparkFlusher(
        settings,
        services.database,
        services.store,
        "tester",
        kernels=lambda: SparkKernels(sessions.current(), kernel, settings.spark_patience),
    )
    flusher._sessions = sessions
    return flusher


def write(house: InProcessApi, dataset: str, name: str) -> None:
    person = {"id": name, "schema": "Person", "properties": {"name": [name]}}
    assert house.admin.post(f"/v1/datasets/{dataset}/entities", person).status_code == 200


def done(house: InProcessApi, dataset: str, operation: str, **options: object) -> None:
    job = house.admin.post(f"/v1/datasets/{dataset}/operations/{operation}", options).json()["id"]
    wait_until(lambda: house.admin.get(f"/v1/jobs/{job}").json()["state"] == "done", 120)


@ONE_DATABASE
def test_task_that_never_ends_is_killed_when_its_job_is_cancelled_and_other_jobs_run_meanwhile(
    house: InProcessApi, settings: Settings, dataset: Dataset, sessions: Sessions, tmp_path: Path, monkeypatch
):
    busy = tmp_path / "busy"
    busy.touch()
    flusher = flusher_of(house, settings, sessions, busy)
    monkeypatch.setattr(sessions, "close", lambda: None)  # the worker's; the session is of the whole module
    house.dataset("other")
    write(house, "test", "ann")
    write(house, "other", "bob")
    with working(make_worker(house, flusher, flusher.maintenance(), worker_poll=0.2, worker_heartbeat=1)):
        done(house, "test", "flush")
        job = house.admin.post("/v1/datasets/test/operations/compact", {"force": True}).json()["id"]
        wait_until(lambda: list(tmp_path.glob("busy-*")))
        [pid] = (int(path.name.removeprefix("busy-")) for path in tmp_path.glob("busy-*"))
        busy.unlink()
        # One core is taken for ever, and the other is enough for a flush and for the job of another dataset.
        done(house, "other", "flush")
        done(house, "other", "compact", force=True)
        assert house.admin.delete(f"/v1/jobs/{job}").status_code == 202
        took = wait_until(lambda: house.admin.get(f"/v1/jobs/{job}").json()["state"] == "cancelled", BOUND)
        gone = wait_until(lambda: not psutil.pid_exists(pid), BOUND)
        done(house, "test", "compact", force=True)
    print(f"cancelled after {took:.2f} s, its process killed {gone:.2f} s later")  # noqa: T201 - what is measured


@ONE_DATABASE
def test_thread_that_finds_spark_gone_does_not_end_the_session_that_another_has_started_since(
    house: InProcessApi, settings: Settings, sessions: Sessions, tmp_path: Path
):
    flusher = flusher_of(house, settings, sessions, tmp_path / "busy")
    begun, goes_on = threading.Event(), threading.Event()
    failures: list[Exception] = []

    def late() -> None:
        try:
            with flusher.answering():
                sessions.current()
                begun.set()
                assert goes_on.wait(60)
                raise EOFError  # the connection to the session that was ended meanwhile
        except Unavailable as error:
            failures.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    assert begun.wait(60)
    sessions.close()
    started = sessions.current()
    goes_on.set()
    thread.join()

    assert len(failures) == 1
    assert sessions.current() is started
    assert started.sparkContext.parallelize([1], 1).collect() == [1]
