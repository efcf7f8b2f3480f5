"""Jobs on a real Spark: several threads on one session, and tasks that never end."""

import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tarn.datasets.registry import Dataset
from tarn.errors import Unavailable
from tarn.model.ftm.schema_buckets import buckets
from tarn.pipeline.session import Sessions
from tarn.pipeline.spark_runner import SparkTaskRunner
from tarn.pipeline.tasks.journal_slice import Journal
from tarn.settings import Settings, load_settings
from tarn.worker.flusher import SparkFlusher

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.pipeline.kernels import BusyKernel
from tests.waiting import wait_until
from tests.worker.workers import make_worker, working

pytestmark = pytest.mark.xdist_group("spark")

BOUND = 10
"""Seconds within which a cancelled job must end; about one is usual."""


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    sessions = Sessions(load_settings(spark_master="local[2]", spark_memory="512m"))
    sessions.current()
    yield sessions
    sessions.close()


def flusher_of(api: InProcessApi, settings: Settings, sessions: Sessions, busy: Path) -> SparkFlusher:
    services = api.services
    kernel = BusyKernel(Journal.at(settings.database_url), services.store.connection, buckets(), "256m", busy=str(busy))
    flusher = SparkFlusher(
        settings,
        services.database,
        services.store,
        "tester",
        kernels=lambda: SparkTaskRunner(sessions.current(), kernel, settings.executor_timeout),
    )
    flusher._sessions = sessions
    return flusher


def write(api: InProcessApi, dataset: str, name: str) -> None:
    person = {"id": name, "schema": "Person", "properties": {"name": [name]}}
    assert api.admin.post(f"/v1/datasets/{dataset}/entities", person).status_code == 200


def done(api: InProcessApi, dataset: str, operation: str, **options: object) -> None:
    job = api.admin.post(f"/v1/datasets/{dataset}/operations/{operation}", options).json()["id"]
    wait_until(lambda: api.admin.get(f"/v1/jobs/{job}").json()["state"] == "done", 120)


@ONE_DATABASE
def test_endless_task_is_killed_when_its_job_is_cancelled_and_other_jobs_continue(
    api: InProcessApi, settings: Settings, dataset: Dataset, sessions: Sessions, tmp_path: Path, monkeypatch
):
    busy = tmp_path / "busy"
    busy.touch()
    flusher = flusher_of(api, settings, sessions, busy)
    monkeypatch.setattr(sessions, "close", lambda: None)  # this is the worker's; the session belongs to the module
    api.dataset("other")
    write(api, "test", "ann")
    write(api, "other", "bob")
    with working(make_worker(api, flusher, flusher.maintenance(), worker_poll=0.2, worker_heartbeat=1)):
        done(api, "test", "flush")
        job = api.admin.post("/v1/datasets/test/operations/compact", {"force": True}).json()["id"]
        wait_until(lambda: list(tmp_path.glob("busy-*")))
        [pid] = (int(path.name.removeprefix("busy-")) for path in tmp_path.glob("busy-*"))
        busy.unlink()
        # One core is occupied forever, and the other is enough for a flush and for the job of another dataset.
        done(api, "other", "flush")
        done(api, "other", "compact", force=True)
        assert api.admin.delete(f"/v1/jobs/{job}").status_code == 202
        took = wait_until(lambda: api.admin.get(f"/v1/jobs/{job}").json()["state"] == "cancelled", BOUND)
        kill_seconds = wait_until(lambda: not psutil.pid_exists(pid), BOUND)
        done(api, "test", "compact", force=True)
    print(f"cancelled after {took:.2f} s, its process killed {kill_seconds:.2f} s later")  # noqa: T201 - the measurement


@pytest.mark.long
@ONE_DATABASE
def test_thread_that_finds_its_session_dead_does_not_end_the_new_session_of_another(
    api: InProcessApi, settings: Settings, sessions: Sessions, tmp_path: Path
):
    flusher = flusher_of(api, settings, sessions, tmp_path / "busy")
    began, resumed = threading.Event(), threading.Event()
    failures: list[Exception] = []

    def late() -> None:
        try:
            with flusher.translated_errors():
                sessions.current()
                began.set()
                assert resumed.wait(60)
                raise EOFError  # the connection to the session that has ended meanwhile
        except Unavailable as error:
            failures.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    assert began.wait(60)
    sessions.close()
    started = sessions.current()
    resumed.set()
    thread.join()

    assert len(failures) == 1
    assert sessions.current() is started
    assert started.sparkContext.parallelize([1], 1).collect() == [1]
