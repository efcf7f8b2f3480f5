"""The journal over HTTP: unflushed segments, and rejected events."""

import threading

import pytest
from sqlalchemy import select
from tarn.db.tables import journal_rejected
from tarn.journal import head, rejected
from tarn.journal.parsing.event_buffer import SCHEMA
from tarn.journal.rejected import Rejected

from tests.in_process_api import InProcessApi
from tests.journal import journal
from tests.worker.flushers import id_of

PATH = "/v1/datasets/test/journal"
ENTITIES = "/v1/datasets/test/entities"
ENTITY = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}


@pytest.fixture(autouse=True)
def dataset(api: InProcessApi):
    api.dataset("test")


def event(row: dict) -> dict:
    """Return a journal row as an event to be rejected."""
    values = {name: row[name] for name in SCHEMA.names if name not in ("batch", "position")}
    return values | {"id": None if row["id"] is None else row["id"].hex()}


def reject_events(api: InProcessApi, count: int | None = None) -> list[dict]:
    """Reject the journal's events, or the first so many of them, as a flush would; return the events."""
    rows = journal.rows(api)[:count]
    with api.services.database.write() as connection:
        rejected.store_rejected(
            connection,
            id_of(api, "test"),
            [
                Rejected(f"batch-{row['commit']}", "alice", row["commit"], row["position"], event(row), "too long")
                for row in rows
            ],
        )
    return [event(row) for row in rows]


def count_rejected(api: InProcessApi) -> int:
    with api.services.database.read() as connection:
        return len(connection.execute(select(journal_rejected.c.id)).all())


def test_empty_journal_has_an_open_segment_and_nothing_in_it(api: InProcessApi):
    assert api.admin.get(PATH).json() == {
        "segment": 1,
        "commit": 0,
        "rows": 0,
        "oldest": None,
        "segments": [{"segment": 1, "batches": 0, "rows": 0, "state": "open"}],
    }


def test_unflushed_batches_are_listed_by_segment(api: InProcessApi):
    api.admin.post(ENTITIES, ENTITY)
    api.admin.put(f"{ENTITIES}/jane", ENTITY)
    with api.services.database.write() as connection:
        head.rotate(connection, id_of(api, "test"))
    stage = api.admin.post("/v1/datasets/test/stages", {}).json()["id"]
    api.admin.post(f"/v1/datasets/test/stages/{stage}/entities", ENTITY)
    before = api.admin.get(PATH).json()
    api.admin.post(f"/v1/datasets/test/stages/{stage}/commit")

    after = api.admin.get(PATH).json()

    closed = {"segment": 1, "batches": 2, "rows": 5, "state": "closed"}
    assert before["segments"] == [closed, {"segment": 2, "batches": 0, "rows": 0, "state": "open"}]
    assert after["segments"] == [closed, {"segment": 2, "batches": 1, "rows": 2, "state": "open"}]
    assert (after["segment"], after["commit"], after["rows"]) == (2, 3, 7)
    assert after["oldest"] is not None


def test_journal_requires_read_and_rejected_events_require_maintain(api: InProcessApi):
    reader, writer = api.tenant("reader", test="read"), api.tenant("writer", test="write")

    statuses = [reader.get(PATH), writer.get(f"{PATH}/rejected"), writer.post(f"{PATH}/rejected/retry")]

    assert [response.status_code for response in statuses] == [200, 403, 403]


def test_rejected_events_are_listed_page_by_page_unchanged(api: InProcessApi):
    api.admin.post(ENTITIES, ENTITY)
    events = reject_events(api)

    first = api.admin.get(f"{PATH}/rejected?limit=1").json()
    second = api.admin.get(f"{PATH}/rejected?limit=1&cursor={first['next']}").json()

    listed = [*first["results"], *second["results"]]
    assert [each["event"] for each in listed] == events
    assert [(each["batch"], each["commit"], each["position"], each["tenant"]) for each in listed] == [
        ("batch-1", 1, 0, "alice"),
        ("batch-1", 1, 1, "alice"),
    ]
    assert {each["reason"] for each in listed} == {"too long"}
    assert second["next"] is None


