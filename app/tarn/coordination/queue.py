"""Queue of a dataset: items in the order in which they were accepted, for the worker or for a tenant.

1. add     lock the dataset's queue head until the commit and allocate an id above the last one: ids rise in the order
           in which items become visible, even if the clock goes back
2. begin   the worker counts an attempt of the oldest item without a recipient; later items wait for it
3. settle  in the transaction that has the effect, and only while the item is pending: a second attempt has no effect

An item with a recipient is leased to that tenant instead, which acknowledges it with the token of the lease. Leases
expire by the database's clock.
"""

import math
import secrets
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import structlog
from sqlalchemy import ColumnElement, Connection, Row, Update, delete, func, insert, or_, select, update

from tarn.access import grants
from tarn.datasets.registry import ACTIVE, Dataset, lock_active
from tarn.db import outbox
from tarn.db.database_clock import database_time
from tarn.db.engine import Database
from tarn.db.lease import LeaseColumns
from tarn.db.notifications import publish
from tarn.db.tables import datasets, queue, queue_heads
from tarn.db.upsert import upsert
from tarn.errors import (
    Backpressure,
    FieldError,
    Forbidden,
    LockLost,
    QueueItemConflict,
    QueueItemFailed,
    QueueItemNotFound,
    SchemaViolation,
    TarnError,
)
from tarn.model.ids import new_id
from tarn.model.names import DatasetName, TenantName
from tarn.model.work.event import EventKind
from tarn.model.work.job import MOST_ATTEMPTS, retry_time
from tarn.model.work.queue import NewQueueItem, QueueItem, QueueItemState, TakenQueueItem
from tarn.settings import Settings
from tarn.storage.layout import DatasetLayout
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

RETRY_SECONDS = 10
LEASE = LeaseColumns(holder=queue.c.token, expires=queue.c.leased_until, number=queue.c.attempts)
"""The recipient proves its lease with a secret token, which a settled item keeps: settling it twice has no effect."""

RANDOM_BITS = 80
"""Bits of a UUIDv7 below its timestamp."""

DELETE_BATCH = 500
"""Maximum number of items that one transaction deletes."""


class ItemAlreadySettled(Exception):
    """The item was settled or deleted by another process: it must have no further effect."""


class StartedItem(NamedTuple):
    """An item for the worker, and the id of the request that added it."""

    item: QueueItem
    request: str


def record_change(connection: Connection, dataset: Dataset, item: QueueItem) -> None:
    """Record an event for a change of an item's state, for the tenants that may read the item."""
    outbox.record(
        connection,
        dataset.id,
        EventKind.QUEUE_ITEM,
        audience=None if item.shared else {item.tenant} | ({item.to} if item.to is not None else set()),
        item=item.id,
        state=item.state,
        action=item.action,
        resource=item.resource,
        tenant=item.tenant,
        to=item.to,
    )
    log.info("queue item changed", dataset=dataset.name, item=item.id, state=item.state, attempts=item.attempts)


def id_after(last: str | None) -> str:
    """Return a UUIDv7 above the last one; if the clock has gone back, one millisecond after the last."""
    new_item_id = new_id()
    if last is None or new_item_id > last:
        return new_item_id
    next_millisecond = (UUID(last).int >> RANDOM_BITS) + 1
    return str(UUID(int=next_millisecond << RANDOM_BITS | UUID(new_item_id).int & ((1 << RANDOM_BITS) - 1)))


# For tenants


def add(
    connection: Connection, settings: Settings, dataset: Dataset, tenant: TenantName, new: NewQueueItem, request: str
) -> QueueItem:
    """Add an item in the caller's transaction.

    Raises SchemaViolation for a recipient that has no grant on the dataset, and Backpressure if too much waits.
    """
    lock_active(connection, dataset)
    if new.to is not None and not grants.is_known_on(connection, new.to, dataset.name):
        reason = f"{new.to!r} is no tenant with a grant on {dataset.name!r}"
        raise SchemaViolation(f"to: {reason}", errors=[FieldError(field="to", reason=reason)])
    own = queue.c.dataset_id == dataset.id, queue.c.tenant == tenant, queue.c.state == QueueItemState.PENDING
    waiting = select(queue.c.id).where(*own).limit(settings.queue_max_items).subquery()
    if connection.execute(select(func.count()).select_from(waiting)).scalar_one() >= settings.queue_max_items:
        raise Backpressure(
            f"{settings.queue_max_items} items of tenant {tenant!r} wait in the queue of {dataset.name!r}",
            retry_after=RETRY_SECONDS,
        )
    item_id = _next_id(connection, dataset)
    connection.execute(
        insert(queue).values(
            id=item_id,
            dataset_id=dataset.id,
            tenant=tenant,
            recipient=new.to,
            shared=new.shared,
            action=new.action,
            resource=new.resource,
            origin=new.origin,
            payload=new.payload,
            request=request,
            state=QueueItemState.PENDING,
            attempts=0,
            created=database_time(connection),
        )
    )
    item = _item(connection.execute(select(queue).where(queue.c.id == item_id)).one())
    record_change(connection, dataset, item)
    return item


