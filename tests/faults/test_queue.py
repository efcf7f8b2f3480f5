"""The queue with workers that are killed or paused during an item, with concurrent workers, and with clock changes."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import uuid_utils
from sqlalchemy import select, update
from tarn.coordination import queue
from tarn.datasets.registry import Dataset
from tarn.db import database_clock
from tarn.db.tables import audit, journal_batches, queue_leases
from tarn.db.tables import queue as queue_table
from tarn.model import ids
from tarn.model.ids import new_id
from tarn.settings import Settings
from tarn.storage.fault_injection import Gate
from tarn.worker.queue_consumer import ACTION, QueueConsumer

from tests.faults.processes import WorkerProcess, start_worker
from tests.faults.scene import in_background, pause_at, run_concurrently
from tests.in_process_api import InProcessApi
from tests.waiting import wait_until

BASE = "/v1/datasets/test/queue"
ITEMS = 12


def consumer(api: InProcessApi, reached: Callable[[str], None] = lambda _: None, **changes: Any) -> QueueConsumer:
    services = api.services
    settings = services.settings.model_copy(update=changes)
    return QueueConsumer(settings, services.database, services.store, new_id(), reached)


def add_items(api: InProcessApi, count: int = ITEMS, begin: int = 0) -> list[str]:
    """Add items that each replace the same entity; return their ids."""
    ids = []
    for number in range(begin, begin + count):
        entity = {"id": "jane", "schema": "Person", "properties": {"name": [f"Name {number}"]}}
        response = api.admin.post(BASE, {"action": "UPSERT", "resource": "entity", "payload": entity})
        assert response.status_code == 201, response.text
        ids.append(response.json()["id"])
    return ids


def check_done_once_in_order(api: InProcessApi, items: list[str]) -> None:
    """Assert that every item is done and took effect exactly once, in the order of their ids."""
    with api.services.database.read() as connection:
        states = connection.execute(select(queue_table.c.id, queue_table.c.state).order_by(queue_table.c.id)).all()
        processed = select(audit.c.target).where(audit.c.action == ACTION).order_by(audit.c.id)
        targets = list(connection.execute(processed).scalars())
        commits = connection.execute(select(journal_batches.c.commit, journal_batches.c.state)).all()
    assert [(row.id, row.state) for row in states] == [(each, "done") for each in items]
    assert sorted(targets) == [f"{BASE}/{each}" for each in items], "an item is not in the audit log exactly once"
    assert sorted(row.commit for row in commits) == list(range(1, len(items) + 1))
    jane = api.admin.get("/v1/datasets/test/entities/jane").json()
    assert jane["properties"]["name"] == [f"Name {len(items) - 1}"], "the last item does not hold"


@contextmanager
def process(settings: Settings, *fault: str) -> Iterator[WorkerProcess]:
    """Run a queue worker on the test's lake in a child process."""
    with start_worker(
        "tests.faults.queue_process",
        Path(settings.admin_key_file).parent,
        *fault,
        TARN_DATABASE_URL=settings.database_url,
        TARN_LAKE_URI=settings.lake_uri,
        TARN_LEASE_SECONDS="1",
        TARN_WORKER_POLL="0.05",
    ) as running:
        yield running


def expire_leases(api: InProcessApi) -> None:
    with api.services.database.write() as connection:
        connection.execute(update(queue_leases).values(expires=ids.now() - timedelta(seconds=1)))


def wait_until_done(api: InProcessApi) -> None:
    wait_until(lambda: not api.admin.get(f"{BASE}?state=pending&limit=1").json()["results"], 120)


@pytest.mark.parametrize("step", ["begun", "written", "done"])
def test_item_of_a_killed_worker_is_processed_by_the_next_worker_exactly_once(
    api: InProcessApi, dataset: Dataset, settings: Settings, step: str
):
    items = add_items(api)
    with process(settings, step, "KILL") as killed:
        killed.wait_reached(step)
        assert killed.wait_exited() == -signal.SIGKILL
    expire_leases(api)

    while consumer(api).work():
        pass
    check_done_once_in_order(api, items)


def test_concurrent_workers_process_every_item_once_in_order(api: InProcessApi, dataset: Dataset, settings: Settings):
    with process(settings) as one, process(settings) as two:
        one.wait_reached("started")
        two.wait_reached("started")
        items = add_items(api, 3 * ITEMS)
        wait_until_done(api)

    check_done_once_in_order(api, items)


@pytest.mark.parametrize("step", ["begun", "shown"])
def test_item_of_a_worker_paused_beyond_its_lease_takes_effect_once(api: InProcessApi, dataset: Dataset, step: str):
    items, gate = add_items(api), Gate()
    with in_background(consumer(api, pause_at(step, gate)).work) as result:
        gate.wait_arrived()
        expire_leases(api)
        assert consumer(api).work() >= ITEMS - 1
        gate.release()
        result()

    check_done_once_in_order(api, items)


def test_item_that_two_workers_process_at_once_takes_effect_once(api: InProcessApi, dataset: Dataset):
    items = add_items(api, 1)
    gates = [Gate(), Gate()]
    workers = [consumer(api, pause_at("begun", gate)) for gate in gates]
    with in_background(workers[0].work) as first:
        gates[0].wait_arrived()
        expire_leases(api)
        with in_background(workers[1].work) as second:
            gates[1].wait_arrived()
            run_concurrently(gates[0].release, gates[1].release)
            first()
            second()

    check_done_once_in_order(api, items)


@pytest.mark.parametrize("hours", [-1, 1])
def test_clock_change_during_an_item_ends_no_lease_and_keeps_the_order(
    api: InProcessApi, dataset: Dataset, monkeypatch, hours: int
):
    items, gate = add_items(api, 3), Gate()
    with in_background(consumer(api, pause_at("begun", gate)).work) as result:
        gate.wait_arrived()
        monkeypatch.setattr(database_clock, "now", lambda: ids.now() + timedelta(hours=hours))
        shift = hours * 3600 * 10**9
        monkeypatch.setattr(queue, "new_id", lambda: str(uuid_utils.uuid7(nanoseconds=time.time_ns() + shift)))
        items += add_items(api, 3, begin=3)
        assert consumer(api).work() == 0, "another worker took the queue although its lease has not expired"
        gate.release()
        result()
    monkeypatch.setattr(queue, "new_id", ids.new_id)
    monkeypatch.setattr(database_clock, "now", ids.now)
    items += add_items(api, 3, begin=6)
    consumer(api).work()

    assert sorted(items) == items
    check_done_once_in_order(api, items)
