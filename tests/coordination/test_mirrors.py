"""Mirrors of tags, locks and queue items: what is missing or shows nothing is found and mended."""

from datetime import timedelta

import pytest
from sqlalchemy import update
from tarn.coordination import layout_mirrors as mirrors
from tarn.datasets.registry import Dataset
from tarn.db.tables import locks, queue
from tarn.model import ids
from tarn.model.names import LAKEHOUSE, LockName, TagKey

from tests.in_process_api import ONE_DATABASE, InProcessApi


@pytest.fixture
def paths(house: InProcessApi, dataset: Dataset, monkeypatch) -> list[str]:
    """The mirrors of an item, a lock and a tag, all of them put two minutes ago."""
    item = {"action": "DELETE", "resource": "entity", "payload": {"id": "x"}}
    made = house.admin.post("/v1/datasets/test/queue", item).json()
    house.admin.put("/v1/datasets/test/locks/nightly", {"ttl": 600})
    house.admin.put("/v1/datasets/test/tag?key=a/b", {"at": "2020-01-01T00:00:00Z"})
    monkeypatch.setattr(mirrors, "now", lambda: ids.now() + timedelta(minutes=2))
    layout = dataset.layout
    return [
        layout.queue_item("admin", made["id"]),
        layout.named_lock("admin", LockName("nightly")),
        layout.tag("admin", TagKey("a/b")),
    ]


def wrong_paths(house: InProcessApi, dataset: Dataset) -> list[str]:
    return [path for path, _ in mirrors.find_wrong(house.services.database, house.services.store, dataset)]


@ONE_DATABASE
def test_mirror_that_is_missing_is_found_and_put_again(house: InProcessApi, dataset: Dataset, paths: list[str]):
    store = house.services.store
    assert wrong_paths(house, dataset) == []
    before = {path: store.get(path) for path in paths}
    store.delete(paths)

    assert wrong_paths(house, dataset) == sorted(paths)
    mirrors.repair(house.services.database, store, dataset)
    assert {path: store.get(path) for path in paths} == before


@ONE_DATABASE
def test_mirror_that_shows_nothing_is_found_and_taken_away(house: InProcessApi, dataset: Dataset, paths: list[str]):
    store = house.services.store
    strays = [f"{path}-stray" for path in paths]
    core = dataset.layout.tag(LAKEHOUSE, TagKey("journal/last_flushed"))
    for path in (*strays, core):
        store.put(path, b"{}")

    assert wrong_paths(house, dataset) == sorted(strays)
    mirrors.repair(house.services.database, store, dataset)
    assert wrong_paths(house, dataset) == []
    assert store.head(core) is not None
    assert all(store.head(path) is not None for path in paths)


@ONE_DATABASE
def test_mirror_that_is_on_its_way_is_not_wrong(house: InProcessApi, dataset: Dataset, paths: list[str], monkeypatch):
    monkeypatch.setattr(mirrors, "now", ids.now)
    with house.services.database.write() as connection:
        connection.execute(update(queue).values(created=ids.now()))
        connection.execute(update(locks).values(taken=ids.now()))
    house.services.store.delete(paths[:2])
    house.services.store.put(f"{paths[2]}-new", b"{}")

    assert wrong_paths(house, dataset) == []