def _next_id(connection: Connection, dataset: Dataset) -> str:
    head = upsert(connection, queue_heads).values(dataset_id=dataset.id, last="")
    locked_head = head.on_conflict_do_update(index_elements=["dataset_id"], set_={"last": queue_heads.c.last})
    last = connection.execute(locked_head.returning(queue_heads.c.last)).scalar_one()
    item_id = id_after(last or None)
    own = queue_heads.c.dataset_id == dataset.id
    connection.execute(update(queue_heads).where(own).values(last=item_id))
    return item_id


def page(
    connection: Connection,
    dataset: Dataset,
    tenant: TenantName,
    sender: TenantName | None,
    state: QueueItemState | None,
    after: str | None,
    limit: int,
) -> list[QueueItem]:
    """Return the items that a tenant sent or receives, in order; with `sender`, those of its items it may read."""
    own = or_(queue.c.tenant == tenant, queue.c.recipient == tenant)
    query = select(queue).where(queue.c.dataset_id == dataset.id)
    query = query.where(own) if sender is None else query.where(queue.c.tenant == sender, or_(own, queue.c.shared))
    if state is not None:
        query = query.where(queue.c.state == state)
    if after is not None:
        query = query.where(queue.c.id > after)
    return [_item(row) for row in connection.execute(query.order_by(queue.c.id).limit(limit))]


def get(connection: Connection, dataset: Dataset, tenant: TenantName, item_id: str) -> QueueItem:
    """Return an item that a tenant may read. Raises QueueItemNotFound."""
    return _item(_readable(connection, dataset, tenant, item_id))


def pop(connection: Connection, dataset: Dataset, tenant: TenantName, seconds: float) -> TakenQueueItem | None:
    """Lease the oldest free item that is addressed to a tenant; None if there is none.

    An item that was leased too often and never acknowledged becomes dead.
    """
    moment = database_time(connection)
    free = (
        queue.c.dataset_id == dataset.id,
        queue.c.recipient == tenant,
        queue.c.state == QueueItemState.PENDING,
        LEASE.is_free(moment),
        or_(queue.c.not_before.is_(None), queue.c.not_before <= moment),
    )
    oldest = select(queue).where(*free).order_by(queue.c.id).limit(1)
    if connection.dialect.name == "postgresql":
        oldest = oldest.with_for_update(skip_locked=True)
    while (row := connection.execute(oldest).first()) is not None:
        if row.attempts >= MOST_ATTEMPTS:
            _mark_dead(connection, dataset, row, f"the item was taken {row.attempts} times and never acknowledged")
            continue
        token = secrets.token_urlsafe(24)
        acquired = LEASE.acquire(token, moment, moment + timedelta(seconds=seconds)).values(not_before=None)
        item = _execute(connection, dataset, acquired.where(queue.c.id == row.id))
        return TakenQueueItem(**item.model_dump(), token=token)
    return None


def acknowledge(
    connection: Connection, dataset: Dataset, tenant: TenantName, item_id: str, token: str, error: str | None
) -> QueueItem:
    """Settle a leased item, or record why it failed. Repeating it with the same token has no effect.

    It is also accepted after the lease has expired, until the item is taken again. Raises QueueItemNotFound, LockLost.
    """
    row = _readable(connection, dataset, tenant, item_id, queue.c.recipient == tenant)
    if row.token != token:
        raise LockLost("the item is not held under this token: its lease has expired and it was taken again")
    if row.state != QueueItemState.PENDING:
        return _item(row)
    moment = database_time(connection)
    if error is None:
        return _change(connection, dataset, row.id, **_done(moment))
    return _failed(connection, dataset, row, QueueItemFailed(error), retry_time(row.attempts, moment), moment)


