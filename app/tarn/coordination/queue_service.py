"""The queue as the API sees it: tenants add, take, acknowledge, retry and delete items."""

from collections.abc import Callable
from typing import Any

from tarn.access.audit import AuditedAction
from tarn.coordination import queue
from tarn.datasets.registry import Dataset
from tarn.db import idempotency
from tarn.db.engine import Database
from tarn.db.idempotency import IdempotencyKey, StoreAnswer
from tarn.model.names import TenantName
from tarn.model.work.queue import NewQueueItem, QueueItem, QueueItemState, TakenQueueItem
from tarn.settings import Settings
from tarn.storage.store import Store


class QueueService:
    """Reads and changes queue items. Each change and its audit record are one transaction; the mirror follows it."""

    def __init__(self, database: Database, store: Store, settings: Settings) -> None:
        self._database = database
        self._store = store
        self._settings = settings

    def page(
        self,
        dataset: Dataset,
        tenant: TenantName,
        sender: TenantName | None,
        state: QueueItemState | None,
        after: str | None,
        limit: int,
    ) -> list[QueueItem]:
        """Return the items that a tenant sent or receives, in order; with `sender`, those of its items it may read."""
        with self._database.read() as connection:
            return queue.page(connection, dataset, tenant, sender, state, after, limit)

    def get(self, dataset: Dataset, tenant: TenantName, item_id: str) -> QueueItem:
        """Return an item that a tenant may read. Raises QueueItemNotFound."""
        with self._database.read() as connection:
            return queue.get(connection, dataset, tenant, item_id)

    def add(self, dataset: Dataset, new: NewQueueItem, once: IdempotencyKey | None, act: AuditedAction) -> QueueItem:
        """Add an item, or return the one that the same request added before.

        Raises IdempotencyMismatch, Backpressure, and SchemaViolation for a recipient without a grant on the dataset.
        """

        def add(store: StoreAnswer) -> dict[str, Any]:
            with self._database.write() as connection:
                item = queue.add(connection, self._settings, dataset, act.tenant, new, act.request)
                answer = item.model_dump(mode="json")
                store(connection, answer)
                act.done(connection, target=f"{act.target}/{item.id}", to=new.to)
            queue.write_mirror(self._store, dataset, item)
            return answer

        return QueueItem.model_validate(idempotency.answer_once(self._database, act.tenant, once, add, status=201))

    def take(self, dataset: Dataset, seconds: float, act: AuditedAction) -> TakenQueueItem | None:
        """Lease the oldest free item that is addressed to the tenant; None if there is none."""
        with self._database.write() as connection:
            leased = queue.pop(connection, dataset, act.tenant, seconds)
            if leased is not None:
                act.done(connection, item=leased.id, attempt=leased.attempts)
        if leased is not None:
            queue.write_mirror(self._store, dataset, QueueItem(**leased.model_dump(exclude={"token"})))
        return leased

    def acknowledge(
        self, dataset: Dataset, item_id: str, token: str, error: str | None, act: AuditedAction
    ) -> QueueItem:
        """Settle a leased item as done, or as failed with an error. Raises QueueItemNotFound, LockLost."""
        with self._database.write() as connection:
            settled = queue.acknowledge(connection, dataset, act.tenant, item_id, token, error)
            act.done(connection, state=settled.state)
        queue.write_mirror(self._store, dataset, settled)
        return settled

    def retry(
        self, dataset: Dataset, item_id: str, require: Callable[[QueueItem], None], act: AuditedAction
    ) -> QueueItem:
        """Make a dead item pending again. `require` raises if the caller lacks the level that the item needs.

        Raises QueueItemNotFound, QueueItemConflict, and what `require` raises; then the item is unchanged.
        """
        with self._database.write() as connection:
            item = queue.retry(connection, dataset, act.tenant, item_id)
            require(item)
            act.done(connection)
        queue.write_mirror(self._store, dataset, item)
        return item

    def delete(self, dataset: Dataset, item_id: str, act: AuditedAction) -> None:
        """Delete an item in any state. Raises QueueItemNotFound, and Forbidden for another tenant's item."""
        with self._database.write() as connection:
            removed = queue.remove(connection, dataset, act.tenant, item_id)
            act.done(connection, state=removed.state)
        queue.delete_mirror(self._store, dataset, removed)
