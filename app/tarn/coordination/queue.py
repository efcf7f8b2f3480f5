"""The queue of a dataset: items in the order in which they were accepted, for the worker or for a tenant.

1. add     whoever adds an item holds the dataset's head of the queue until the commit, and draws an id above the last
           one: so ids rise in the order in which items become visible, and a clock that goes back changes nothing
2. begin   the worker counts an attempt of the oldest item that is addressed to nobody; those after it wait for it
3. settle  in the transaction that has the effect, and only while the item is pending: whoever is second has none

An item for a tenant is lent to it instead, and is settled by what the tenant says under the token that it got. Whether
a lease has lapsed is said by the database's clock.
"""

import secrets
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import structlog
from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, or_, select, update

from tarn.access import grants
from tarn.datasets.registry import ACTIVE, Dataset, lock_active
from tarn.db import outbox as events
from tarn.db.database_clock import database_time
from tarn.db.engine import Database
from tarn.db.tables import datasets, queue, queue_heads
from tarn.db.upsert import upsert
from tarn.errors import (
    Backpressure,
    Fault,
    Forbidden,
    LockLost,
    QueueItemConflict,
    QueueItemFailed,
    QueueItemNotFound,
    SchemaViolation,
    TarnError,
)
from tarn.model.event import EventKind
from tarn.model.ids import new_id
from tarn.model.job import MOST_ATTEMPTS, retry_time
from tarn.model.names import DatasetName, TenantName
from tarn.model.queue import NewQueueItem, QueueItem, QueueItemState, TakenQueueItem
from tarn.settings import Settings
from tarn.storage.layout import DatasetLayout
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

RETRY_SECONDS = 10
RANDOM_BITS = 80
"""What a UUIDv7 has below its milliseconds."""

DELETE_BATCH = 500
"""Items that one transaction deletes at most."""


class Settled(Exception):
    """Somebody else has settled the item, or taken it out of the queue: it must have no other effect."""


class Begun(NamedTuple):
    """An item that the worker is to do, and the request that it came with."""

    item: QueueItem
    request: str


