"""Events that cannot be written: set aside, with their reason, while the rest goes on."""

from collections.abc import Callable

import pytest
from sqlalchemy import select, text
from sqlalchemy.event import listen
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import journal_rejected
from tarn.model.snapshot import Snapshot

from tests.in_process_api import InProcessApi
from tests.pipeline.history import head, stored


def write(house: InProcessApi, *names: str) -> None:
    lines = "\n".join(f'{{"id": "{name}", "schema": "Person", "properties": {{"name": ["{name}"]}}}}' for name in names)
    headers = {"Content-Type": "application/x-ndjson"}
    answer = house.admin.post("/v1/datasets/test/entities", content=lines, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.contract("M5", "W2")
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("schema = 'Nobody'", "schema: is not known"),
        ("value = NULL", "value: is missing"),
        ("kind = 9", "is of an unknown kind"),
        ("origin = '../evil'", "origin: is no origin"),
        ("first_seen = 9000000000000000000", "first_seen: is no moment"),
    ],
)
def test_event_that_cannot_be_written_is_set_aside_and_the_rest_goes_on(
    house: InProcessApi, dataset: Dataset, flush: Callable[[], list[Snapshot]], spoil: str, reason: str
):
    write(house, "jane", "john")
    with house.services.database.write() as connection:
        connection.execute(text(f"UPDATE journal SET {spoil} WHERE entity_id = 'jane' AND prop = 'name'"))

    (snapshot,) = flush()

    live = stored(house.services.store, dataset, head(house, dataset))
    assert sorted(row["entity_id"] for row in live.values()) == ["jane", "john", "john"]
    assert (snapshot.rows.added, snapshot.rows.set_aside, snapshot.set_aside[0].reason) == (3, 1, reason)
    with house.services.database.read() as connection:
        (kept,) = connection.execute(select(journal_rejected)).all()
    assert (kept.reason, kept.event["entity_id"], kept.batch) == (reason, "jane", snapshot.batches[0].id)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("value = x'ff'", "value: cannot be read"),
        ("value = CAST(x'ff41' AS TEXT)", "value: cannot be read"),
        ("kind = 'add'", "kind: cannot be read"),
        ("id = 'text'", "id: is not a SHA-1"),
    ],
)
def test_value_of_another_type_in_sqlite_is_set_aside(
    house: InProcessApi,
    database: Database,
    dataset: Dataset,
    flush: Callable[[], list[Snapshot]],
    spoil: str,
    reason: str,
):
    write(house, *(f"e{number}" for number in range(3000)))
    with database.write() as connection:
        connection.execute(text(f"UPDATE journal SET {spoil} WHERE entity_id = 'e2999' AND prop = 'name'"))

    (snapshot,) = flush()

    assert (snapshot.rows.added, snapshot.rows.set_aside) == (5999, 1)
    assert snapshot.set_aside[0].reason == reason


def test_many_events_of_a_batch_that_cannot_be_written_are_set_aside_in_few_looks(
    house: InProcessApi, flush: Callable[[], list[Snapshot]]
):
    names = [f"e{number}" for number in range(1200)]
    write(house, *names)
    with house.services.database.write() as connection:
        connection.execute(text("UPDATE journal SET schema = 'Nobody' WHERE prop = 'name'"))
    looks: list[str] = []
    engine = house.services.database.engine
    listen(engine, "before_cursor_execute", lambda _, __, statement, *___: looks.append(statement))

    (snapshot,) = flush()

    with house.services.database.read() as connection:
        kept = connection.execute(select(journal_rejected)).all()
    assert (snapshot.rows.added, snapshot.rows.set_aside) == (1200, 1200)
    assert sorted(row.event["entity_id"] for row in kept) == sorted(names)
    assert {row.position for row in kept} == {aside.position for aside in snapshot.set_aside}
    assert len([look for look in looks if "FROM journal" in look and "journal.value" in look]) == 3
