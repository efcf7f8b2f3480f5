"""Writes that wait for their snapshot."""

import threading
from collections.abc import Callable

import pytest
from httpx2 import Response
from sqlalchemy import delete
from tarn.db.tables import journal, journal_batches
from tarn.settings import Settings

from tests.in_process_api import Caller, InProcessApi
from tests.journal import journal as looked_into
from tests.waiting import wait_until
from tests.worker.flushers import SqlFlusher, id_of
from tests.worker.workers import make_worker, working

DATASET = "/v1/datasets/test"
ENTITY = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}
STATEMENT = {"entity_id": "jane", "schema": "Person", "prop": "name", "value": "Jane Doe"}

Write = Callable[[Caller, str], Response]


def _commit_stage(caller: Caller, query: str) -> Response:
    stage = caller.post(f"{DATASET}/stages", {}).json()["id"]
    caller.post(f"{DATASET}/stages/{stage}/entities", ENTITY)
    return caller.post(f"{DATASET}/stages/{stage}/commit{query}")


def _commit_stages(caller: Caller, query: str) -> Response:
    stage = caller.post(f"{DATASET}/stages", {}).json()["id"]
    caller.post(f"{DATASET}/stages/{stage}/entities", ENTITY)
    return caller.post(f"{DATASET}/stages/commit{query}", {"stages": [stage]})


def _delete_statement(caller: Caller, query: str) -> Response:
    caller.post(f"{DATASET}/statements", STATEMENT, params={"origin": "o"})
    return caller.delete(f"{DATASET}/statements/d5f32d066d6f1679e1ba2bd0b1ef9f474b2e0cfd{query}")


WRITES: dict[str, Write] = {
    "entities": lambda caller, query: caller.post(f"{DATASET}/entities{query}", ENTITY),
    "put": lambda caller, query: caller.put(f"{DATASET}/entities/jane{query}", ENTITY),
    "delete": lambda caller, query: caller.delete(f"{DATASET}/entities/jane{query}"),
    "statements": lambda caller, query: caller.post(f"{DATASET}/statements{query}", STATEMENT),
    "statement": _delete_statement,
    "origin": lambda caller, query: caller.delete(f"{DATASET}/origins/crawl{query}"),
    "stage": _commit_stage,
    "stages": _commit_stages,
}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"commit_wait": 20.0})


@pytest.fixture(autouse=True)
def dataset(house: InProcessApi):
    house.dataset("test")


@pytest.fixture
def flusher(house: InProcessApi) -> SqlFlusher:
    return SqlFlusher(house.services.database)


def head(house: InProcessApi) -> dict:
    journal_depth = house.admin.get(f"{DATASET}/journal").json()
    return {"rows": journal_depth["rows"]}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_write_that_forces_a_flush_is_answered_with_the_snapshot_that_holds_it(
    house: InProcessApi, flusher: SqlFlusher, write: Write
):
    with working(make_worker(house, flusher)):
        answer = write(house.admin, "?commit=force")

    [job] = house.admin.get("/v1/jobs").json()["results"]
    [made] = job["result"]["snapshots"]
    assert answer.status_code == 200
    assert answer.json()["snapshot"] == {"seq": made["seq"], "id": made["id"]}
    assert answer.json()["commit"] is not None
    assert head(house) == {"rows": 0}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_write_is_answered_at_once_by_default_and_asks_for_no_flush(house: InProcessApi, write: Write):
    answers = [write(house.admin, ""), write(house.admin, "?commit=auto")]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert [answer.json()["snapshot"] for answer in answers] == [None, None]
    assert house.admin.get("/v1/jobs").json()["results"] == []


def test_write_that_waits_asks_for_no_flush_and_gets_the_first_snapshot_that_holds_it(
    house: InProcessApi, flusher: SqlFlusher
):
    answers: list[Response] = []
    writing = threading.Thread(target=lambda: answers.append(WRITES["entities"](house.admin, "?commit=wait_for")))
    writing.start()
    wait_until(lambda: bool(looked_into.batches(house)))
    flusher.over_threshold = [id_of(house, "test")]
    with working(make_worker(house, flusher)):
        writing.join(20)

    [answer] = answers
    assert (answer.status_code, answer.json()["snapshot"]["seq"]) == (200, 1)
    assert house.admin.get("/v1/jobs").json()["results"] == []


