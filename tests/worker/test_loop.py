"""The worker."""

import threading
from datetime import timedelta

import pytest
from sqlalchemy import func, select
from tarn.db import worker_heartbeats as workers
from tarn.db.tables import workers as workers_table
from tarn.errors import StorageFull, Unavailable
from tarn.model.ids import now
from tarn.model.job import Job
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.store import Store
from tarn.worker import loop

from tests.in_process_api import InProcessApi
from tests.worker.workers import let_time_pass, make_worker, stepping


@pytest.fixture
def store(store: Store) -> FaultyStore:
    return FaultyStore(store)


def begin_delete(house: InProcessApi, name: str) -> str:
    job: str = house.admin.delete(f"/v1/datasets/{name}?confirm={name}").json()["id"]
    return job


def show(house: InProcessApi, job: str) -> Job:
    return Job.model_validate(house.admin.get(f"/v1/jobs/{job}").json() | {"disturbed": None})


def test_worker_runs_what_is_queued_gives_signs_of_life_and_leaves_when_told(house: InProcessApi):
    house.dataset("donations")
    job = begin_delete(house, "donations")
    worker = make_worker(house)
    thread = threading.Thread(target=worker.run)
    thread.start()

    done = house.admin.get(f"/v1/jobs/{job}?wait=20").json()
    ready = house.nobody.get("/readyz").json()
    worker.stop()
    thread.join(10)

    assert (done["state"], done["progress"], ready["worker"]) == (
        "done",
        {"done": 2, "total": None, "unit": "files"},
        "ok",
    )
    assert not thread.is_alive()
    with house.services.database.read() as connection:
        assert connection.execute(select(func.count()).select_from(workers_table)).scalar() == 0


def test_job_that_meets_an_error_that_passes_says_so_waits_and_is_done_again(house: InProcessApi, store: FaultyStore):
    house.dataset("first")
    house.dataset("second")
    first, second = begin_delete(house, "first"), begin_delete(house, "second")
    store.fail("delete", "first/*", Unavailable("the store does not answer"))
    worker = make_worker(house)

    worker.step()
    worker.step()
    failed, other = show(house, first), show(house, second)
    taken = house.admin.post("/v1/datasets", {"name": "first"}).status_code
    for _ in range(2):
        let_time_pass(house)
        worker.step()

    after = show(house, first)
    assert (failed.state, failed.finished, other.state, taken) == ("queued", None, "done", 409)
    assert failed.problem is not None
    assert failed.problem.type == "/problems/unavailable"
    assert failed.not_before is not None
    assert (after.state, after.problem, after.not_before) == ("done", None, None)
    assert house.admin.post("/v1/datasets", {"name": "first"}).status_code == 201


def test_delete_that_cannot_be_done_is_tried_again_after_long(house: InProcessApi, store: FaultyStore):
    house.dataset("donations")
    job = begin_delete(house, "donations")
    store.fail("delete", "donations/*", StorageFull("not even for that"))

    make_worker(house).step()

    failed = show(house, job)
    assert failed.state == "queued"
    assert failed.not_before is not None
    assert failed.not_before > now() + timedelta(minutes=50)


def test_worker_that_must_stop_hands_its_job_back_and_another_finishes_it(house: InProcessApi, store: FaultyStore):
    house.dataset("donations")
    for number in range(2500):
        store.put(f"donations/entities/{number:05d}", b"")
    job = begin_delete(house, "donations")
    stopped = make_worker(house)
    gate = store.block("delete", "donations/*")

    with stepping(stopped):
        gate.wait_arrived()
        stopped.stop()
        gate.release()
    between = show(house, job).state, len(list(store.list("donations")))
    make_worker(house).step()

    after = show(house, job)
    assert between == ("queued", 1502)
    assert (after.state, after.attempts) == ("done", 2)
    assert list(store.list("donations")) == []


def test_job_that_fails_while_its_worker_stops_is_for_the_next_worker_at_once(house: InProcessApi, store: FaultyStore):
    house.dataset("donations")
    job = begin_delete(house, "donations")
    stopped = make_worker(house)
    gate = store.block("delete", "donations/*")
    store.fail("delete", "donations/*", RuntimeError("broken off"))

    with stepping(stopped):
        gate.wait_arrived()
        stopped.stop()
        gate.release()
    between = show(house, job)

    assert between.state == "queued"
    assert between.not_before is not None
    assert between.not_before <= now()


def test_signs_of_life_go_on_after_any_error(house: InProcessApi, monkeypatch):
    worker = make_worker(house)
    given = threading.Event()
    errors = [RuntimeError("cannot execute UPDATE in a read-only transaction")]

    def beat(*_: object) -> None:
        if errors:
            raise errors.pop()
        given.set()

    monkeypatch.setattr(workers, "beat", beat)
    thread = threading.Thread(target=worker.run)
    thread.start()

    lived = given.wait(20)
    worker.stop()
    thread.join(10)

    assert lived


def test_worker_sweeps_the_journal_again_and_again_whatever_happens(house: InProcessApi, monkeypatch):
    worker = make_worker(house)
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

    again = swept.wait(20)
    worker.stop()
    thread.join(10)

    assert again
