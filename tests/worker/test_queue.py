"""The consumer of the queue: items are done in their order, once, and what cannot be done is told."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import select, update
from tarn.archive.fetch import Fetcher
from tarn.coordination import queue
from tarn.datasets.registry import Dataset
from tarn.db.tables import queue as queue_table
from tarn.db.tables import queue_heads
from tarn.model.ids import new_id, now
from tarn.model.job import MOST_ATTEMPTS
from tarn.storage.fault_injection import Gate
from tarn.worker.queue import ITEMS_PER_DATASET, Consumer

from tests.faults.scene import Killed, beside, held_at, killed_at
from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.waiting import wait_until
from tests.worker.workers import make_worker, working

BASE = "/v1/datasets/test/queue"


def consumer(house: InProcessApi, reached: Callable[[str], None] = lambda _: None, **changes: Any) -> Consumer:
    services = house.services
    settings = services.settings.model_copy(update=changes)
    return Consumer(settings, services.database, services.store, new_id(), reached)


def person(name: str, entity: str = "jane") -> dict[str, Any]:
    return {"id": entity, "schema": "Person", "properties": {"name": [name]}}


def enqueue(house: InProcessApi, action: str, payload: dict[str, Any], resource: str = "entity", **more: Any) -> str:
    answer = house.admin.post(BASE, {"action": action, "resource": resource, "payload": payload} | more)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def item(house: InProcessApi, item_id: str) -> dict[str, Any]:
    return house.admin.get(f"{BASE}/{item_id}").json()


def names(house: InProcessApi) -> list[str]:
    found = house.admin.get("/v1/datasets/test/entities").json()["results"]
    return sorted(name for entity in found for name in entity["properties"]["name"])


def let_time_pass(house: InProcessApi) -> None:
    """Every item has waited long enough."""
    with house.services.database.write() as connection:
        connection.execute(update(queue_table).values(not_before=None))


def test_entities_are_upserted_and_deleted_in_the_order_in_which_it_was_asked(house: InProcessApi, dataset: Dataset):
    asked = [
        enqueue(house, "UPSERT", person("First")),
        enqueue(house, "UPSERT", person("Second")),
        enqueue(house, "UPSERT", person("Third", "joe")),
        enqueue(house, "DELETE", {"id": "joe"}),
        enqueue(house, "UPSERT", person("Other"), origin="other"),
    ]

    assert consumer(house).work() == 5
    assert names(house) == ["Other", "Second"]
    done = [item(house, each) for each in asked]
    assert {(each["state"], each["attempts"]) for each in done} == {("done", 1)}
    shown = orjson.loads(house.services.store.get(dataset.layout.queue_item("admin", asked[0])))
    assert shown["state"] == "done"
    entries = house.admin.get("/v1/admin/audit").json()["results"]
    worked = [entry["target"] for entry in entries if entry["action"] == "work_off_queue_item"]
    assert worked[::-1] == [f"{BASE}/{each}" for each in asked]


def test_items_for_tenants_are_left_alone(house: InProcessApi, dataset: Dataset):
    house.tenant("bob", test="read")
    asked = enqueue(house, "UPSERT", person("Jane"), to="bob")

    assert consumer(house).work() == 0
    assert item(house, asked)["state"] == "pending"


@ONE_DATABASE
def test_every_dataset_has_its_turn(house: InProcessApi, dataset: Dataset):
    house.dataset("small")
    for number in range(ITEMS_PER_DATASET + 1):
        enqueue(house, "UPSERT", person(str(number)))
    late = house.admin.post(
        "/v1/datasets/small/queue", {"action": "UPSERT", "resource": "entity", "payload": person("Late")}
    ).json()

    assert consumer(house).work() == ITEMS_PER_DATASET + 1
    assert house.admin.get(f"/v1/datasets/small/queue/{late['id']}").json()["state"] == "done"


@ONE_DATABASE
def test_files_are_fetched_and_deleted(house: InProcessApi, dataset: Dataset, tmp_path: Path):
    folder = tmp_path / "open"
    folder.mkdir()
    (folder / "memo.txt").write_text("a memo")
    fetcher = Fetcher.from_settings(house.services.settings.model_copy(update={"fetch_roots": (folder,)}))
    opened = InProcessApi(replace(house.services, fetcher=fetcher), str(house.admin.key))
    payload = {"uri": f"{folder}/memo.txt", "path": "memos/memo.txt", "meta": {"a": 1}, "entity": True}
    asked = enqueue(opened, "UPSERT", payload, "file", origin="crawl")

    consumer(house, fetch_roots=(folder,)).work()

    assert item(house, asked)["state"] == "done"
    (file,) = house.admin.get("/v1/datasets/test/files").json()["results"]
    assert (file["path"], file["origin"], file["meta"]) == ("memos/memo.txt", "crawl", {"a": 1})
    assert house.admin.get(f"/v1/datasets/test/entities/{file['id']}").json()["schema"] == "PlainText"
    gone = enqueue(house, "DELETE", {"checksum": file["checksum"], "id": file["id"]}, "file")
    again = enqueue(house, "DELETE", {"checksum": file["checksum"], "id": file["id"]}, "file")
    consumer(house).work()
    assert house.admin.get("/v1/datasets/test/files").json()["results"] == []
    assert item(house, gone)["state"] == "done"
    dead = item(house, again)
    assert (dead["state"], dead["problem"]["type"]) == ("dead", "/problems/file-not-found")


def test_item_that_can_never_be_done_is_dead_with_its_problem_and_the_next_is_done(
    house: InProcessApi, dataset: Dataset
):
    missing = {"checksum": "0" * 64, "id": "0" * 40}
    dead, after = enqueue(house, "DELETE", missing, "file"), enqueue(house, "UPSERT", person("Jane"))

    consumer(house).work()

    assert (item(house, dead)["state"], item(house, dead)["attempts"]) == ("dead", 1)
    assert item(house, dead)["problem"]["instance"] == f"{BASE}/{dead}"
    assert item(house, after)["state"] == "done"
    assert house.admin.post(f"{BASE}/{dead}/retry").json()["state"] == "pending"
    consumer(house).work()
    assert item(house, dead)["state"] == "dead"


def test_item_that_fails_for_a_while_is_tried_again_and_keeps_its_place(house: InProcessApi, dataset: Dataset):
    first, second = enqueue(house, "UPSERT", person("First")), enqueue(house, "UPSERT", person("Second"))
    full = consumer(house, journal_max_rows=0)

    assert full.work() == 1
    assert full.work() == 0, "neither it nor what comes after it is tried before its time"
    tried = item(house, first)
    assert (tried["state"], tried["attempts"]) == ("pending", 1)
    assert tried["problem"]["type"] == "/problems/backpressure"
    assert item(house, second)["attempts"] == 0
    let_time_pass(house)
    assert consumer(house).work() == 2
    assert names(house) == ["Second"]
    assert item(house, first)["problem"] is None


@ONE_DATABASE
def test_item_that_fails_too_often_is_dead(house: InProcessApi, dataset: Dataset):
    asked = enqueue(house, "UPSERT", person("First"))
    full = consumer(house, journal_max_rows=0)
    for _ in range(MOST_ATTEMPTS):
        assert full.work() == 1
        let_time_pass(house)

    assert full.work() == 0
    assert item(house, asked)["state"] == "dead"


@ONE_DATABASE
def test_item_that_ends_every_worker_is_dead_in_the_end(house: InProcessApi, dataset: Dataset):
    asked = enqueue(house, "UPSERT", person("Jane"))
    for _ in range(MOST_ATTEMPTS):
        with pytest.raises(Killed):
            consumer(house, killed_at("begun")).work()

    assert consumer(house).work() == 0
    dead = item(house, asked)
    assert (dead["state"], dead["problem"]["type"]) == ("dead", "/problems/queue-item-failed")
    assert names(house) == []


def test_item_that_is_deleted_while_it_is_being_done_has_no_effect(house: InProcessApi, dataset: Dataset):
    asked, gate = enqueue(house, "UPSERT", person("Jane")), Gate()
    with beside(consumer(house, held_at("begun", gate)).work) as worked:
        gate.wait_arrived()
        assert house.admin.delete(f"{BASE}/{asked}").status_code == 204
        gate.release()
        worked()

    assert names(house) == []
    assert house.services.store.head(dataset.layout.queue_item("admin", asked)) is None


def test_items_that_were_done_long_ago_are_forgotten_and_dead_ones_stay(house: InProcessApi, dataset: Dataset):
    done, dead = (
        enqueue(house, "UPSERT", person("Jane")),
        enqueue(house, "DELETE", {"checksum": "0" * 64, "id": "0" * 40}, "file"),
    )
    consumer(house).work()
    services = house.services
    assert queue.delete_done(services.database, services.store, services.settings) == 0
    with services.database.write() as connection:
        connection.execute(update(queue_table).values(finished=now() - timedelta(days=8)))

    assert queue.delete_done(services.database, services.store, services.settings) == 1
    assert house.admin.get(f"{BASE}/{done}").status_code == 404
    assert services.store.head(dataset.layout.queue_item("admin", done)) is None
    assert item(house, dead)["state"] == "dead"
    assert enqueue(house, "UPSERT", person("Jane")) > done


def test_dataset_that_is_deleted_takes_its_queue_and_locks_along(house: InProcessApi, dataset: Dataset):
    enqueue(house, "UPSERT", person("Jane"))
    house.admin.put("/v1/datasets/test/locks/nightly", {"ttl": 60})
    house.admin.put("/v1/datasets/test/tag?key=mine")
    house.admin.delete("/v1/datasets/test?confirm=test")

    assert consumer(house).work() == 0
    assert make_worker(house).step()
    with house.services.database.read() as connection:
        for table in (queue_table, queue_heads):
            assert connection.execute(select(table)).all() == []
    assert list(house.services.store.list("test")) == []
    house.dataset("test")
    assert house.admin.get(BASE).json()["results"] == []
    assert house.admin.put("/v1/datasets/test/locks/nightly", {"ttl": 60}).status_code == 200


def test_worker_works_off_what_is_asked_while_it_runs(house: InProcessApi, dataset: Dataset):
    services = house.services
    worker = make_worker(house, consumer=consumer(house))
    with working(worker):
        asked = enqueue(house, "UPSERT", person("Jane"))
        wait_until(lambda: item(house, asked)["state"] == "done")

    assert names(house) == ["Jane"]
    assert services.store.head(dataset.layout.queue_item("admin", asked)) is not None