def record_change(connection: Connection, dataset: Dataset, item: QueueItem) -> None:
    """Told of every change of an item's state, in the transaction that makes it: who may read the item hears of it."""
    events.record(
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
    log.info("queue item", dataset=dataset.name, item=item.id, state=item.state, attempts=item.attempts)


def id_after(last: str | None) -> str:
    """A UUIDv7 above the last one, though the clock may have gone back since: then a millisecond later than that."""
    fresh = new_id()
    if last is None or fresh > last:
        return fresh
    later = (UUID(last).int >> RANDOM_BITS) + 1
    return str(UUID(int=later << RANDOM_BITS | UUID(fresh).int & ((1 << RANDOM_BITS) - 1)))


# What tenants do


def add(
    connection: Connection, settings: Settings, dataset: Dataset, tenant: TenantName, new: NewQueueItem, request: str
) -> QueueItem:
    """Add an item in the caller's transaction.

    Raises SchemaViolation for a recipient that has no grant on the dataset, and Backpressure if too much waits.
    """
    lock_active(connection, dataset)
    if new.to is not None and not grants.is_known_on(connection, new.to, dataset.name):
        reason = f"{new.to!r} is no tenant with a grant on {dataset.name!r}"
        raise SchemaViolation(f"to: {reason}", errors=[Fault(field="to", reason=reason)])
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
    held = head.on_conflict_do_update(index_elements=["dataset_id"], set_={"last": queue_heads.c.last})
    last = connection.execute(held.returning(queue_heads.c.last)).scalar_one()
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
    """Items that a tenant sent or is to take, in their order; or, of a sender, those that it may read."""
    mine = or_(queue.c.tenant == tenant, queue.c.recipient == tenant)
    query = select(queue).where(queue.c.dataset_id == dataset.id)
    query = query.where(mine) if sender is None else query.where(queue.c.tenant == sender, or_(mine, queue.c.shared))
    if state is not None:
        query = query.where(queue.c.state == state)
    if after is not None:
        query = query.where(queue.c.id > after)
    return [_item(row) for row in connection.execute(query.order_by(queue.c.id).limit(limit))]


def get(connection: Connection, dataset: Dataset, tenant: TenantName, item_id: str) -> QueueItem:
    """An item that a tenant may read. Raises QueueItemNotFound."""
    return _item(_readable(connection, dataset, tenant, item_id))


def pop(connection: Connection, dataset: Dataset, tenant: TenantName, seconds: float) -> TakenQueueItem | None:
    """Lend a tenant the oldest item that is addressed to it and that nobody has; None: there is none.

    One that was lent too often, and never settled, is dead.
    """
    moment = database_time(connection)
    free = (
        queue.c.dataset_id == dataset.id,
        queue.c.recipient == tenant,
        queue.c.state == QueueItemState.PENDING,
        or_(queue.c.leased_until.is_(None), queue.c.leased_until <= moment),
        or_(queue.c.not_before.is_(None), queue.c.not_before <= moment),
    )
    oldest = select(queue).where(*free).order_by(queue.c.id).limit(1)
    if connection.dialect.name == "postgresql":
        oldest = oldest.with_for_update(skip_locked=True)
    while (row := connection.execute(oldest).first()) is not None:
        if row.attempts >= MOST_ATTEMPTS:
            _mark_dead(connection, dataset, row, f"it was taken {row.attempts} times, and never acknowledged")
            continue
        lent: dict[str, Any] = {"token": secrets.token_urlsafe(24), "leased_until": moment + timedelta(seconds=seconds)}
        taken = _change(connection, dataset, row.id, attempts=row.attempts + 1, not_before=None, **lent)
        return TakenQueueItem(**taken.model_dump(), token=lent["token"])
    return None


def acknowledge(
    connection: Connection, dataset: Dataset, tenant: TenantName, item_id: str, token: str, error: str | None
) -> QueueItem:
    """Settle an item that was taken, or say why it could not be done. Said again under the same token, done is done.

    Whose lease has lapsed may still say so, until the item is taken by another. Raises QueueItemNotFound, LockLost.
    """
    row = _readable(connection, dataset, tenant, item_id, queue.c.recipient == tenant)
    if row.token != token:
        raise LockLost("the item is not held under this token: its lease has lapsed, and it was taken again")
    if row.state != QueueItemState.PENDING:
        return _item(row)
    moment = database_time(connection)
    if error is None:
        return _change(connection, dataset, row.id, **_done(moment))
    return _failed(connection, dataset, row, QueueItemFailed(error), retry_time(row.attempts, moment), moment)


def retry(connection: Connection, dataset: Dataset, tenant: TenantName, item_id: str) -> QueueItem:
    """Let a dead item be tried as if it had never been. Raises QueueItemNotFound, QueueItemConflict."""
    mine = or_(queue.c.tenant == tenant, queue.c.recipient == tenant)
    row = _readable(connection, dataset, tenant, item_id, mine)
    if row.state != QueueItemState.DEAD:
        raise QueueItemConflict(f"the item is {row.state}: only a dead one is tried again", state=row.state)
    anew: dict[str, Any] = {"state": QueueItemState.PENDING, "attempts": 0, "finished": None}
    return _change(connection, dataset, row.id, QueueItemState.DEAD, **_pending(None), **anew)


def remove(connection: Connection, dataset: Dataset, tenant: TenantName, item_id: str) -> QueueItem:
    """Take an item out of the queue, whatever its state. Raises QueueItemNotFound, and Forbidden for another's."""
    row = _readable(connection, dataset, tenant, item_id)
    if row.tenant != tenant:
        raise Forbidden("an item is deleted by the tenant that sent it")
    connection.execute(delete(queue).where(queue.c.id == item_id))
    return _item(row)


# What the worker does


def waiting(connection: Connection) -> list[Dataset]:
    """Datasets whose oldest item for the worker may be tried now, the one that has waited longest first."""
    pending = queue.c.state == QueueItemState.PENDING, queue.c.recipient.is_(None)
    first = select(func.min(queue.c.id).label("id")).where(*pending).group_by(queue.c.dataset_id).subquery()
    due = or_(queue.c.not_before.is_(None), queue.c.not_before <= database_time(connection))
    found = connection.execute(
        select(datasets.c.id, datasets.c.name)
        .join(queue, queue.c.dataset_id == datasets.c.id)
        .join(first, first.c.id == queue.c.id)
        .where(datasets.c.state == ACTIVE, due)
        .order_by(queue.c.id)
    )
    return [Dataset(row.id, DatasetName(row.name)) for row in found]


def begin(connection: Connection, dataset: Dataset) -> Begun | None:
    """Count an attempt of the oldest item for the worker; None: there is none, or it has to wait, and so have those
    after it. One that ended too many workers is dead."""
    own = queue.c.dataset_id == dataset.id, queue.c.recipient.is_(None), queue.c.state == QueueItemState.PENDING
    oldest = select(queue).where(*own).order_by(queue.c.id).limit(1).with_for_update()
    while (row := connection.execute(oldest).first()) is not None:
        if row.not_before is not None and row.not_before > database_time(connection):
            return None
        if row.attempts >= MOST_ATTEMPTS:
            _mark_dead(connection, dataset, row, f"{row.attempts} workers ended over it")
            continue
        return Begun(_change(connection, dataset, row.id, attempts=row.attempts + 1), row.request)
    return None


def settle(connection: Connection, dataset: Dataset, item: QueueItem) -> QueueItem:
    """Say that an item is done, in the transaction that has its effect. Raises Settled."""
    return _change(connection, dataset, item.id, **_done(database_time(connection)))


def fail(connection: Connection, dataset: Dataset, item: QueueItem, error: TarnError) -> QueueItem:
    """Say why an attempt failed: it is tried again later, or dead. Raises Settled."""
    row = connection.execute(select(queue).where(queue.c.id == item.id).with_for_update()).first()
    if row is None:
        raise Settled
    moment = database_time(connection)
    again = retry_time(row.attempts, moment) if error.retryable else None
    return _failed(connection, dataset, row, error, again, moment)


# What stays, and for how long


def write_mirror(store: Store, dataset: Dataset, item: QueueItem) -> None:
    """Mirror an item after the fact: whether that works changes nothing."""
    try:
        store.put_hint(dataset.layout.queue_item(item.tenant, item.id), item.model_dump_json().encode())
    except TarnError as error:
        log.warning("a queue item is not shown in the layout", dataset=dataset.name, problem=error.slug)


def delete_mirror(store: Store, dataset: Dataset, item: QueueItem) -> None:
    """Take an item's mirror away."""
    try:
        store.delete([dataset.layout.queue_item(item.tenant, item.id)])
    except TarnError as error:
        log.warning("a queue item is still shown in the layout", dataset=dataset.name, problem=error.slug)


def delete_done(database: Database, store: Store, settings: Settings) -> int:
    """Delete items that were done long ago, and their mirrors before them. Returns how many."""
    gone = 0
    while some := _old(database, settings):
        store.delete([DatasetLayout(DatasetName(row.name)).queue_item(row.tenant, row.id) for row in some])
        with database.write() as connection:
            connection.execute(delete(queue).where(queue.c.id.in_([row.id for row in some])))
        gone += len(some)
    return gone


def _old(database: Database, settings: Settings) -> list[Row[Any]]:
    with database.read() as connection:
        past = database_time(connection) - timedelta(days=settings.queue_days)
        old = queue.c.state == QueueItemState.DONE, queue.c.finished < past
        query = select(queue.c.id, queue.c.tenant, datasets.c.name).join(datasets, datasets.c.id == queue.c.dataset_id)
        # Of a dataset that is being deleted, the files are not ours any more.
        return list(connection.execute(query.where(*old, datasets.c.state == ACTIVE).limit(DELETE_BATCH)))


def all_items(connection: Connection, dataset: Dataset) -> Iterator[QueueItem]:
    """Every item of a dataset, in their order."""
    query = select(queue).where(queue.c.dataset_id == dataset.id).order_by(queue.c.id)
    return map(_item, connection.execute(query, execution_options={"yield_per": DELETE_BATCH}))


def _readable(
    connection: Connection, dataset: Dataset, tenant: TenantName, item_id: str, *whose: ColumnElement[bool]
) -> Row[Any]:
    """The row of an item that a tenant may read, or that is its own in some way; held, where something is written."""
    may = whose or (or_(queue.c.tenant == tenant, queue.c.recipient == tenant, queue.c.shared),)
    query = select(queue).where(queue.c.id == item_id, queue.c.dataset_id == dataset.id, *may)
    row = connection.execute(query.with_for_update() if whose else query).first()
    if row is None:
        raise QueueItemNotFound(f"there is no queue item {item_id!r}")
    return row


def _mark_dead(connection: Connection, dataset: Dataset, row: Row[Any], why: str) -> None:
    _failed(connection, dataset, row, QueueItemFailed(why), None, database_time(connection))


def _failed(
    connection: Connection, dataset: Dataset, row: Row[Any], error: TarnError, again: datetime | None, moment: datetime
) -> QueueItem:
    problem = error.problem(instance=f"/v1/datasets/{dataset.name}/queue/{row.id}").model_dump(mode="json")
    over: dict[str, Any] = {"state": QueueItemState.DEAD, "finished": moment} if again is None else {}
    return _change(connection, dataset, row.id, **_pending(again), **over, problem=problem)


def _pending(again: datetime | None) -> dict[str, Any]:
    return {"not_before": again, "token": None, "leased_until": None}


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
    """Change an item that is in the state that it was found in. Raises Settled if it is not, or is gone."""
    same = queue.c.id == item_id, queue.c.state == was
    row = connection.execute(update(queue).where(*same).values(**values).returning(queue)).first()
    if row is None:
        raise Settled
    item = _item(row)
    record_change(connection, dataset, item)
    return item


def _item(row: Row[Any]) -> QueueItem:
    return QueueItem.model_validate(dict(row._mapping) | {"to": row.recipient})
