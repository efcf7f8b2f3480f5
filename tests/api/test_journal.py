"""The journal over HTTP: what waits, and what was set aside."""

import threading

import pytest
from sqlalchemy import select
from tarn.db.tables import journal_rejected
from tarn.journal import head as heads
from tarn.journal import rejected
from tarn.journal.event_buffer import SCHEMA
from tarn.journal.rejected import Rejected

from tests.in_process_api import InProcessApi
from tests.journal import journal
from tests.worker.flushers import id_of

PATH = "/v1/datasets/test/journal"
ENTITIES = "/v1/datasets/test/entities"
ENTITY = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}


@pytest.fixture(autouse=True)
def dataset(house: InProcessApi):
    house.dataset("test")


def event(row: dict) -> dict:
    """A row of the journal as it is set aside."""
    plain = {name: row[name] for name in SCHEMA.names if name not in ("batch", "position")}
    return plain | {"id": None if row["id"] is None else row["id"].hex()}


def reject_events(house: InProcessApi, count: int | None = None) -> list[dict]:
    """Set aside what the journal holds, or as much of it, as a flush would; returns the events."""
    rows = journal.rows(house)[:count]
    with house.services.database.write() as connection:
        rejected.store_rejected(
            connection,
            id_of(house, "test"),
            [
                Rejected(f"batch-{row['commit']}", "alice", row["commit"], row["position"], event(row), "too long")
                for row in rows
            ],
        )
    return [event(row) for row in rows]


def count_rejected(house: InProcessApi) -> int:
    with house.services.database.read() as connection:
        return len(connection.execute(select(journal_rejected.c.id)).all())


def test_empty_journal_has_an_open_segment_and_nothing_in_it(house: InProcessApi):
    assert house.admin.get(PATH).json() == {
        "segment": 1,
        "commit": 0,
        "rows": 0,
        "oldest": None,
        "segments": [{"segment": 1, "batches": 0, "rows": 0, "state": "open"}],
    }


def test_what_waits_is_told_by_segment(house: InProcessApi):
    house.admin.post(ENTITIES, ENTITY)
    house.admin.put(f"{ENTITIES}/jane", ENTITY)
    with house.services.database.write() as connection:
        heads.rotate(connection, id_of(house, "test"))
    stage = house.admin.post("/v1/datasets/test/stages", {}).json()["id"]
    house.admin.post(f"/v1/datasets/test/stages/{stage}/entities", ENTITY)
    before = house.admin.get(PATH).json()
    house.admin.post(f"/v1/datasets/test/stages/{stage}/commit")

    after = house.admin.get(PATH).json()

    closed = {"segment": 1, "batches": 2, "rows": 5, "state": "closed"}
    assert before["segments"] == [closed, {"segment": 2, "batches": 0, "rows": 0, "state": "open"}]
    assert after["segments"] == [closed, {"segment": 2, "batches": 1, "rows": 2, "state": "open"}]
    assert (after["segment"], after["commit"], after["rows"]) == (2, 3, 7)
    assert after["oldest"] is not None


def test_journal_needs_read_and_what_was_set_aside_maintain(house: InProcessApi):
    reader, writer = house.tenant("reader", test="read"), house.tenant("writer", test="write")

    statuses = [reader.get(PATH), writer.get(f"{PATH}/rejected"), writer.post(f"{PATH}/rejected/retry")]

    assert [answer.status_code for answer in statuses] == [200, 403, 403]


def test_events_set_aside_are_listed_page_by_page_as_they_were(house: InProcessApi):
    house.admin.post(ENTITIES, ENTITY)
    events = reject_events(house)

    first = house.admin.get(f"{PATH}/rejected?limit=1").json()
    second = house.admin.get(f"{PATH}/rejected?limit=1&cursor={first['next']}").json()

    listed = [*first["results"], *second["results"]]
    assert [each["event"] for each in listed] == events
    assert [(each["batch"], each["commit"], each["position"], each["tenant"]) for each in listed] == [
        ("batch-1", 1, 0, "alice"),
        ("batch-1", 1, 1, "alice"),
    ]
    assert {each["reason"] for each in listed} == {"too long"}
    assert second["next"] is None


