"""Flush jobs and rounds: many datasets in one round, and a failing one does not block the others."""

from datetime import timedelta

import orjson
import pytest
from sqlalchemy import select
from tarn.db.tables import jobs as jobs_table
from tarn.errors import Locked, PathExists, StorageFull, Unavailable
from tarn.model.ids import now
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.store import Store
from tarn.worker.flush_rounds import FlushRounds

from tests.in_process_api import InProcessApi
from tests.waiting import wait_until
from tests.worker.flushers import SqlFlusher, id_of
from tests.worker.workers import expire_heartbeats, flushing, make_retries_due, make_worker, working

ENTITY = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}


@pytest.fixture
def store(store: Store) -> FaultyStore:
    return FaultyStore(store)


@pytest.fixture
def flusher(api: InProcessApi) -> SqlFlusher:
    return SqlFlusher(api.services.database)


def write(api: InProcessApi, *names: str) -> list[str]:
    """Create these datasets with an entity of two statements in each; return their ids."""
    for name in names:
        api.dataset(name)
        assert api.admin.post(f"/v1/datasets/{name}/entities", ENTITY).status_code == 200
    return [id_of(api, name) for name in names]


def ignore(*_: object) -> None:
    """Ignore the progress."""


def request_flush(api: InProcessApi, name: str | None = None) -> str:
    path = "/v1/operations/flush" if name is None else f"/v1/datasets/{name}/operations/flush"
    job: str = api.admin.post(path).json()["id"]
    return job


def show(api: InProcessApi, job: str) -> dict:
    return api.admin.get(f"/v1/jobs/{job}").json()


def runs(store: Store, name: str) -> list[str]:
    return [entry.path for entry in store.list(f"{name}/jobs/runs")]


def test_requested_and_due_flushes_are_one_round_and_each_job_has_its_own_result(
    api: InProcessApi, flusher: SqlFlusher
):
    first_id, second_id, due = write(api, "one", "two", "three")
    first, second, both = request_flush(api, "one"), request_flush(api, "two"), request_flush(api)
    flusher.over_threshold = [due]

    claimed = make_worker(api, flusher).flush()

    results = [show(api, job)["result"] for job in (first, second, both)]
    assert claimed
    assert [sorted(ids) for ids in flusher.rounds] == [sorted([first_id, second_id, due])]
    assert [result["statements"] for result in results] == [2, 2, 6]
    assert [[each["dataset"] for each in result["snapshots"]] for result in results[:2]] == [["one"], ["two"]]
    assert {each["dataset"] for each in results[2]["snapshots"]} == {"one", "two", "three"}


def test_flush_without_rows_publishes_no_snapshot_and_is_done(api: InProcessApi, flusher: SqlFlusher):
    api.dataset("empty")
    job = request_flush(api, "empty")

    make_worker(api, flusher).flush()

    assert show(api, job)["result"] == {"operation": "flush", "statements": 0, "snapshots": []}
    assert not make_worker(api, flusher).flush()


def test_run_record_of_a_flush_equals_the_job_in_the_api(api: InProcessApi, flusher: SqlFlusher, store: FaultyStore):
    write(api, "one")
    job = request_flush(api, "one")

    make_worker(api, flusher).flush()

    [path] = runs(store, "one")
    assert path.startswith("one/jobs/runs/flush/")
    assert orjson.loads(store.get(path)) == show(api, job)


def test_job_whose_run_record_cannot_be_written_is_done_anyway(
    api: InProcessApi, flusher: SqlFlusher, store: FaultyStore
):
    write(api, "one")
    job = request_flush(api, "one")
    store.fail("put", "one/jobs/*", Unavailable("not now"))

    make_worker(api, flusher).flush()

    assert show(api, job)["state"] == "done"


def test_no_run_is_recorded_for_a_dataset_deleted_during_the_flush(
    api: InProcessApi, flusher: SqlFlusher, store: FaultyStore
):
    write(api, "one")
    request_flush(api, "one")
    gate = store.block("put", "one/jobs/*")

    with flushing(make_worker(api, flusher)):
        gate.wait_arrived()
        api.admin.delete("/v1/datasets/one?confirm=one")
        make_worker(api).step()
        gate.release()

    assert list(store.list("one")) == []


def test_delete_leaves_no_record_of_its_run(api: InProcessApi, store: FaultyStore):
    api.dataset("one")
    api.admin.delete("/v1/datasets/one?confirm=one")

    make_worker(api).step()

    assert list(store.list("one")) == []


