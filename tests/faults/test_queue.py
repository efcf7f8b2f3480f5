"""The queue, with workers that are killed or paused amid an item, two of them on one queue, and clocks that jump."""

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
from tarn.worker.queue import ACTION, Consumer

from tests.faults.processes import WorkerProcess, started
from tests.faults.scene import in_background, pause_at, run_concurrently
from tests.in_process_api import InProcessApi
from tests.waiting import wait_until

BASE = "/v1/datasets/test/queue"
ITEMS = 12


def consumer(api: InProcessApi, reached: Callable[[str], None] = lambda _: None, **changes: Any) -> Consumer:
    services = api.services
    settings = services.settings.model_copy(update=changes)
    return Consumer(settings, services.database, services.store, new_id(), reached)


def ask(api: InProcessApi, count: int = ITEMS, begin: int = 0) -> list[str]:
    """Items that each replace what the one before said of the same entity; their ids."""
    found = []
    for number in range(begin, begin + count):
        entity = {"id": "jane", "schema": "Person", "properties": {"name": [f"Name {number}"]}}
        answer = api.admin.post(BASE, {"action": "UPSERT", "resource": "entity", "payload": entity})
        assert answer.status_code == 201, answer.text
        found.append(answer.json()["id"])
    return found


def check_done_once_in_order(api: InProcessApi, asked: list[str]) -> None:
    """Every item has had its effect exactly once, in the order of their ids, and says so."""
    with api.services.database.read() as connection:
        states = connection.execute(select(queue_table.c.id, queue_table.c.state).order_by(queue_table.c.id)).all()
        worked = select(audit.c.target).where(audit.c.action == ACTION).order_by(audit.c.id)
        targets = list(connection.execute(worked).scalars())
        commits = connection.execute(select(journal_batches.c.commit, journal_batches.c.state)).all()
    assert [(row.id, row.state) for row in states] == [(each, "done") for each in asked]
    assert sorted(targets) == [f"{BASE}/{each}" for each in asked], "each is in the journal once"
    assert sorted(row.commit for row in commits) == list(range(1, len(asked) + 1))
    jane = api.admin.get("/v1/datasets/test/entities/jane").json()
    assert jane["properties"]["name"] == [f"Name {len(asked) - 1}"], "the last that was asked for is what holds"


@contextmanager
def process(settings: Settings, *fault: str) -> Iterator[WorkerProcess]:
    """A worker of queues on the test's lake."""
    with started(
        "tests.faults.queue_process",
        Path(settings.admin_key_file).parent,
        *fault,
        TARN_DATABASE_URL=settings.database_url,
        TARN_LAKE_URI=settings.lake_uri,
        TARN_LEASE_SECONDS="1",
        TARN_WORKER_POLL="0.05",
    ) as running:
        yield running


def let_leases_lapse(api: InProcessApi) -> None:
    with api.services.database.write() as connection:
        connection.execute(update(queue_leases).values(expires=ids.now() - timedelta(seconds=1)))


def wait_until_done(api: InProcessApi) -> None:
    wait_until(lambda: not api.admin.get(f"{BASE}?state=pending&limit=1").json()["results"], 120)


@pytest.mark.parametrize("step", ["begun", "written", "done"])
def test_worker_killed_amid_an_item_leaves_it_to_the_next_which_does_it_once(
    api: InProcessApi, dataset: Dataset, settings: Settings, step: str
):
    asked = ask(api)
    with process(settings, step, "KILL") as killed:
        killed.wait_reached(step)
        assert killed.wait_dead() == -signal.SIGKILL
    let_leases_lapse(api)

    while consumer(api).work():
        pass
    check_done_once_in_order(api, asked)


def test_two_workers_on_one_queue_do_every_item_once_in_order(api: InProcessApi, dataset: Dataset, settings: Settings):
    with process(settings) as one, process(settings) as two:
        one.wait_reached("started")
        two.wait_reached("started")
        asked = ask(api, 3 * ITEMS)
        wait_until_done(api)

    check_done_once_in_order(api, asked)


@pytest.mark.parametrize("step", ["begun", "shown"])
def test_worker_paused_past_its_lease_has_no_second_effect(api: InProcessApi, dataset: Dataset, step: str):
    asked, gate = ask(api), Gate()
    with in_background(consumer(api, pause_at(step, gate)).work) as worked:
        gate.wait_arrived()
        let_leases_lapse(api)
        assert consumer(api).work() >= ITEMS - 1
        gate.release()
        worked()

    check_done_once_in_order(api, asked)


def test_workers_that_do_the_same_item_at_once_have_one_effect(api: InProcessApi, dataset: Dataset):
    asked = ask(api, 1)
    gates = [Gate(), Gate()]
    workers = [consumer(api, pause_at("begun", gate)) for gate in gates]
    with in_background(workers[0].work) as first:
        gates[0].wait_arrived()
        let_leases_lapse(api)
        with in_background(workers[1].work) as second:
            gates[1].wait_arrived()
            run_concurrently(gates[0].release, gates[1].release)
            first()
            second()

    check_done_once_in_order(api, asked)


@pytest.mark.parametrize("hours", [-1, 1])
def test_clock_that_jumps_amid_an_item_takes_the_queue_from_nobody_and_changes_no_order(
    api: InProcessApi, dataset: Dataset, monkeypatch, hours: int
):
    asked, gate = ask(api, 3), Gate()
    with in_background(consumer(api, pause_at("begun", gate)).work) as worked:
        gate.wait_arrived()
        monkeypatch.setattr(database_clock, "now", lambda: ids.now() + timedelta(hours=hours))
        shift = hours * 3600 * 10**9
        monkeypatch.setattr(queue, "new_id", lambda: str(uuid_utils.uuid7(nanoseconds=time.time_ns() + shift)))
        asked += ask(api, 3, begin=3)
        assert consumer(api).work() == 0, "the queue is still the first one's"
        gate.release()
        worked()
    monkeypatch.setattr(queue, "new_id", ids.new_id)
    monkeypatch.setattr(database_clock, "now", ids.now)
    asked += ask(api, 3, begin=6)
    consumer(api).work()

    assert sorted(asked) == asked
    check_done_once_in_order(api, asked)
