"""Stages over HTTP."""

import threading
from datetime import timedelta

import pytest
from sqlalchemy import update
from tarn.db.tables import journal_batches
from tarn.journal.expiry import sweep
from tarn.model.ids import now

from tests.api.test_entities import JANE, NDJSON, lines, person
from tests.in_process_api import NOTHING_LEFT_OUT, InProcessApi
from tests.journal import journal

STAGES = "/v1/datasets/test/stages"


@pytest.fixture(autouse=True)
def dataset(api: InProcessApi):
    api.dataset("test")


def open_stage(api: InProcessApi, **body) -> str:
    response = api.admin.post(STAGES, {"origin": "bulk", **body})
    assert response.status_code == 201
    return str(response.json()["id"])


def test_stage_is_visible_only_after_its_commit_and_then_completely(api: InProcessApi):
    stage = open_stage(api, message="first load", metadata={"source": "x"})
    for number in range(3):
        api.admin.post(f"{STAGES}/{stage}/entities", person(number))
    api.admin("POST", f"{STAGES}/{stage}/entities", content=lines(*(person(n) for n in range(15_000))), headers=NDJSON)
    before = journal.rows(api), journal.head(api)["rows"], journal.tag(api, "journal/last_updated")
    shown = api.admin.get(f"{STAGES}/{stage}").json()

    committed = api.admin.post(f"{STAGES}/{stage}/commit")

    rows = journal.rows(api)
    assert before == ([], 0, None)
    assert (shown["state"], shown["entities"], shown["metadata"]) == ("open", 15_003, {"source": "x"})
    assert committed.json() == {
        "entities": 15_003,
        "statements": 30_006,
        "rejected": 0,
        "commit": 4,
        "snapshot": None,
        **NOTHING_LEFT_OUT,
    }
    assert len(rows) == 30_006 == journal.head(api)["rows"]
    assert {row["origin"] for row in rows} == {"bulk"}
    assert len({(row["commit"], row["position"]) for row in rows}) == 30_006
    assert api.admin.get(f"{STAGES}/{stage}").json()["state"] == "committed"


@pytest.mark.both_databases
@pytest.mark.contract("W6")
def test_many_parallel_requests_fill_one_stage(api: InProcessApi):
    stage = open_stage(api)
    statuses: list[int] = []

    def send(number: int) -> None:
        statuses.append(api.admin.post(f"{STAGES}/{stage}/entities", person(number)).status_code)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    api.admin.post(f"{STAGES}/{stage}/commit")

    assert statuses == [200] * 24
    assert {row["entity_id"] for row in journal.rows(api)} == {f"p{number}" for number in range(24)}


def test_bad_request_to_a_stage_adds_nothing_to_it(api: InProcessApi):
    stage = open_stage(api)
    api.admin.post(f"{STAGES}/{stage}/entities", JANE)
    body = lines(*(person(number) for number in range(30_000))) + b"broken\n"

    refused = api.admin("POST", f"{STAGES}/{stage}/entities", content=body, headers=NDJSON)
    api.admin.post(f"{STAGES}/{stage}/commit")

    assert refused.status_code == 422
    assert {row["entity_id"] for row in journal.rows(api, None)} == {"jane"}


@pytest.mark.contract("W7")
def test_closed_stage_accepts_nothing_more(api: InProcessApi):
    committed, aborted = open_stage(api), open_stage(api)
    api.admin.post(f"{STAGES}/{committed}/commit")
    first_abort = api.admin.delete(f"{STAGES}/{aborted}").status_code

    conflicts = [
        api.admin.post(f"{STAGES}/{committed}/entities", JANE),
        api.admin("POST", f"{STAGES}/{committed}/entities", content=lines(*map(person, range(30_000))), headers=NDJSON),
        api.admin.post(f"{STAGES}/{committed}/commit"),
        api.admin.delete(f"{STAGES}/{committed}"),
        api.admin.post(f"{STAGES}/{aborted}/entities", JANE),
        api.admin.post(f"{STAGES}/{aborted}/commit"),
    ]

    assert [(response.status_code, response.json()["type"]) for response in conflicts] == [
        (409, "/problems/stage-closed")
    ] * 6
    assert (first_abort, api.admin.delete(f"{STAGES}/{aborted}").status_code) == (204, 204)
    assert journal.count(api) == 0


