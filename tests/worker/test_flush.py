"""Flush jobs and rounds: many at once, none held up by another."""

from datetime import timedelta

import orjson
import pytest
from sqlalchemy import select
from tarn.db.tables import jobs as jobs_table
from tarn.errors import Locked, PathExists, StorageFull, Unavailable
from tarn.model.ids import now
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.store import Store
from tarn.worker.flush_rounds import Rounds

from tests.in_process_api import InProcessApi
from tests.waiting import wait_until
from tests.worker.flushers import SqlFlusher, id_of
from tests.worker.workers import fall_silent, flushing, let_time_pass, make_worker, working

ENTITY = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}


@pytest.fixture
def store(store: Store) -> FaultyStore:
    return FaultyStore(store)


@pytest.fixture
def flusher(house: InProcessApi) -> SqlFlusher:
    return SqlFlusher(house.services.database)


def write(house: InProcessApi, *names: str) -> list[str]:
    """Make these datasets, with an entity (two statements) in each; returns their ids."""
    for name in names:
        house.dataset(name)
        assert house.admin.post(f"/v1/datasets/{name}/entities", ENTITY).status_code == 200
    return [id_of(house, name) for name in names]


def ignore(*_: object) -> None:
    """Is told, and does nothing."""


def request_flush(house: InProcessApi, name: str | None = None) -> str:
    path = "/v1/operations/flush" if name is None else f"/v1/datasets/{name}/operations/flush"
    job: str = house.admin.post(path).json()["id"]
    return job


def show(house: InProcessApi, job: str) -> dict:
    return house.admin.get(f"/v1/jobs/{job}").json()


def runs(store: Store, name: str) -> list[str]:
    return [entry.path for entry in store.list(f"{name}/jobs/runs")]


def test_every_flush_asked_for_and_what_is_due_are_one_round_and_each_job_has_its_own_result(
    house: InProcessApi, flusher: SqlFlusher
):
    one, two, due = write(house, "one", "two", "three")
    first, second, both = request_flush(house, "one"), request_flush(house, "two"), request_flush(house)
    flusher.over_threshold = [due]

    worked = make_worker(house, flusher).flush()

    results = [show(house, job)["result"] for job in (first, second, both)]
    assert worked
    assert [sorted(ids) for ids in flusher.rounds] == [sorted([one, two, due])]
    assert [result["statements"] for result in results] == [2, 2, 6]
    assert [[each["dataset"] for each in result["snapshots"]] for result in results[:2]] == [["one"], ["two"]]
    assert {each["dataset"] for each in results[2]["snapshots"]} == {"one", "two", "three"}


def test_flush_of_nothing_makes_no_snapshot_and_is_done(house: InProcessApi, flusher: SqlFlusher):
    house.dataset("empty")
    job = request_flush(house, "empty")

    make_worker(house, flusher).flush()

    assert show(house, job)["result"] == {"operation": "flush", "statements": 0, "snapshots": []}
    assert not make_worker(house, flusher).flush()


def test_run_of_a_flush_is_recorded_as_the_api_shows_it(house: InProcessApi, flusher: SqlFlusher, store: FaultyStore):
    write(house, "one")
    job = request_flush(house, "one")

    make_worker(house, flusher).flush()

    [path] = runs(store, "one")
    assert path.startswith("one/jobs/runs/flush/")
    assert orjson.loads(store.get(path)) == show(house, job)


def test_run_that_cannot_be_recorded_is_done_all_the_same(house: InProcessApi, flusher: SqlFlusher, store: FaultyStore):
    write(house, "one")
    job = request_flush(house, "one")
    store.fail("put", "one/jobs/*", Unavailable("not now"))

    make_worker(house, flusher).flush()

    assert show(house, job)["state"] == "done"


def test_run_is_not_recorded_where_the_dataset_is_deleted_meanwhile(
    house: InProcessApi, flusher: SqlFlusher, store: FaultyStore
):
    write(house, "one")
    request_flush(house, "one")
    gate = store.block("put", "one/jobs/*")

    with flushing(make_worker(house, flusher)):
        gate.wait_arrived()
        house.admin.delete("/v1/datasets/one?confirm=one")
        make_worker(house).step()
        gate.release()

    assert list(store.list("one")) == []


def test_delete_leaves_no_record_of_its_run(house: InProcessApi, store: FaultyStore):
    house.dataset("one")
    house.admin.delete("/v1/datasets/one?confirm=one")

    make_worker(house).step()

    assert list(store.list("one")) == []