def retry(connection: Connection, dataset: Dataset, tenant: TenantName, item_id: str) -> QueueItem:
    """Make a dead item pending again, with its attempts reset. Raises QueueItemNotFound, QueueItemConflict."""
    own = or_(queue.c.tenant == tenant, queue.c.recipient == tenant)
    row = _readable(connection, dataset, tenant, item_id, own)
    if row.state != QueueItemState.DEAD:
        raise QueueItemConflict(f"the item is {row.state}: only a dead item can be retried", state=row.state)
    reset: dict[str, Any] = {"state": QueueItemState.PENDING, "attempts": 0, "finished": None}
    return _change(connection, dataset, row.id, QueueItemState.DEAD, **_pending(None), **reset)


def remove(connection: Connection, dataset: Dataset, tenant: TenantName, item_id: str) -> QueueItem:
    """Delete an item in any state. Raises QueueItemNotFound, and Forbidden for another tenant's item."""
    row = _readable(connection, dataset, tenant, item_id)
    if row.tenant != tenant:
        raise Forbidden("only the tenant that sent an item may delete it")
    connection.execute(delete(queue).where(queue.c.id == item_id))
    publish(connection, EventKind.QUEUE_ITEM)  # later items may have waited for it
    return _item(row)


# For the worker


def waiting(connection: Connection) -> list[Dataset]:
    """Return the datasets whose oldest item for the worker is due, the longest waiting first."""
    pending = queue.c.state == QueueItemState.PENDING, queue.c.recipient.is_(None)
    first = select(func.min(queue.c.id).label("id")).where(*pending).group_by(queue.c.dataset_id).subquery()
    is_due = or_(queue.c.not_before.is_(None), queue.c.not_before <= database_time(connection))
    rows = connection.execute(
        select(datasets.c.id, datasets.c.name)
        .join(queue, queue.c.dataset_id == datasets.c.id)
        .join(first, first.c.id == queue.c.id)
        .where(datasets.c.state == ACTIVE, is_due)
        .order_by(queue.c.id)
    )
    return [Dataset(row.id, DatasetName(row.name)) for row in rows]


def seconds_until_due(connection: Connection) -> float:
    """Return the seconds until an item for the worker is due that is not due yet; infinite if there is none."""
    moment = database_time(connection)
    pending = queue.c.state == QueueItemState.PENDING, queue.c.recipient.is_(None), queue.c.not_before > moment
    due_at = connection.execute(select(func.min(queue.c.not_before)).where(*pending)).scalar()
    return math.inf if due_at is None else (due_at - moment).total_seconds()


def begin(connection: Connection, dataset: Dataset) -> StartedItem | None:
    """Count an attempt of the oldest item for the worker. None if there is none, or if it is not due yet: later items
    wait for it. An item that crashed too many workers becomes dead."""
    own = queue.c.dataset_id == dataset.id, queue.c.recipient.is_(None), queue.c.state == QueueItemState.PENDING
    oldest = select(queue).where(*own).order_by(queue.c.id).limit(1).with_for_update()
    while (row := connection.execute(oldest).first()) is not None:
        if row.not_before is not None and row.not_before > database_time(connection):
            return None
        if row.attempts >= MOST_ATTEMPTS:
            _mark_dead(connection, dataset, row, f"{row.attempts} workers stopped while processing the item")
            continue
        return StartedItem(_change(connection, dataset, row.id, attempts=row.attempts + 1), row.request)
    return None


def settle(connection: Connection, dataset: Dataset, item: QueueItem) -> QueueItem:
    """Mark an item as done, in the transaction that has its effect. Raises ItemAlreadySettled."""
    return _change(connection, dataset, item.id, **_done(database_time(connection)))


def fail(connection: Connection, dataset: Dataset, item: QueueItem, error: TarnError) -> QueueItem:
    """Record why an attempt failed: the item is retried later, or dead. Raises ItemAlreadySettled."""
    row = connection.execute(select(queue).where(queue.c.id == item.id).with_for_update()).first()
    if row is None:
        raise ItemAlreadySettled
    moment = database_time(connection)
    retry_at = retry_time(row.attempts, moment) if error.retryable else None
    return _failed(connection, dataset, row, error, retry_at, moment)


# Mirror and retention


def write_mirror(store: Store, dataset: Dataset, item: QueueItem) -> None:
    """Write an item's mirror to the lake, after the commit. A failure is only logged."""
    try:
        store.put_hint(dataset.layout.queue_item(item.tenant, item.id), item.model_dump_json().encode())
    except TarnError as error:
        log.warning("cannot mirror a queue item to the layout", dataset=dataset.name, problem=error.slug)