def test_dataset_that_cannot_be_flushed_fails_only_its_own_jobs(api: InProcessApi, flusher: SqlFlusher):
    broken, _ = write(api, "broken", "sound")
    flusher.failing[broken] = StorageFull("no space")
    failing, sound, both = request_flush(api, "broken"), request_flush(api, "sound"), request_flush(api)

    make_worker(api, flusher).flush()

    shown = [show(api, job) for job in (failing, sound, both)]
    assert [job["state"] for job in shown] == ["failed", "done", "failed"]
    assert shown[0]["problem"]["type"] == "/problems/storage-full"
    assert shown[1]["result"]["statements"] == 2


def test_dataset_that_failed_alone_is_flushed_separately_until_it_succeeds(api: InProcessApi, flusher: SqlFlusher):
    broken, sound, other = write(api, "broken", "sound", "other")
    flusher.failing[broken] = StorageFull("no space")
    rounds = FlushRounds(flusher)
    ids = [sound, broken, other]

    def hold() -> None: ...

    rounds.flush(ids, hold, ignore)
    first, flusher.rounds = flusher.rounds, []
    flusher.failing.clear()
    outcomes = rounds.flush(ids, hold, ignore)
    second, flusher.rounds = flusher.rounds, []
    rounds.flush(ids, hold, ignore)

    assert first == [ids, [sound], [broken], [other]]
    assert second == [[sound, other], [broken]]
    assert [len(outcomes[each].snapshots) for each in ids] == [0, 1, 0]
    assert flusher.rounds == [ids]


def test_dataset_that_the_flusher_reports_as_failed_fails_its_own_job_in_one_round(
    api: InProcessApi, flusher: SqlFlusher
):
    broken, _ = write(api, "broken", "sound")
    flusher.rejecting[broken] = StorageFull("no space")
    failing, sound = request_flush(api, "broken"), request_flush(api, "sound")
    flusher.over_threshold = [broken]
    worker = make_worker(api, flusher)

    worker.flush()
    not_retried = not worker.flush()

    assert [show(api, job)["state"] for job in (failing, sound)] == ["failed", "done"]
    assert len(flusher.rounds) == 1
    assert not_retried


@pytest.mark.parametrize("error", [Unavailable("the store is unavailable"), Locked("another worker", holder="w")])
def test_flush_with_a_transient_error_is_retried(api: InProcessApi, flusher: SqlFlusher, error: Exception):
    [dataset] = write(api, "one")
    flusher.failing[dataset] = error
    job = request_flush(api, "one")
    worker = make_worker(api, flusher)

    worker.flush()
    between = show(api, job)
    retried_early = worker.flush()
    flusher.failing.clear()
    make_retries_due(api)
    worker.flush()

    assert (between["state"], retried_early) == ("queued", False)
    assert between["not_before"] is not None
    assert (show(api, job)["state"], show(api, job)["problem"]) == ("done", None)


def test_unavailable_store_ends_the_round_after_one_attempt(api: InProcessApi, flusher: SqlFlusher):
    ids = write(api, "one", "two")
    flusher.failing = dict.fromkeys(ids, Unavailable("the store is unavailable"))
    job = request_flush(api)

    make_worker(api, flusher).flush()

    assert len(flusher.rounds) == 1
    assert show(api, job)["state"] == "queued"


def test_failing_dataset_over_its_threshold_is_retried_with_growing_delays(api: InProcessApi, flusher: SqlFlusher):
    broken, sound = write(api, "broken", "sound")
    flusher.failing[broken] = RuntimeError("broken")
    flusher.over_threshold = [broken, sound]
    clock = [0.0]
    rounds = FlushRounds(flusher, lambda: clock[0])
    delays = []

    for _ in range(4):
        rounds.flush(rounds.due(), lambda: None, ignore)
        began = clock[0]
        while not rounds.due():
            clock[0] += 1
        delays.append(clock[0] - began)

    assert delays == sorted(delays)
    assert delays[0] >= 2
    assert delays[-1] >= 20


def test_jobs_are_done_although_due_datasets_cannot_be_determined(api: InProcessApi, flusher: SqlFlusher, monkeypatch):
    write(api, "one")
    job = request_flush(api, "one")

    def due() -> list[str]:
        raise RuntimeError("broken")

    monkeypatch.setattr(flusher, "due", due)

    make_worker(api, flusher).flush()

    assert show(api, job)["state"] == "done"