def test_dataset_that_cannot_be_flushed_fails_its_own_job_and_no_other(house: InProcessApi, flusher: SqlFlusher):
    broken, _ = write(house, "broken", "sound")
    flusher.failing[broken] = StorageFull("no room")
    failing, sound, both = request_flush(house, "broken"), request_flush(house, "sound"), request_flush(house)

    make_worker(house, flusher).flush()

    shown = [show(house, job) for job in (failing, sound, both)]
    assert [job["state"] for job in shown] == ["failed", "done", "failed"]
    assert shown[0]["problem"]["type"] == "/problems/storage-full"
    assert shown[1]["result"]["statements"] == 2


def test_dataset_that_failed_by_itself_is_kept_apart_until_it_succeeds(house: InProcessApi, flusher: SqlFlusher):
    broken, sound, other = write(house, "broken", "sound", "other")
    flusher.failing[broken] = StorageFull("no room")
    rounds = Rounds(flusher)
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
    assert [len(outcomes[each]) for each in ids] == [0, 1, 0]  # type: ignore[arg-type]  # none of them an error
    assert flusher.rounds == [ids]


def test_dataset_that_the_flusher_reports_as_failed_fails_its_own_job_in_one_round(
    house: InProcessApi, flusher: SqlFlusher
):
    broken, _ = write(house, "broken", "sound")
    flusher.refusing[broken] = StorageFull("no room")
    failing, sound = request_flush(house, "broken"), request_flush(house, "sound")
    flusher.over_threshold = [broken]
    worker = make_worker(house, flusher)

    worker.flush()
    left_alone = not worker.flush()

    assert [show(house, job)["state"] for job in (failing, sound)] == ["failed", "done"]
    assert len(flusher.rounds) == 1
    assert left_alone


@pytest.mark.parametrize("error", [Unavailable("the store is away"), Locked("another worker", holder="w")])
def test_flush_that_meets_an_error_that_passes_is_tried_again(
    house: InProcessApi, flusher: SqlFlusher, error: Exception
):
    [dataset] = write(house, "one")
    flusher.failing[dataset] = error
    job = request_flush(house, "one")
    worker = make_worker(house, flusher)

    worker.flush()
    between = show(house, job)
    early = worker.flush()
    flusher.failing.clear()
    let_time_pass(house)
    worker.flush()

    assert (between["state"], early) == ("queued", False)
    assert between["not_before"] is not None
    assert (show(house, job)["state"], show(house, job)["problem"]) == ("done", None)


def test_store_that_is_away_is_not_asked_once_for_each_dataset(house: InProcessApi, flusher: SqlFlusher):
    ids = write(house, "one", "two")
    flusher.failing = dict.fromkeys(ids, Unavailable("the store is away"))
    job = request_flush(house)

    make_worker(house, flusher).flush()

    assert len(flusher.rounds) == 1
    assert show(house, job)["state"] == "queued"


def test_broken_dataset_over_its_threshold_is_left_alone_longer_and_longer(house: InProcessApi, flusher: SqlFlusher):
    broken, sound = write(house, "broken", "sound")
    flusher.failing[broken] = RuntimeError("broken")
    flusher.over_threshold = [broken, sound]
    clock = [0.0]
    rounds = Rounds(flusher, lambda: clock[0])
    waits = []

    for _ in range(4):
        rounds.flush(rounds.due(), lambda: None, ignore)
        begun = clock[0]
        while not rounds.due():
            clock[0] += 1
        waits.append(clock[0] - begun)

    assert waits == sorted(waits)
    assert waits[0] >= 2
    assert waits[-1] >= 20


def test_threshold_that_cannot_be_told_does_not_keep_jobs_from_being_done(
    house: InProcessApi, flusher: SqlFlusher, monkeypatch
):
    write(house, "one")
    job = request_flush(house, "one")

    def due() -> list[str]:
        raise RuntimeError("broken")

    monkeypatch.setattr(flusher, "due", due)

    make_worker(house, flusher).flush()

    assert show(house, job)["state"] == "done"