def test_stage_without_rows_leaves_nothing_to_flush(api: InProcessApi):
    api.admin.post(f"{STAGES}/{open_stage(api)}/commit")
    empty = journal.head(api)
    api.admin.post("/v1/datasets/test/entities", JANE)

    assert (empty["rows"], empty["oldest"]) == (0, None)
    assert journal.head(api)["oldest"] is not None


def test_aborted_stage_leaves_no_row_and_releases_its_quota(api: InProcessApi):
    stage = open_stage(api)
    api.admin("POST", f"{STAGES}/{stage}/entities", content=lines(*map(person, range(15_000))), headers=NDJSON)
    used = api.admin.get("/v1/whoami").json()["limits"]["used_statements"]

    api.admin.delete(f"{STAGES}/{stage}")

    assert used == 30_000
    assert journal.count(api) == 0
    assert api.admin.get("/v1/whoami").json()["limits"]["used_statements"] == 0


@pytest.mark.both_databases
def test_idle_stage_expires_and_one_in_use_does_not(api: InProcessApi):
    idle, active = open_stage(api), open_stage(api)
    for stage in (idle, active):
        api.admin.post(f"{STAGES}/{stage}/entities", JANE)
    with api.services.database.write() as connection:
        connection.execute(update(journal_batches).values(expires=now() - timedelta(seconds=1)))
    api.admin.post(f"{STAGES}/{active}/entities", person(1))

    sweep(api.services.database, api.services.settings)

    assert api.admin.post(f"{STAGES}/{idle}/commit").status_code == 409
    assert api.admin.post(f"{STAGES}/{active}/commit").json()["entities"] == 2
    assert {row["entity_id"] for row in journal.rows(api, None)} == {"jane", "p1"}


@pytest.mark.both_databases
def test_several_stages_commit_atomically(api: InProcessApi):
    first, second = open_stage(api), open_stage(api)
    api.admin.post(f"{STAGES}/{first}/entities", person(1))
    api.admin.post(f"{STAGES}/{second}/entities", person(2))
    closed = open_stage(api)
    api.admin.delete(f"{STAGES}/{closed}")

    refused = api.admin.post(f"{STAGES}/commit", {"stages": [first, second, closed]})
    between = journal.rows(api)
    together = api.admin.post(f"{STAGES}/commit", {"stages": [first, second], "message": "both"})

    assert (refused.status_code, between) == (409, [])
    assert together.json()["entities"] == 2
    assert {row["commit"] for row in journal.rows(api)} == {1, 2}


def test_stage_of_another_tenant_is_not_found(api: InProcessApi):
    stage = open_stage(api)
    alice = api.tenant("alice", test="admin")

    responses = [
        alice.get(f"{STAGES}/{stage}"),
        alice.post(f"{STAGES}/{stage}/entities", JANE),
        alice.post(f"{STAGES}/{stage}/commit"),
        alice.post(f"{STAGES}/commit", {"stages": [stage]}),
        alice.delete(f"{STAGES}/{stage}"),
    ]

    assert [response.json()["type"] for response in responses] == ["/problems/stage-not-found"] * 5
    assert alice.get(STAGES).json()["results"] == []


def test_commit_with_a_parent_snapshot_fails_while_there_is_none(api: InProcessApi):
    stage = open_stage(api)

    response = api.admin.post(f"{STAGES}/{stage}/commit", headers={"If-Match": '"anything"'})

    assert response.status_code == 412
    assert api.admin.get(f"{STAGES}/{stage}").json()["state"] == "open"
