"""The worker's loop: jobs, retries, stops, heartbeats and sweeps."""

import threading
from datetime import timedelta

import pytest
from sqlalchemy import func, select
from tarn.db import worker_heartbeats
from tarn.db.database_clock import database_time
from tarn.db.tables import workers as workers_table
from tarn.errors import StorageFull, Unavailable
from tarn.model.ids import now
from tarn.model.work.job import Job
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.store import Store
from tarn.worker import loop

from tests.in_process_api import InProcessApi
from tests.worker.workers import make_retries_due, make_worker, stepping


@pytest.fixture
def store(store: Store) -> FaultyStore:
    return FaultyStore(store)


def begin_delete(api: InProcessApi, name: str) -> str:
    job: str = api.admin.delete(f"/v1/datasets/{name}?confirm={name}").json()["id"]
    return job


def show(api: InProcessApi, job: str) -> Job:
    return Job.model_validate(api.admin.get(f"/v1/jobs/{job}").json() | {"disturbed": None})


def test_worker_runs_queued_jobs_sends_heartbeats_and_stops_when_asked(api: InProcessApi):
    api.dataset("donations")
    job = begin_delete(api, "donations")
    worker = make_worker(api)
    thread = threading.Thread(target=worker.run)
    thread.start()

    done = api.admin.get(f"/v1/jobs/{job}?wait=20").json()
    ready = api.anonymous.get("/readyz").json()
    worker.stop()
    thread.join(10)

    assert (done["state"], done["progress"], ready["worker"]) == (
        "done",
        {"done": 2, "total": None, "unit": "files"},
        "ok",
    )
    assert not thread.is_alive()
    with api.services.database.read() as connection:
        assert connection.execute(select(func.count()).select_from(workers_table)).scalar() == 0


def test_job_with_a_transient_error_reports_it_waits_and_is_retried(api: InProcessApi, store: FaultyStore):
    api.dataset("first")
    api.dataset("second")
    first, second = begin_delete(api, "first"), begin_delete(api, "second")
    store.fail("delete", "first/*", Unavailable("the store does not answer"))
    worker = make_worker(api)

    worker.step()
    worker.step()
    failed, other = show(api, first), show(api, second)
    create_status = api.admin.post("/v1/datasets", {"name": "first"}).status_code
    for _ in range(2):
        make_retries_due(api)
        worker.step()

    after = show(api, first)
    assert (failed.state, failed.finished, other.state, create_status) == ("queued", None, "done", 409)
    assert failed.problem is not None
    assert failed.problem.type == "/problems/unavailable"
    assert failed.not_before is not None
    assert (after.state, after.problem, after.not_before) == ("done", None, None)
    assert api.admin.post("/v1/datasets", {"name": "first"}).status_code == 201


def test_failed_delete_is_retried_after_about_an_hour(api: InProcessApi, store: FaultyStore):
    api.dataset("donations")
    job = begin_delete(api, "donations")
    store.fail("delete", "donations/*", StorageFull("no space"))

    make_worker(api).step()

    failed = show(api, job)
    assert failed.state == "queued"
    assert failed.not_before is not None
    assert failed.not_before > now() + timedelta(minutes=50)


def test_stopping_worker_requeues_its_job_and_another_completes_it(api: InProcessApi, store: FaultyStore):
    api.dataset("donations")
    for number in range(2500):
        store.put(f"donations/entities/{number:05d}", b"")
    job = begin_delete(api, "donations")
    stopped = make_worker(api)
    gate = store.block("delete", "donations/*")

    with stepping(stopped):
        gate.wait_arrived()
        stopped.stop()
        gate.release()
    between = show(api, job).state, len(list(store.list("donations")))
    make_worker(api).step()

    after = show(api, job)
    assert between == ("queued", 1502)
    assert (after.state, after.attempts) == ("done", 2)
    assert list(store.list("donations")) == []


def test_job_that_fails_while_its_worker_stops_is_available_immediately(api: InProcessApi, store: FaultyStore):
    api.dataset("donations")
    job = begin_delete(api, "donations")
    stopped = make_worker(api)
    gate = store.block("delete", "donations/*")
    store.fail("delete", "donations/*", RuntimeError("interrupted"))

    with stepping(stopped):
        gate.wait_arrived()
        stopped.stop()
        gate.release()
    between = show(api, job)

    assert between.state == "queued"
    assert between.not_before is not None
    with api.services.database.read() as connection:
        assert between.not_before <= database_time(connection)


def test_heartbeats_continue_after_an_error(api: InProcessApi, monkeypatch):
    worker = make_worker(api)
    beaten = threading.Event()
    errors = [RuntimeError("cannot execute UPDATE in a read-only transaction")]

    def beat(*_: object) -> None:
        if errors:
            raise errors.pop()
        beaten.set()

    monkeypatch.setattr(worker_heartbeats, "beat", beat)
    thread = threading.Thread(target=worker.run)
    thread.start()

    is_alive = beaten.wait(20)
    worker.stop()
    thread.join(10)

    assert is_alive


def test_worker_sweeps_the_journal_repeatedly_despite_errors(api: InProcessApi, monkeypatch):
    worker = make_worker(api)
    swept = threading.Event()
    errors = [RuntimeError("broken")]

    def sweep(*_: object) -> None:
        if errors:
            raise errors.pop()
        swept.set()

    monkeypatch.setattr(loop, "SWEEP_EVERY", 0)
    monkeypatch.setattr(loop, "sweep", sweep)
    thread = threading.Thread(target=worker.run)
    thread.start()

    repeated = swept.wait(20)
    worker.stop()
    thread.join(10)

    assert repeated
