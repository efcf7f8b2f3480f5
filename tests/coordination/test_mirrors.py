"""Mirrors of tags, locks and queue items: missing and orphaned ones are detected and repaired."""

from datetime import timedelta

import pytest
from sqlalchemy import update
from tarn.coordination import layout_mirrors
from tarn.datasets.registry import Dataset
from tarn.db.tables import locks, queue
from tarn.model import ids
from tarn.model.names import LAKEHOUSE, LockName, TagKey

from tests.in_process_api import ONE_DATABASE, InProcessApi


@pytest.fixture
def paths(api: InProcessApi, dataset: Dataset, monkeypatch) -> list[str]:
    """Return the paths of the mirrors of an item, a lock and a tag, all written two minutes ago."""
    item = {"action": "DELETE", "resource": "entity", "payload": {"id": "x"}}
    created = api.admin.post("/v1/datasets/test/queue", item).json()
    api.admin.put("/v1/datasets/test/locks/nightly", {"ttl": 600})
    api.admin.put("/v1/datasets/test/tag?key=a/b", {"at": "2020-01-01T00:00:00Z"})
    monkeypatch.setattr(layout_mirrors, "now", lambda: ids.now() + timedelta(minutes=2))
    layout = dataset.layout
    return [
        layout.queue_item("admin", created["id"]),
        layout.named_lock("admin", LockName("nightly")),
        layout.tag("admin", TagKey("a/b")),
    ]


def wrong_paths(api: InProcessApi, dataset: Dataset) -> list[str]:
    return [path for path, _ in layout_mirrors.find_wrong(api.services.database, api.services.store, dataset)]


@ONE_DATABASE
def test_missing_mirror_is_detected_and_rewritten(api: InProcessApi, dataset: Dataset, paths: list[str]):
    store = api.services.store
    assert wrong_paths(api, dataset) == []
    before = {path: store.get(path) for path in paths}
    store.delete(paths)

    assert wrong_paths(api, dataset) == sorted(paths)
    layout_mirrors.repair(api.services.database, store, dataset)
    assert {path: store.get(path) for path in paths} == before


@ONE_DATABASE
def test_orphaned_mirror_is_detected_and_deleted(api: InProcessApi, dataset: Dataset, paths: list[str]):
    store = api.services.store
    strays = [f"{path}-stray" for path in paths]
    core = dataset.layout.tag(LAKEHOUSE, TagKey("journal/last_flushed"))
    for path in (*strays, core):
        store.put(path, b"{}")

    assert wrong_paths(api, dataset) == sorted(strays)
    layout_mirrors.repair(api.services.database, store, dataset)
    assert wrong_paths(api, dataset) == []
    assert store.head(core) is not None
    assert all(store.head(path) is not None for path in paths)


@ONE_DATABASE
def test_recently_changed_mirror_is_not_reported(api: InProcessApi, dataset: Dataset, paths: list[str], monkeypatch):
    monkeypatch.setattr(layout_mirrors, "now", ids.now)
    with api.services.database.write() as connection:
        connection.execute(update(queue).values(created=ids.now()))
        connection.execute(update(locks).values(taken=ids.now()))
    api.services.store.delete(paths[:2])
    api.services.store.put(f"{paths[2]}-new", b"{}")

    assert wrong_paths(api, dataset) == []