def test_flush_shows_how_many_rows_of_its_own_datasets_are_in_snapshots(house: InProcessApi, flusher: SqlFlusher):
    _, two = write(house, "one", "two")
    of_one, of_two, of_both = request_flush(house, "one"), request_flush(house, "two"), request_flush(house)
    flusher.refusing[two] = PathExists("somebody's file")
    flusher.goes_on.clear()
    worker = make_worker(house, flusher)

    with flushing(worker):
        assert flusher.entered.wait(20)
        worker._hold_all()
        amid = [show(house, job)["progress"] for job in (of_one, of_two, of_both)]
        flusher.goes_on.set()
    after = [show(house, job)["progress"] for job in (of_one, of_two, of_both)]

    assert amid == [{"done": 0, "total": total, "unit": "rows"} for total in (2, 2, 4)]
    assert after == [{"done": done, "total": total, "unit": "rows"} for done, total in ((2, 2), (0, 2), (2, 4))]


def test_all_jobs_of_a_round_beat_while_it_runs(house: InProcessApi, flusher: SqlFlusher):
    write(house, "one", "two")
    asked = [request_flush(house, "one"), request_flush(house, "two")]
    flusher.goes_on.clear()
    worker = make_worker(house, flusher)

    with working(worker):
        assert flusher.entered.wait(20)
        fall_silent(house)
        wait_until(lambda: not silent(house))
        flusher.goes_on.set()
        done = [house.admin.get(f"/v1/jobs/{job}?wait=20").json()["state"] for job in asked]

    assert done == ["done", "done"]


def silent(house: InProcessApi) -> bool:
    with house.services.database.read() as connection:
        beats = connection.execute(select(jobs_table.c.heartbeat)).scalars().all()
    return any(beat < now() - timedelta(minutes=1) for beat in beats)


def test_cancelled_job_leaves_its_round_and_the_others_go_on(house: InProcessApi, flusher: SqlFlusher):
    write(house, "one", "two")
    given_up, other = request_flush(house, "one"), request_flush(house, "two")
    flusher.goes_on.clear()

    with flushing(make_worker(house, flusher)):
        assert flusher.entered.wait(20)
        asked = house.admin.delete(f"/v1/jobs/{given_up}")
        flusher.goes_on.set()

    assert (asked.status_code, asked.json()["state"]) == (202, "running")
    assert [show(house, job)["state"] for job in (given_up, other)] == ["cancelled", "done"]


def test_round_in_which_every_job_is_cancelled_is_given_up(
    house: InProcessApi, flusher: SqlFlusher, store: FaultyStore
):
    write(house, "one")
    job = request_flush(house, "one")
    flusher.goes_on.clear()

    with flushing(make_worker(house, flusher)):
        assert flusher.entered.wait(20)
        house.admin.delete(f"/v1/jobs/{job}")
        flusher.goes_on.set()

    assert show(house, job)["state"] == "cancelled"
    assert house.admin.get("/v1/datasets/one/journal").json()["rows"] == 2
    assert len(runs(store, "one")) == 1


def test_worker_that_must_stop_hands_all_its_flushes_back(house: InProcessApi, flusher: SqlFlusher):
    write(house, "one", "two")
    asked = [request_flush(house, "one"), request_flush(house, "two")]
    flusher.goes_on.clear()
    worker = make_worker(house, flusher)

    with flushing(worker):
        assert flusher.entered.wait(20)
        worker.stop()
        flusher.goes_on.set()
    between = [show(house, job)["state"] for job in asked]
    make_worker(house, flusher).flush()

    assert between == ["queued", "queued"]
    assert [(show(house, job)["state"], show(house, job)["attempts"]) for job in asked] == [("done", 2)] * 2


def test_worker_recovers_first_flushes_what_is_due_and_closes_its_flusher(house: InProcessApi, flusher: SqlFlusher):
    [dataset] = write(house, "one")
    flusher.over_threshold = [dataset]

    with working(make_worker(house, flusher)):
        written = house.admin.post("/v1/datasets/one/entities?commit=wait_for", ENTITY)

    assert (written.status_code, flusher.recovered, flusher.closed) == (200, 1, 1)
    assert house.admin.get("/v1/datasets/one/journal").json()["rows"] == 0


def test_worker_works_on_when_recovery_fails(house: InProcessApi, flusher: SqlFlusher, monkeypatch):
    write(house, "one")

    def recover() -> None:
        raise Unavailable("the store is away")

    monkeypatch.setattr(flusher, "recover", recover)

    with working(make_worker(house, flusher)):
        done = house.admin.post("/v1/datasets/one/operations/flush?wait=20")

    assert done.json()["state"] == "done"


def test_worker_without_a_flusher_leaves_flushes_to_others(house: InProcessApi):
    write(house, "one")
    job = request_flush(house, "one")
    worker = make_worker(house)

    worked = worker.flush(), worker.step()

    assert worked == (False, False)
    assert show(house, job)["state"] == "queued"