def test_events_rejected_twice_are_stored_once(api: InProcessApi):
    api.admin.post(ENTITIES, ENTITY)

    reject_events(api)
    reject_events(api)

    assert count_rejected(api) == 2


def test_retried_events_become_a_new_batch_of_the_caller_and_are_no_longer_listed(api: InProcessApi):
    api.admin.put(f"{ENTITIES}/jane", ENTITY)
    events = reject_events(api)
    alice = api.tenant("alice", test="maintain")

    response = alice.post(f"{PATH}/rejected/retry")

    again = [row for row in journal.rows(api) if row["commit"] == 2]
    batch = journal.batches(api)[-1]
    assert response.json() == {"retried": 3, "commit": 2}
    assert [event(row) for row in again] == events
    assert [row["position"] for row in again] == [0, 1, 2]
    assert (batch["tenant"], batch["rows"], batch["size"], batch["state"]) == (
        "alice",
        3,
        journal.batches(api)[0]["size"],
        "committed",
    )
    assert journal.head(api)["rows"] == 6
    assert count_rejected(api) == 0
    assert alice.get("/v1/whoami").json()["limits"]["used_statements"] == 0


def test_event_that_applies_to_every_entity_is_retried_too(api: InProcessApi):
    api.admin.delete("/v1/datasets/test/origins/crawl")
    events = reject_events(api)

    api.admin.post(f"{PATH}/rejected/retry")

    rows = journal.rows(api)
    assert (rows[1]["shard_key"], rows[1]["id"], event(rows[1])) == (None, None, events[0])


def test_only_the_named_events_are_retried(api: InProcessApi):
    api.admin.post(ENTITIES, ENTITY)
    reject_events(api)
    selected, other = (each["id"] for each in api.admin.get(f"{PATH}/rejected").json()["results"])

    response = api.admin.post(f"{PATH}/rejected/retry", {"ids": [selected, "nothing"]})
    again = api.admin.post(f"{PATH}/rejected/retry", {"ids": [selected]})

    assert response.json() == {"retried": 1, "commit": 2}
    assert again.json() == {"retried": 0, "commit": None}
    assert [each["id"] for each in api.admin.get(f"{PATH}/rejected").json()["results"]] == [other]
    assert journal.head(api)["commit"] == 2


def test_concurrent_retries_of_the_same_events_retry_each_event_once(api: InProcessApi):
    api.admin.post(ENTITIES, ENTITY)
    reject_events(api)
    start = threading.Barrier(4)
    responses: list[dict] = []

    def retry() -> None:
        start.wait()
        responses.append(api.admin.post(f"{PATH}/rejected/retry").json())

    threads = [threading.Thread(target=retry) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(response["retried"] for response in responses) == [0, 0, 0, 2]
    assert (journal.head(api)["rows"], len(journal.rows(api))) == (4, 4)


@pytest.mark.parametrize("body", [{"ids": []}, {"ids": ["a\x00"]}, {"ids": "x"}, {"all": True}, {"ids": ["a"] * 1001}])
def test_invalid_retry_is_refused(api: InProcessApi, body: dict):
    api.admin.post(ENTITIES, ENTITY)
    reject_events(api)

    assert api.admin.post(f"{PATH}/rejected/retry", body).status_code == 422
    assert count_rejected(api) == 2


def test_events_of_another_dataset_are_neither_listed_nor_retried(api: InProcessApi):
    api.admin.post(ENTITIES, ENTITY)
    reject_events(api)
    ids = [each["id"] for each in api.admin.get(f"{PATH}/rejected").json()["results"]]
    api.dataset("other")

    listed = api.admin.get("/v1/datasets/other/journal/rejected").json()["results"]
    retried = api.admin.post("/v1/datasets/other/journal/rejected/retry", {"ids": ids}).json()["retried"]

    assert (listed, retried, count_rejected(api)) == ([], 0, 2)


def test_retry_into_a_full_journal_is_refused_and_keeps_the_rejected_events(api: InProcessApi):
    api.admin.post(ENTITIES, ENTITY)
    reject_events(api)

    response = api.with_settings(journal_max_rows=1).admin.post(f"{PATH}/rejected/retry")

    assert (response.status_code, response.json()["type"]) == (429, "/problems/backpressure")
    assert count_rejected(api) == 2
