"""Check and repair the mirrors of tags, locks and queue items in the storage layout.

Mirrors are written one by one after the SQL commit, so a crash may leave one missing or stale. Their content is not
checked, because SQL is authoritative.
"""

from datetime import datetime, timedelta

from sqlalchemy import Connection, select

from tarn.coordination import locks, queue, tags
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import locks as locks_table
from tarn.db.tables import queue as queue_table
from tarn.db.tables import tags as tags_table
from tarn.model.datasets.tag import Tag
from tarn.model.ids import now
from tarn.model.names import LAKEHOUSE, LockName, TagKey, TenantName
from tarn.model.work.lock import HeldLock
from tarn.storage.store import Store

GRACE = timedelta(minutes=1)
"""Younger differences are ignored, because the mirror may still be written or deleted."""


def find_wrong(database: Database, store: Store, dataset: Dataset) -> list[tuple[str, str]]:
    """Return the paths of missing and orphaned mirrors, and why; those that change meanwhile are left out."""
    layout, settled = dataset.layout, now() - GRACE
    with database.read() as connection:
        before = _expected(connection, dataset)
    core = layout.tag(LAKEHOUSE, TagKey("x")).removesuffix("x")
    listed = {
        entry.path: entry.modified
        for folder in (layout.tags, layout.locks, layout.queue)
        for entry in store.list(folder)
        if not entry.path.startswith(core)
    }
    wrong = {path: "its mirror is missing" for path, since in before.items() if path not in listed and since < settled}
    wrong |= {path: "it mirrors nothing in SQL" for path, at in listed.items() if path not in before and at < settled}
    if wrong:
        with database.read() as connection:
            after = _expected(connection, dataset)
        wrong = {path: reason for path, reason in wrong.items() if (path in after) == (path in before)}
    return sorted(wrong.items())


def repair(database: Database, store: Store, dataset: Dataset) -> None:
    """Write missing mirrors and delete orphaned ones."""
    paths = {path for path, _ in find_wrong(database, store, dataset)}
    if not paths:
        return
    layout = dataset.layout
    with database.read() as connection:
        expected = _expected(connection, dataset)
        for item in queue.all_items(connection, dataset):
            if layout.queue_item(item.tenant, item.id) in paths:
                queue.write_mirror(store, dataset, item)
        for row in connection.execute(select(tags_table).where(tags_table.c.dataset_id == dataset.id)):
            if layout.tag(row.tenant, TagKey(row.key)) in paths:
                tag = Tag(key=row.key, at=row.at, value=row.value)
                tags.mirror(store, dataset, TenantName(row.tenant), TagKey(row.key), tag)
        for row in connection.execute(select(locks_table).where(locks_table.c.dataset_id == dataset.id)):
            if row.token is not None and layout.named_lock(row.tenant, LockName(row.name)) in paths:
                lock = HeldLock.model_validate(row._mapping)
                locks.mirror(store, dataset, TenantName(row.tenant), lock.name, lock)
    store.delete([path for path in paths if path not in expected])


def _expected(connection: Connection, dataset: Dataset) -> dict[str, datetime]:
    """Return the paths of all expected mirrors, and since when each is expected."""
    layout = dataset.layout
    items = select(queue_table.c.id, queue_table.c.tenant, queue_table.c.created)
    paths = {
        layout.queue_item(row.tenant, row.id): row.created
        for row in connection.execute(items.where(queue_table.c.dataset_id == dataset.id))
    }
    for row in connection.execute(
        select(tags_table).where(tags_table.c.dataset_id == dataset.id, tags_table.c.tenant != LAKEHOUSE)
    ):
        paths[layout.tag(row.tenant, TagKey(row.key))] = row.at
    for row in connection.execute(
        select(locks_table).where(locks_table.c.dataset_id == dataset.id, locks_table.c.token.is_not(None))
    ):
        paths[layout.named_lock(row.tenant, LockName(row.name))] = row.taken
    return paths