@pytest.mark.parametrize("commit", ["wait_for", "force"])
@pytest.mark.parametrize("write", [WRITES["entities"], WRITES["delete"], WRITES["stage"]])
def test_write_whose_wait_runs_out_is_202_and_durable(house: InProcessApi, commit: str, write: Write):
    answer = write(house.with_settings(commit_wait=0.05).admin, f"?commit={commit}")

    assert (answer.status_code, answer.json()["snapshot"], answer.json()["commit"]) == (202, None, 1)
    assert looked_into.count(house) > 0


@pytest.mark.parametrize("commit", ["wait_for", "force"])
def test_write_of_nothing_has_nothing_to_wait_for(house: InProcessApi, commit: str):
    nothing = house.admin.post(f"{DATASET}/entities?commit={commit}", [])
    stage = house.admin.post(f"{DATASET}/stages", {}).json()["id"]
    empty = house.admin.post(f"{DATASET}/stages/{stage}/commit?commit={commit}")

    assert (nothing.status_code, nothing.json()["commit"], nothing.json()["snapshot"]) == (200, None, None)
    assert (empty.status_code, empty.json()["snapshot"]) == (200, None)
    assert house.admin.get("/v1/jobs").json()["results"] == []


def test_replayed_write_waits_as_well(house: InProcessApi, flusher: SqlFlusher):
    key = {"Idempotency-Key": "k"}
    path = f"{DATASET}/entities?commit=force"
    first = house.with_settings(commit_wait=0).admin.post(path, ENTITY, headers=key)

    with working(make_worker(house, flusher)):
        again = house.admin.post(path, ENTITY, headers=key)

    assert (first.status_code, first.json()["snapshot"]) == (202, None)
    assert (again.status_code, again.json()["snapshot"]["seq"]) == (200, 1)
    assert again.json() | {"snapshot": None} == first.json()
    assert len(looked_into.batches(house)) == 1


def test_replayed_write_whose_batch_is_purged_gets_the_head(house: InProcessApi, flusher: SqlFlusher):
    key = {"Idempotency-Key": "k"}
    with working(make_worker(house, flusher)):
        first = house.admin.post(f"{DATASET}/entities?commit=force", ENTITY, headers=key)
    with house.services.database.write() as connection:
        connection.execute(delete(journal))
        connection.execute(delete(journal_batches))

    again = house.admin.post(f"{DATASET}/entities?commit=force", ENTITY, headers=key)

    assert (again.status_code, again.json()) == (200, first.json())


def test_flush_that_was_forced_and_cannot_be_done_is_not_waited_for_to_the_end(
    house: InProcessApi, flusher: SqlFlusher
):
    flusher.failing[id_of(house, "test")] = RuntimeError("broken")

    with working(make_worker(house, flusher)):
        answer = WRITES["entities"](house.admin, "?commit=force")

    [job] = house.admin.get("/v1/jobs").json()["results"]
    assert (answer.status_code, answer.json()["snapshot"], job["state"]) == (202, None, "failed")


def test_nobody_is_kept_waiting_when_the_server_stops(house: InProcessApi):
    house.services.stopping.set()

    answer = WRITES["entities"](house.admin, "?commit=wait_for")

    assert answer.status_code == 202


def test_stage_is_not_told_how_to_commit_what_is_sent_to_it(house: InProcessApi):
    stage = house.admin.post(f"{DATASET}/stages", {}).json()["id"]

    answer = house.admin.post(f"{DATASET}/stages/{stage}/entities?commit=force", ENTITY)

    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "query.commit"


def test_flush_that_a_writer_forces_is_a_job_of_its_own_tenant(house: InProcessApi, flusher: SqlFlusher):
    alice = house.tenant("alice", test="write")

    with working(make_worker(house, flusher)):
        answer = WRITES["entities"](alice, "?commit=force")

    [job] = alice.get("/v1/jobs").json()["results"]
    assert answer.json()["snapshot"] is not None
    assert (job["tenant"], job["operation"], job["dataset"]) == ("alice", "flush", "test")
