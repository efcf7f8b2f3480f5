"""Mirrors of tags, locks and queue items in the layout: which there should be, and those that are wrong.

They are put after the fact, one by one, so a crash may leave one out or one too many. What they say is not looked at:
who must know asks SQL.
"""

from datetime import datetime, timedelta

from sqlalchemy import Connection, select

from tarn.coordination import locks, queue, tags
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import locks as locks_table
from tarn.db.tables import queue as queue_table
from tarn.db.tables import tags as tags_table
from tarn.model.ids import now
from tarn.model.lock import HeldLock
from tarn.model.names import LAKEHOUSE, LockName, TagKey, TenantName
from tarn.model.tag import Tag
from tarn.storage.store import Store

GRACE = timedelta(minutes=1)
"""What is younger than this may still be put, or taken away."""


def find_wrong(database: Database, store: Store, dataset: Dataset) -> list[tuple[str, str]]:
    """Mirrors that are missing or are of nothing: their paths, and why. What changes meanwhile is not."""
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
    found = {path: "it is not shown" for path, since in before.items() if path not in listed and since < settled}
    found |= {path: "it shows nothing" for path, at in listed.items() if path not in before and at < settled}
    if found:
        with database.read() as connection:
            after = _expected(connection, dataset)
        found = {path: why for path, why in found.items() if (path in after) == (path in before)}
    return sorted(found.items())


def repair(database: Database, store: Store, dataset: Dataset) -> None:
    """Show what is not shown, and take away what shows nothing."""
    paths = {path for path, _ in find_wrong(database, store, dataset)}
    if not paths:
        return
    own = dataset.layout
    with database.read() as connection:
        expected = _expected(connection, dataset)
        for item in queue.all_items(connection, dataset):
            if own.queue_item(item.tenant, item.id) in paths:
                queue.write_mirror(store, dataset, item)
        for row in connection.execute(select(tags_table).where(tags_table.c.dataset_id == dataset.id)):
            if own.tag(row.tenant, TagKey(row.key)) in paths:
                tag = Tag(key=row.key, at=row.at, value=row.value)
                tags.mirror(store, dataset, TenantName(row.tenant), TagKey(row.key), tag)
        for row in connection.execute(select(locks_table).where(locks_table.c.dataset_id == dataset.id)):
            if row.token is not None and own.named_lock(row.tenant, LockName(row.name)) in paths:
                held = HeldLock.model_validate(row._mapping)
                locks.mirror(store, dataset, TenantName(row.tenant), held.name, held)
    store.delete([path for path in paths if path not in expected])


def _expected(connection: Connection, dataset: Dataset) -> dict[str, datetime]:
    """The paths of all mirrors that there should be, and since when, as far as that is known."""
    layout = dataset.layout
    items = select(queue_table.c.id, queue_table.c.tenant, queue_table.c.created)
    found = {
        layout.queue_item(row.tenant, row.id): row.created
        for row in connection.execute(items.where(queue_table.c.dataset_id == dataset.id))
    }
    for row in connection.execute(
        select(tags_table).where(tags_table.c.dataset_id == dataset.id, tags_table.c.tenant != LAKEHOUSE)
    ):
        found[layout.tag(row.tenant, TagKey(row.key))] = row.at
    for row in connection.execute(
        select(locks_table).where(locks_table.c.dataset_id == dataset.id, locks_table.c.token.is_not(None))
    ):
        found[layout.named_lock(row.tenant, LockName(row.name))] = row.taken
    return found
