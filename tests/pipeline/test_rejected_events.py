"""Events that cannot be written: they are rejected with the reason, and the others are flushed."""

from collections.abc import Callable

import pytest
from sqlalchemy import select, text
from sqlalchemy.event import listen
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import journal_rejected
from tarn.model.datasets.snapshot import Snapshot

from tests.in_process_api import InProcessApi
from tests.pipeline.history import head, stored


def write(api: InProcessApi, *names: str) -> None:
    lines = "\n".join(f'{{"id": "{name}", "schema": "Person", "properties": {{"name": ["{name}"]}}}}' for name in names)
    headers = {"Content-Type": "application/x-ndjson"}
    response = api.admin.post("/v1/datasets/test/entities", content=lines, headers=headers)
    assert response.status_code == 200, response.text


@pytest.mark.both_databases
@pytest.mark.contract("M5", "W2")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("schema = 'Nobody'", "schema: is not known"),
        ("value = NULL", "value: is missing"),
        ("kind = 9", "is of an unknown kind"),
        ("origin = '../evil'", "origin: is not a valid origin"),
        ("first_seen = 9000000000000000000", "first_seen: is not a valid time"),
    ],
)
def test_unwritable_event_is_rejected_and_the_others_are_flushed(
    api: InProcessApi, dataset: Dataset, flush: Callable[[], list[Snapshot]], change: str, reason: str
):
    write(api, "jane", "john")
    with api.services.database.write() as connection:
        connection.execute(text(f"UPDATE journal SET {change} WHERE entity_id = 'jane' AND prop = 'name'"))

    (snapshot,) = flush()

    live = stored(api.services.store, dataset, head(api, dataset))
    assert sorted(row["entity_id"] for row in live.values()) == ["jane", "john", "john"]
    assert (snapshot.rows.added, snapshot.rows.set_aside, snapshot.set_aside[0].reason) == (3, 1, reason)
    with api.services.database.read() as connection:
        (rejected,) = connection.execute(select(journal_rejected)).all()
    assert (rejected.reason, rejected.event["entity_id"], rejected.batch) == (reason, "jane", snapshot.batches[0].id)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("value = x'ff'", "value: cannot be read"),
        ("value = CAST(x'ff41' AS TEXT)", "value: cannot be read"),
        pytest.param("kind = 'add'", "kind: cannot be read", marks=pytest.mark.long),
        ("id = 'text'", "id: is not a SHA-1"),
    ],
)
def test_event_with_a_value_of_another_type_in_sqlite_is_rejected(
    api: InProcessApi,
    database: Database,
    dataset: Dataset,
    flush: Callable[[], list[Snapshot]],
    change: str,
    reason: str,
):
    write(api, *(f"e{number}" for number in range(3000)))
    with database.write() as connection:
        connection.execute(text(f"UPDATE journal SET {change} WHERE entity_id = 'e2999' AND prop = 'name'"))

    (snapshot,) = flush()

    assert (snapshot.rows.added, snapshot.rows.set_aside) == (5999, 1)
    assert snapshot.set_aside[0].reason == reason


def test_many_unwritable_events_of_a_batch_are_rejected_with_few_queries(
    api: InProcessApi, flush: Callable[[], list[Snapshot]]
):
    names = [f"e{number}" for number in range(1200)]
    write(api, *names)
    with api.services.database.write() as connection:
        connection.execute(text("UPDATE journal SET schema = 'Nobody' WHERE prop = 'name'"))
    queries: list[str] = []
    engine = api.services.database.engine
    listen(engine, "before_cursor_execute", lambda _, __, statement, *___: queries.append(statement))

    (snapshot,) = flush()

    with api.services.database.read() as connection:
        rejected = connection.execute(select(journal_rejected)).all()
    assert (snapshot.rows.added, snapshot.rows.set_aside) == (1200, 1200)
    assert sorted(row.event["entity_id"] for row in rejected) == sorted(names)
    assert {row.position for row in rejected} == {event.position for event in snapshot.set_aside}
    assert len([query for query in queries if "FROM journal" in query and "journal.value" in query]) == 3