def delete_mirror(store: Store, dataset: Dataset, item: QueueItem) -> None:
    """Delete an item's mirror. A failure is only logged."""
    try:
        store.delete([dataset.layout.queue_item(item.tenant, item.id)])
    except TarnError as error:
        log.warning(
            "cannot delete the mirror of a queue item from the layout", dataset=dataset.name, problem=error.slug
        )


def delete_done(database: Database, store: Store, settings: Settings) -> int:
    """Delete items that were done before the retention period, their mirrors first. Returns their number."""
    deleted = 0
    while rows := _old(database, settings):
        store.delete([DatasetLayout(DatasetName(row.name)).queue_item(row.tenant, row.id) for row in rows])
        with database.write() as connection:
            connection.execute(delete(queue).where(queue.c.id.in_([row.id for row in rows])))
        deleted += len(rows)
    return deleted


def _old(database: Database, settings: Settings) -> list[Row[Any]]:
    with database.read() as connection:
        oldest_kept = database_time(connection) - timedelta(days=settings.queue_days)
        old = queue.c.state == QueueItemState.DONE, queue.c.finished < oldest_kept
        query = select(queue.c.id, queue.c.tenant, datasets.c.name).join(datasets, datasets.c.id == queue.c.dataset_id)
        # The files of a dataset that is being deleted belong to that deletion.
        return list(connection.execute(query.where(*old, datasets.c.state == ACTIVE).limit(DELETE_BATCH)))


def all_items(connection: Connection, dataset: Dataset) -> Iterator[QueueItem]:
    """Iterate over all items of a dataset, in order."""
    query = select(queue).where(queue.c.dataset_id == dataset.id).order_by(queue.c.id)
    return map(_item, connection.execute(query, execution_options={"yield_per": DELETE_BATCH}))


def _readable(
    connection: Connection, dataset: Dataset, tenant: TenantName, item_id: str, *conditions: ColumnElement[bool]
) -> Row[Any]:
    """Return the row of an item that a tenant may read; with conditions, one that meets these, locked for an update.

    Raises QueueItemNotFound.
    """
    condition = conditions or (or_(queue.c.tenant == tenant, queue.c.recipient == tenant, queue.c.shared),)
    query = select(queue).where(queue.c.id == item_id, queue.c.dataset_id == dataset.id, *condition)
    row = connection.execute(query.with_for_update() if conditions else query).first()
    if row is None:
        raise QueueItemNotFound(f"there is no queue item {item_id!r}")
    return row


def _mark_dead(connection: Connection, dataset: Dataset, row: Row[Any], reason: str) -> None:
    _failed(connection, dataset, row, QueueItemFailed(reason), None, database_time(connection))


def _failed(
    connection: Connection,
    dataset: Dataset,
    row: Row[Any],
    error: TarnError,
    retry_at: datetime | None,
    moment: datetime,
) -> QueueItem:
    problem = error.problem(instance=f"/v1/datasets/{dataset.name}/queue/{row.id}").model_dump(mode="json")
    ended: dict[str, Any] = {"state": QueueItemState.DEAD, "finished": moment} if retry_at is None else {}
    return _change(connection, dataset, row.id, **_pending(retry_at), **ended, problem=problem)


def _pending(retry_at: datetime | None) -> dict[str, Any]:
    return {"not_before": retry_at, **LEASE.released}


def _done(moment: datetime) -> dict[str, Any]:
    return {
        "state": QueueItemState.DONE,
        "finished": moment,
        "not_before": None,
        "leased_until": None,
        "problem": None,
    }


def _change(
    connection: Connection, dataset: Dataset, item_id: str, was: QueueItemState = QueueItemState.PENDING, **values: Any
) -> QueueItem:
    """Change an item if it is still in the expected state. Raises ItemAlreadySettled otherwise."""
    condition = queue.c.id == item_id, queue.c.state == was
    return _execute(connection, dataset, update(queue).where(*condition).values(**values))


def _execute(connection: Connection, dataset: Dataset, statement: Update) -> QueueItem:
    """Execute an update of one item and record its event. Raises ItemAlreadySettled if it matches no item."""
    row = connection.execute(statement.returning(queue)).first()
    if row is None:
        raise ItemAlreadySettled
    item = _item(row)
    record_change(connection, dataset, item)
    return item


def _item(row: Row[Any]) -> QueueItem:
    return QueueItem.model_validate(dict(row._mapping) | {"to": row.recipient})
