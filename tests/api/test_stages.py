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
def dataset(house: InProcessApi):
    house.dataset("test")


def open_stage(house: InProcessApi, **body) -> str:
    answer = house.admin.post(STAGES, {"origin": "bulk", **body})
    assert answer.status_code == 201
    return str(answer.json()["id"])


def test_stage_is_seen_only_once_it_commits_and_then_whole(house: InProcessApi):
    stage = open_stage(house, message="first load", metadata={"source": "x"})
    for number in range(3):
        house.admin.post(f"{STAGES}/{stage}/entities", person(number))
    house.admin(
        "POST", f"{STAGES}/{stage}/entities", content=lines(*(person(n) for n in range(15_000))), headers=NDJSON
    )
    before = journal.rows(house), journal.head(house)["rows"], journal.tag(house, "journal/last_updated")
    shown = house.admin.get(f"{STAGES}/{stage}").json()

    committed = house.admin.post(f"{STAGES}/{stage}/commit")

    rows = journal.rows(house)
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
    assert len(rows) == 30_006 == journal.head(house)["rows"]
    assert {row["origin"] for row in rows} == {"bulk"}
    assert len({(row["commit"], row["position"]) for row in rows}) == 30_006
    assert house.admin.get(f"{STAGES}/{stage}").json()["state"] == "committed"


@pytest.mark.contract("W6")
def test_many_parallel_requests_fill_one_stage(house: InProcessApi):
    stage = open_stage(house)
    statuses: list[int] = []

    def send(number: int) -> None:
        statuses.append(house.admin.post(f"{STAGES}/{stage}/entities", person(number)).status_code)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    house.admin.post(f"{STAGES}/{stage}/commit")

    assert statuses == [200] * 24
    assert {row["entity_id"] for row in journal.rows(house)} == {f"p{number}" for number in range(24)}


def test_bad_request_to_a_stage_leaves_nothing_of_itself_in_it(house: InProcessApi):
    stage = open_stage(house)
    house.admin.post(f"{STAGES}/{stage}/entities", JANE)
    body = lines(*(person(number) for number in range(30_000))) + b"broken\n"

    refused = house.admin("POST", f"{STAGES}/{stage}/entities", content=body, headers=NDJSON)
    house.admin.post(f"{STAGES}/{stage}/commit")

    assert refused.status_code == 422
    assert {row["entity_id"] for row in journal.rows(house, None)} == {"jane"}


@pytest.mark.contract("W7")
def test_closed_stage_takes_nothing_more(house: InProcessApi):
    committed, aborted = open_stage(house), open_stage(house)
    house.admin.post(f"{STAGES}/{committed}/commit")
    first_abort = house.admin.delete(f"{STAGES}/{aborted}").status_code

    conflicts = [
        house.admin.post(f"{STAGES}/{committed}/entities", JANE),
        house.admin(
            "POST", f"{STAGES}/{committed}/entities", content=lines(*map(person, range(30_000))), headers=NDJSON
        ),
        house.admin.post(f"{STAGES}/{committed}/commit"),
        house.admin.delete(f"{STAGES}/{committed}"),
        house.admin.post(f"{STAGES}/{aborted}/entities", JANE),
        house.admin.post(f"{STAGES}/{aborted}/commit"),
    ]

    assert [(answer.status_code, answer.json()["type"]) for answer in conflicts] == [
        (409, "/problems/stage-closed")
    ] * 6
    assert (first_abort, house.admin.delete(f"{STAGES}/{aborted}").status_code) == (204, 204)
    assert journal.count(house) == 0


def test_stage_without_rows_leaves_nothing_that_waits_to_be_flushed(house: InProcessApi):
    house.admin.post(f"{STAGES}/{open_stage(house)}/commit")
    empty = journal.head(house)
    house.admin.post("/v1/datasets/test/entities", JANE)

    assert (empty["rows"], empty["oldest"]) == (0, None)
    assert journal.head(house)["oldest"] is not None


def test_aborted_stage_leaves_no_row_and_gives_its_quota_back(house: InProcessApi):
    stage = open_stage(house)
    house.admin("POST", f"{STAGES}/{stage}/entities", content=lines(*map(person, range(15_000))), headers=NDJSON)
    used = house.admin.get("/v1/whoami").json()["limits"]["used_statements"]

    house.admin.delete(f"{STAGES}/{stage}")

    assert used == 30_000
    assert journal.count(house) == 0
    assert house.admin.get("/v1/whoami").json()["limits"]["used_statements"] == 0


def test_stage_left_alone_expires_and_one_in_use_does_not(house: InProcessApi):
    left, used = open_stage(house), open_stage(house)
    for stage in (left, used):
        house.admin.post(f"{STAGES}/{stage}/entities", JANE)
    with house.services.database.write() as connection:
        connection.execute(update(journal_batches).values(expires=now() - timedelta(seconds=1)))
    house.admin.post(f"{STAGES}/{used}/entities", person(1))

    sweep(house.services.database, house.services.settings)

    assert house.admin.post(f"{STAGES}/{left}/commit").status_code == 409
    assert house.admin.post(f"{STAGES}/{used}/commit").json()["entities"] == 2
    assert {row["entity_id"] for row in journal.rows(house, None)} == {"jane", "p1"}


def test_several_stages_commit_as_one_or_not_at_all(house: InProcessApi):
    first, second = open_stage(house), open_stage(house)
    house.admin.post(f"{STAGES}/{first}/entities", person(1))
    house.admin.post(f"{STAGES}/{second}/entities", person(2))
    closed = open_stage(house)
    house.admin.delete(f"{STAGES}/{closed}")

    refused = house.admin.post(f"{STAGES}/commit", {"stages": [first, second, closed]})
    between = journal.rows(house)
    together = house.admin.post(f"{STAGES}/commit", {"stages": [first, second], "message": "both"})

    assert (refused.status_code, between) == (409, [])
    assert together.json()["entities"] == 2
    assert {row["commit"] for row in journal.rows(house)} == {1, 2}


def test_stage_of_another_tenant_does_not_exist(house: InProcessApi):
    stage = open_stage(house)
    alice = house.tenant("alice", test="admin")

    answers = [
        alice.get(f"{STAGES}/{stage}"),
        alice.post(f"{STAGES}/{stage}/entities", JANE),
        alice.post(f"{STAGES}/{stage}/commit"),
        alice.post(f"{STAGES}/commit", {"stages": [stage]}),
        alice.delete(f"{STAGES}/{stage}"),
    ]

    assert [answer.json()["type"] for answer in answers] == ["/problems/stage-not-found"] * 5
    assert alice.get(STAGES).json()["results"] == []


def test_commit_that_names_a_snapshot_fails_while_there_is_none(house: InProcessApi):
    stage = open_stage(house)

    answer = house.admin.post(f"{STAGES}/{stage}/commit", headers={"If-Match": '"anything"'})

    assert answer.status_code == 412
    assert house.admin.get(f"{STAGES}/{stage}").json()["state"] == "open"