def test_events_set_aside_twice_are_kept_once(house: InProcessApi):
    house.admin.post(ENTITIES, ENTITY)

    reject_events(house)
    reject_events(house)

    assert count_rejected(house) == 2


def test_retried_events_are_a_new_batch_of_the_caller_and_no_longer_set_aside(house: InProcessApi):
    house.admin.put(f"{ENTITIES}/jane", ENTITY)
    events = reject_events(house)
    alice = house.tenant("alice", test="maintain")

    answer = alice.post(f"{PATH}/rejected/retry")

    again = [row for row in journal.rows(house) if row["commit"] == 2]
    batch = journal.batches(house)[-1]
    assert answer.json() == {"retried": 3, "commit": 2}
    assert [event(row) for row in again] == events
    assert [row["position"] for row in again] == [0, 1, 2]
    assert (batch["tenant"], batch["rows"], batch["size"], batch["state"]) == (
        "alice",
        3,
        journal.batches(house)[0]["size"],
        "committed",
    )
    assert journal.head(house)["rows"] == 6
    assert count_rejected(house) == 0
    assert alice.get("/v1/whoami").json()["limits"]["used_statements"] == 0


def test_event_that_concerns_every_entity_is_retried_too(house: InProcessApi):
    house.admin.delete("/v1/datasets/test/origins/crawl")
    events = reject_events(house)

    house.admin.post(f"{PATH}/rejected/retry")

    rows = journal.rows(house)
    assert (rows[1]["shard_key"], rows[1]["id"], event(rows[1])) == (None, None, events[0])


def test_only_the_events_that_are_named_are_retried(house: InProcessApi):
    house.admin.post(ENTITIES, ENTITY)
    reject_events(house)
    wanted, other = (each["id"] for each in house.admin.get(f"{PATH}/rejected").json()["results"])

    answer = house.admin.post(f"{PATH}/rejected/retry", {"ids": [wanted, "nothing"]})
    again = house.admin.post(f"{PATH}/rejected/retry", {"ids": [wanted]})

    assert answer.json() == {"retried": 1, "commit": 2}
    assert again.json() == {"retried": 0, "commit": None}
    assert [each["id"] for each in house.admin.get(f"{PATH}/rejected").json()["results"]] == [other]
    assert journal.head(house)["commit"] == 2


def test_of_many_who_retry_the_same_events_each_event_goes_to_one(house: InProcessApi):
    house.admin.post(ENTITIES, ENTITY)
    reject_events(house)
    start = threading.Barrier(4)
    answers: list[dict] = []

    def retry() -> None:
        start.wait()
        answers.append(house.admin.post(f"{PATH}/rejected/retry").json())

    threads = [threading.Thread(target=retry) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(answer["retried"] for answer in answers) == [0, 0, 0, 2]
    assert (journal.head(house)["rows"], len(journal.rows(house))) == (4, 4)


@pytest.mark.parametrize("body", [{"ids": []}, {"ids": ["a\x00"]}, {"ids": "x"}, {"all": True}, {"ids": ["a"] * 1001}])
def test_retry_of_what_cannot_be_is_refused(house: InProcessApi, body: dict):
    house.admin.post(ENTITIES, ENTITY)
    reject_events(house)

    assert house.admin.post(f"{PATH}/rejected/retry", body).status_code == 422
    assert count_rejected(house) == 2


def test_events_of_another_dataset_are_neither_listed_nor_retried(house: InProcessApi):
    house.admin.post(ENTITIES, ENTITY)
    reject_events(house)
    ids = [each["id"] for each in house.admin.get(f"{PATH}/rejected").json()["results"]]
    house.dataset("other")

    listed = house.admin.get("/v1/datasets/other/journal/rejected").json()["results"]
    retried = house.admin.post("/v1/datasets/other/journal/rejected/retry", {"ids": ids}).json()["retried"]

    assert (listed, retried, count_rejected(house)) == ([], 0, 2)


def test_retry_into_a_full_journal_is_backpressure_and_keeps_the_events_aside(house: InProcessApi):
    house.admin.post(ENTITIES, ENTITY)
    reject_events(house)

    answer = house.with_settings(journal_max_rows=1).admin.post(f"{PATH}/rejected/retry")

    assert (answer.status_code, answer.json()["type"]) == (429, "/problems/backpressure")
    assert count_rejected(house) == 2
