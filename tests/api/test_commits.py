"""Writes that wait for the snapshot that contains them."""

import threading
from collections.abc import Callable

import pytest
from httpx2 import Response
from sqlalchemy import delete
from tarn.db.tables import journal, journal_batches
from tarn.settings import Settings

from tests.in_process_api import Caller, InProcessApi
from tests.journal import journal as journal_content
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
def dataset(api: InProcessApi):
    api.dataset("test")


@pytest.fixture
def flusher(api: InProcessApi) -> SqlFlusher:
    return SqlFlusher(api.services.database)


def head(api: InProcessApi) -> dict:
    journal_depth = api.admin.get(f"{DATASET}/journal").json()
    return {"rows": journal_depth["rows"]}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_write_that_forces_a_flush_returns_the_snapshot_that_contains_it(
    api: InProcessApi, flusher: SqlFlusher, write: Write
):
    with working(make_worker(api, flusher)):
        response = write(api.admin, "?commit=force")

    [job] = api.admin.get("/v1/jobs").json()["results"]
    [snapshot] = job["result"]["snapshots"]
    assert response.status_code == 200
    assert response.json()["snapshot"] == {"seq": snapshot["seq"], "id": snapshot["id"]}
    assert response.json()["commit"] is not None
    assert head(api) == {"rows": 0}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_write_returns_at_once_by_default_and_requests_no_flush(api: InProcessApi, write: Write):
    responses = [write(api.admin, ""), write(api.admin, "?commit=auto")]

    assert [response.status_code for response in responses] == [200, 200]
    assert [response.json()["snapshot"] for response in responses] == [None, None]
    assert api.admin.get("/v1/jobs").json()["results"] == []


def test_write_that_waits_requests_no_flush_and_returns_the_first_snapshot_that_contains_it(
    api: InProcessApi, flusher: SqlFlusher
):
    responses: list[Response] = []
    writing = threading.Thread(target=lambda: responses.append(WRITES["entities"](api.admin, "?commit=wait_for")))
    writing.start()
    wait_until(lambda: bool(journal_content.batches(api)))
    flusher.over_threshold = [id_of(api, "test")]
    with working(make_worker(api, flusher)):
        writing.join(20)

    [response] = responses
    assert (response.status_code, response.json()["snapshot"]["seq"]) == (200, 1)
    assert api.admin.get("/v1/jobs").json()["results"] == []


@pytest.mark.parametrize("commit", ["wait_for", "force"])
@pytest.mark.parametrize("write", [WRITES["entities"], WRITES["delete"], WRITES["stage"]])
def test_write_whose_wait_times_out_is_202_and_durable(api: InProcessApi, commit: str, write: Write):
    response = write(api.with_settings(commit_wait=0.05).admin, f"?commit={commit}")

    assert (response.status_code, response.json()["snapshot"], response.json()["commit"]) == (202, None, 1)
    assert journal_content.count(api) > 0


@pytest.mark.parametrize("commit", ["wait_for", "force"])
def test_write_without_statements_does_not_wait(api: InProcessApi, commit: str):
    nothing = api.admin.post(f"{DATASET}/entities?commit={commit}", [])
    stage = api.admin.post(f"{DATASET}/stages", {}).json()["id"]
    empty = api.admin.post(f"{DATASET}/stages/{stage}/commit?commit={commit}")

    assert (nothing.status_code, nothing.json()["commit"], nothing.json()["snapshot"]) == (200, None, None)
    assert (empty.status_code, empty.json()["snapshot"]) == (200, None)
    assert api.admin.get("/v1/jobs").json()["results"] == []


def test_replayed_write_waits_too(api: InProcessApi, flusher: SqlFlusher):
    key = {"Idempotency-Key": "k"}
    path = f"{DATASET}/entities?commit=force"
    first = api.with_settings(commit_wait=0).admin.post(path, ENTITY, headers=key)

    with working(make_worker(api, flusher)):
        again = api.admin.post(path, ENTITY, headers=key)

    assert (first.status_code, first.json()["snapshot"]) == (202, None)
    assert (again.status_code, again.json()["snapshot"]["seq"]) == (200, 1)
    assert again.json() | {"snapshot": None} == first.json()
    assert len(journal_content.batches(api)) == 1


def test_replayed_write_whose_batch_is_purged_returns_the_head(api: InProcessApi, flusher: SqlFlusher):
    key = {"Idempotency-Key": "k"}
    with working(make_worker(api, flusher)):
        first = api.admin.post(f"{DATASET}/entities?commit=force", ENTITY, headers=key)
    with api.services.database.write() as connection:
        connection.execute(delete(journal))
        connection.execute(delete(journal_batches))

    again = api.admin.post(f"{DATASET}/entities?commit=force", ENTITY, headers=key)

    assert (again.status_code, again.json()) == (200, first.json())


def test_wait_for_a_forced_flush_that_fails_ends_early(api: InProcessApi, flusher: SqlFlusher):
    flusher.failing[id_of(api, "test")] = RuntimeError("broken")

    with working(make_worker(api, flusher)):
        response = WRITES["entities"](api.admin, "?commit=force")

    [job] = api.admin.get("/v1/jobs").json()["results"]
    assert (response.status_code, response.json()["snapshot"], job["state"]) == (202, None, "failed")


def test_wait_ends_when_the_server_stops(api: InProcessApi):
    api.services.stopping.set()

    response = WRITES["entities"](api.admin, "?commit=wait_for")

    assert response.status_code == 202


def test_commit_option_on_a_write_to_a_stage_is_refused(api: InProcessApi):
    stage = api.admin.post(f"{DATASET}/stages", {}).json()["id"]

    response = api.admin.post(f"{DATASET}/stages/{stage}/entities?commit=force", ENTITY)

    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "query.commit"


def test_flush_forced_by_a_write_is_a_job_of_the_writers_tenant(api: InProcessApi, flusher: SqlFlusher):
    alice = api.tenant("alice", test="write")

    with working(make_worker(api, flusher)):
        response = WRITES["entities"](alice, "?commit=force")

    [job] = alice.get("/v1/jobs").json()["results"]
    assert response.json()["snapshot"] is not None
    assert (job["tenant"], job["operation"], job["dataset"]) == ("alice", "flush", "test")
