"""The worker's consumer of queues: items are applied in order and once, and failures are reported."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import select, update
from tarn.archive.fetching.fetch import Fetcher
from tarn.coordination import queue
from tarn.datasets.registry import Dataset
from tarn.db.tables import queue as queue_table
from tarn.db.tables import queue_heads
from tarn.model.ids import new_id, now
from tarn.model.work.job import MOST_ATTEMPTS
from tarn.storage.fault_injection import Gate
from tarn.worker.queue_consumer import ITEMS_PER_DATASET, QueueConsumer

from tests.faults.scene import Killed, in_background, kill_at, pause_at
from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.waiting import wait_until
from tests.worker.workers import make_worker, working

pytestmark = pytest.mark.both_databases

BASE = "/v1/datasets/test/queue"


def consumer(api: InProcessApi, reached: Callable[[str], None] = lambda _: None, **changes: Any) -> QueueConsumer:
    services = api.services
    settings = services.settings.model_copy(update=changes)
    return QueueConsumer(settings, services.database, services.store, new_id(), reached)


def person(name: str, entity: str = "jane") -> dict[str, Any]:
    return {"id": entity, "schema": "Person", "properties": {"name": [name]}}


def enqueue(api: InProcessApi, action: str, payload: dict[str, Any], resource: str = "entity", **more: Any) -> str:
    response = api.admin.post(BASE, {"action": action, "resource": resource, "payload": payload} | more)
    assert response.status_code == 201, response.text
    return response.json()["id"]


def item(api: InProcessApi, item_id: str) -> dict[str, Any]:
    return api.admin.get(f"{BASE}/{item_id}").json()


def names(api: InProcessApi) -> list[str]:
    entities = api.admin.get("/v1/datasets/test/entities").json()["results"]
    return sorted(name for entity in entities for name in entity["properties"]["name"])


def make_retries_due(api: InProcessApi) -> None:
    """Make every waiting item due."""
    with api.services.database.write() as connection:
        connection.execute(update(queue_table).values(not_before=None))


def test_entities_are_upserted_and_deleted_in_the_order_of_the_items(api: InProcessApi, dataset: Dataset):
    item_ids = [
        enqueue(api, "UPSERT", person("First")),
        enqueue(api, "UPSERT", person("Second")),
        enqueue(api, "UPSERT", person("Third", "joe")),
        enqueue(api, "DELETE", {"id": "joe"}),
        enqueue(api, "UPSERT", person("Other"), origin="other"),
    ]

    assert consumer(api).work() == 5
    assert names(api) == ["Other", "Second"]
    done = [item(api, each) for each in item_ids]
    assert {(each["state"], each["attempts"]) for each in done} == {("done", 1)}
    stored = orjson.loads(api.services.store.get(dataset.layout.queue_item("admin", item_ids[0])))
    assert stored["state"] == "done"
    entries = api.admin.get("/v1/admin/audit").json()["results"]
    audited = [entry["target"] for entry in entries if entry["action"] == "work_off_queue_item"]
    assert audited[::-1] == [f"{BASE}/{each}" for each in item_ids]


def test_items_addressed_to_tenants_are_not_processed(api: InProcessApi, dataset: Dataset):
    api.tenant("bob", test="read")
    item_id = enqueue(api, "UPSERT", person("Jane"), to="bob")

    assert consumer(api).work() == 0
    assert item(api, item_id)["state"] == "pending"


@ONE_DATABASE
def test_dataset_with_many_items_does_not_block_others(api: InProcessApi, dataset: Dataset):
    api.dataset("small")
    for number in range(ITEMS_PER_DATASET + 1):
        enqueue(api, "UPSERT", person(str(number)))
    late = api.admin.post(
        "/v1/datasets/small/queue", {"action": "UPSERT", "resource": "entity", "payload": person("Late")}
    ).json()

    assert consumer(api).work() == ITEMS_PER_DATASET + 1
    assert api.admin.get(f"/v1/datasets/small/queue/{late['id']}").json()["state"] == "done"


@ONE_DATABASE
def test_files_are_fetched_and_deleted(api: InProcessApi, dataset: Dataset, tmp_path: Path):
    folder = tmp_path / "open"
    folder.mkdir()
    (folder / "memo.txt").write_text("a memo")
    fetcher = Fetcher.from_settings(api.services.settings.model_copy(update={"fetch_roots": (folder,)}))
    opened = InProcessApi(replace(api.services, fetcher=fetcher), str(api.admin.key))
    payload = {"uri": f"{folder}/memo.txt", "path": "memos/memo.txt", "meta": {"a": 1}, "entity": True}
    item_id = enqueue(opened, "UPSERT", payload, "file", origin="crawl")

    consumer(api, fetch_roots=(folder,)).work()

    assert item(api, item_id)["state"] == "done"
    (file,) = api.admin.get("/v1/datasets/test/files").json()["results"]
    assert (file["path"], file["origin"], file["meta"]) == ("memos/memo.txt", "crawl", {"a": 1})
    assert api.admin.get(f"/v1/datasets/test/entities/{file['id']}").json()["schema"] == "PlainText"
    deleted = enqueue(api, "DELETE", {"checksum": file["checksum"], "id": file["id"]}, "file")
    deleted_again = enqueue(api, "DELETE", {"checksum": file["checksum"], "id": file["id"]}, "file")
    consumer(api).work()
    assert api.admin.get("/v1/datasets/test/files").json()["results"] == []
    assert item(api, deleted)["state"] == "done"
    dead = item(api, deleted_again)
    assert (dead["state"], dead["problem"]["type"]) == ("dead", "/problems/file-not-found")


def test_item_that_can_never_succeed_is_dead_with_its_problem_and_the_next_is_done(api: InProcessApi, dataset: Dataset):
    missing = {"checksum": "0" * 64, "id": "0" * 40}
    dead, after = enqueue(api, "DELETE", missing, "file"), enqueue(api, "UPSERT", person("Jane"))

    consumer(api).work()

    assert (item(api, dead)["state"], item(api, dead)["attempts"]) == ("dead", 1)
    assert item(api, dead)["problem"]["instance"] == f"{BASE}/{dead}"
    assert item(api, after)["state"] == "done"
    assert api.admin.post(f"{BASE}/{dead}/retry").json()["state"] == "pending"
    consumer(api).work()
    assert item(api, dead)["state"] == "dead"


def test_item_with_a_transient_failure_is_retried_and_keeps_its_position(api: InProcessApi, dataset: Dataset):
    first, second = enqueue(api, "UPSERT", person("First")), enqueue(api, "UPSERT", person("Second"))
    full = consumer(api, journal_max_rows=0)

    assert full.work() == 1
    assert full.work() == 0, "neither the item nor later ones are processed before its retry time"
    failed = item(api, first)
    assert (failed["state"], failed["attempts"]) == ("pending", 1)
    assert failed["problem"]["type"] == "/problems/backpressure"
    assert item(api, second)["attempts"] == 0
    make_retries_due(api)
    assert consumer(api).work() == 2
    assert names(api) == ["Second"]
    assert item(api, first)["problem"] is None


@ONE_DATABASE
def test_item_that_fails_too_often_is_dead(api: InProcessApi, dataset: Dataset):
    item_id = enqueue(api, "UPSERT", person("First"))
    full = consumer(api, journal_max_rows=0)
    for _ in range(MOST_ATTEMPTS):
        assert full.work() == 1
        make_retries_due(api)

    assert full.work() == 0
    assert item(api, item_id)["state"] == "dead"


@ONE_DATABASE
def test_item_that_kills_every_worker_is_dead_after_the_last_attempt(api: InProcessApi, dataset: Dataset):
    item_id = enqueue(api, "UPSERT", person("Jane"))
    for _ in range(MOST_ATTEMPTS):
        with pytest.raises(Killed):
            consumer(api, kill_at("begun")).work()

    assert consumer(api).work() == 0
    dead = item(api, item_id)
    assert (dead["state"], dead["problem"]["type"]) == ("dead", "/problems/queue-item-failed")
    assert names(api) == []


def test_item_deleted_while_it_is_processed_has_no_effect(api: InProcessApi, dataset: Dataset):
    item_id, gate = enqueue(api, "UPSERT", person("Jane")), Gate()
    with in_background(consumer(api, pause_at("begun", gate)).work) as result:
        gate.wait_arrived()
        assert api.admin.delete(f"{BASE}/{item_id}").status_code == 204
        gate.release()
        result()

    assert names(api) == []
    assert api.services.store.head(dataset.layout.queue_item("admin", item_id)) is None


def test_items_done_long_ago_are_deleted_and_dead_ones_are_kept(api: InProcessApi, dataset: Dataset):
    done, dead = (
        enqueue(api, "UPSERT", person("Jane")),
        enqueue(api, "DELETE", {"checksum": "0" * 64, "id": "0" * 40}, "file"),
    )
    consumer(api).work()
    services = api.services
    assert queue.delete_done(services.database, services.store, services.settings) == 0
    with services.database.write() as connection:
        connection.execute(update(queue_table).values(finished=now() - timedelta(days=8)))

    assert queue.delete_done(services.database, services.store, services.settings) == 1
    assert api.admin.get(f"{BASE}/{done}").status_code == 404
    assert services.store.head(dataset.layout.queue_item("admin", done)) is None
    assert item(api, dead)["state"] == "dead"
    assert enqueue(api, "UPSERT", person("Jane")) > done


def test_deleted_dataset_loses_its_queue_and_locks(api: InProcessApi, dataset: Dataset):
    enqueue(api, "UPSERT", person("Jane"))
    api.admin.put("/v1/datasets/test/locks/nightly", {"ttl": 60})
    api.admin.put("/v1/datasets/test/tag?key=mine")
    api.admin.delete("/v1/datasets/test?confirm=test")

    assert consumer(api).work() == 0
    assert make_worker(api).step()
    with api.services.database.read() as connection:
        for table in (queue_table, queue_heads):
            assert connection.execute(select(table)).all() == []
    assert list(api.services.store.list("test")) == []
    api.dataset("test")
    assert api.admin.get(BASE).json()["results"] == []
    assert api.admin.put("/v1/datasets/test/locks/nightly", {"ttl": 60}).status_code == 200


def test_running_worker_processes_new_items(api: InProcessApi, dataset: Dataset):
    services = api.services
    worker = make_worker(api, consumer=consumer(api))
    with working(worker):
        item_id = enqueue(api, "UPSERT", person("Jane"))
        wait_until(lambda: item(api, item_id)["state"] == "done")

    assert names(api) == ["Jane"]
    assert services.store.head(dataset.layout.queue_item("admin", item_id)) is not None