def test_flush_reports_progress_in_rows_of_its_own_datasets(api: InProcessApi, flusher: SqlFlusher):
    _, second_id = write(api, "one", "two")
    of_one, of_two, of_both = request_flush(api, "one"), request_flush(api, "two"), request_flush(api)
    flusher.rejecting[second_id] = PathExists("another file")
    flusher.resumed.clear()
    worker = make_worker(api, flusher)

    with flushing(worker):
        assert flusher.entered.wait(20)
        worker._hold_all()
        during = [show(api, job)["progress"] for job in (of_one, of_two, of_both)]
        flusher.resumed.set()
    after = [show(api, job)["progress"] for job in (of_one, of_two, of_both)]

    assert during == [{"done": 0, "total": total, "unit": "rows"} for total in (2, 2, 4)]
    assert after == [{"done": done, "total": total, "unit": "rows"} for done, total in ((2, 2), (0, 2), (2, 4))]


def test_all_jobs_of_a_round_have_heartbeats_while_it_runs(api: InProcessApi, flusher: SqlFlusher):
    write(api, "one", "two")
    requested = [request_flush(api, "one"), request_flush(api, "two")]
    flusher.resumed.clear()
    worker = make_worker(api, flusher)

    with working(worker):
        assert flusher.entered.wait(20)
        expire_heartbeats(api)
        wait_until(lambda: not has_expired_heartbeat(api))
        flusher.resumed.set()
        done = [api.admin.get(f"/v1/jobs/{job}?wait=20").json()["state"] for job in requested]

    assert done == ["done", "done"]


def has_expired_heartbeat(api: InProcessApi) -> bool:
    with api.services.database.read() as connection:
        beats = connection.execute(select(jobs_table.c.heartbeat)).scalars().all()
    return any(beat < now() - timedelta(minutes=1) for beat in beats)


def test_cancelled_job_leaves_its_round_and_others_continue(api: InProcessApi, flusher: SqlFlusher):
    write(api, "one", "two")
    cancelled, other = request_flush(api, "one"), request_flush(api, "two")
    flusher.resumed.clear()

    with flushing(make_worker(api, flusher)):
        assert flusher.entered.wait(20)
        response = api.admin.delete(f"/v1/jobs/{cancelled}")
        flusher.resumed.set()

    assert (response.status_code, response.json()["state"]) == (202, "running")
    assert [show(api, job)["state"] for job in (cancelled, other)] == ["cancelled", "done"]


def test_round_whose_jobs_are_all_cancelled_is_aborted(api: InProcessApi, flusher: SqlFlusher, store: FaultyStore):
    write(api, "one")
    job = request_flush(api, "one")
    flusher.resumed.clear()

    with flushing(make_worker(api, flusher)):
        assert flusher.entered.wait(20)
        api.admin.delete(f"/v1/jobs/{job}")
        flusher.resumed.set()

    assert show(api, job)["state"] == "cancelled"
    assert api.admin.get("/v1/datasets/one/journal").json()["rows"] == 2
    assert len(runs(store, "one")) == 1


def test_stopping_worker_requeues_all_its_flushes(api: InProcessApi, flusher: SqlFlusher):
    write(api, "one", "two")
    requested = [request_flush(api, "one"), request_flush(api, "two")]
    flusher.resumed.clear()
    worker = make_worker(api, flusher)

    with flushing(worker):
        assert flusher.entered.wait(20)
        worker.stop()
        flusher.resumed.set()
    between = [show(api, job)["state"] for job in requested]
    make_worker(api, flusher).flush()

    assert between == ["queued", "queued"]
    assert [(show(api, job)["state"], show(api, job)["attempts"]) for job in requested] == [("done", 2)] * 2


def test_worker_recovers_first_flushes_due_datasets_and_closes_its_flusher(api: InProcessApi, flusher: SqlFlusher):
    [dataset] = write(api, "one")
    flusher.over_threshold = [dataset]

    with working(make_worker(api, flusher)):
        written = api.admin.post("/v1/datasets/one/entities?commit=wait_for", ENTITY)

    assert (written.status_code, flusher.recovered, flusher.closed) == (200, 1, 1)
    assert api.admin.get("/v1/datasets/one/journal").json()["rows"] == 0


def test_worker_continues_when_recovery_fails(api: InProcessApi, flusher: SqlFlusher, monkeypatch):
    write(api, "one")

    def recover() -> None:
        raise Unavailable("the store is unavailable")

    monkeypatch.setattr(flusher, "recover", recover)

    with working(make_worker(api, flusher)):
        done = api.admin.post("/v1/datasets/one/operations/flush?wait=20")

    assert done.json()["state"] == "done"


def test_worker_without_flusher_does_not_claim_flushes(api: InProcessApi):
    write(api, "one")
    job = request_flush(api, "one")
    worker = make_worker(api)

    claimed = worker.flush(), worker.step()

    assert claimed == (False, False)
    assert show(api, job)["state"] == "queued"
