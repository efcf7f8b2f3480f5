"""Named locks of tenants: leases that are taken, refreshed, given back, taken over after their time, or taken away.

Whether one has expired is said by the database's clock. What a lock guards must look at the fence, and refuse a lower
number than it has seen: a holder that was paused past its expiry does not know yet.
"""

import math
import secrets
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import ColumnElement, Connection, Row, func, or_, select, update

from tarn.datasets.registry import Dataset, lock_active
from tarn.db.database_clock import database_time
from tarn.db.tables import datasets, locks
from tarn.db.upsert import upsert
from tarn.errors import Locked, LockLost, LockNotFound, QuotaExceeded, TarnError
from tarn.model.ids import new_id
from tarn.model.lock import AnyLock, HeldLock, Lock, NewLock
from tarn.model.names import LockName, TenantName
from tarn.model.statement import EPOCH
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

MAX_NAMES = 1_000
"""Names that a tenant locks on one dataset, at most: each is kept, for the sake of its number."""


def page(connection: Connection, dataset: Dataset, tenant: TenantName, after: str | None, limit: int) -> list[Lock]:
    """A tenant's locks that were not given back, by name."""
    query = select(locks).where(*_of(dataset, tenant), locks.c.token.is_not(None))
    if after is not None:
        query = query.where(locks.c.name > after)
    return [Lock.model_validate(row._mapping) for row in connection.execute(query.order_by(locks.c.name).limit(limit))]


def take(connection: Connection, dataset: Dataset, tenant: TenantName, name: LockName, new: NewLock) -> HeldLock:
    """Take a lock that is free or has expired. Raises Locked, with its holder, and QuotaExceeded."""
    lock_active(connection, dataset)
    moment = database_time(connection)
    values = {
        "token": secrets.token_urlsafe(24),
        "holder": new.holder,
        "taken": moment,
        "expires": moment + timedelta(seconds=new.ttl),
    }
    free = or_(locks.c.token.is_(None), locks.c.expires <= moment)
    row = connection.execute(
        update(locks)
        .where(*_named(dataset, tenant, name), free)
        .values(fence=locks.c.fence + 1, **values)
        .returning(locks)
    ).first()
    if row is None:
        row = _first(connection, dataset, tenant, name, moment, values)
    return HeldLock.model_validate(row._mapping)


def _refresh(connection: Connection, dataset: Dataset, tenant: TenantName, name: LockName, new: NewLock) -> HeldLock:
    """Hold a lock on. One that has expired, and that nobody has taken, is held again. Raises LockLost."""
    until = database_time(connection) + timedelta(seconds=new.ttl)
    own = *_named(dataset, tenant, name), locks.c.token == new.token
    row = connection.execute(update(locks).where(*own).values(expires=until).returning(locks)).first()
    if row is None:
        raise _lost(name)
    return HeldLock.model_validate(row._mapping)


def release(connection: Connection, dataset: Dataset, tenant: TenantName, name: LockName, token: str) -> None:
    """Give a lock back. Raises LockLost."""
    # The row stays, so that fences go on rising.
    own = *_named(dataset, tenant, name), locks.c.token == token
    if connection.execute(update(locks).where(*own).values(token=None, expires=EPOCH)).rowcount != 1:
        raise _lost(name)


def page_of_all(connection: Connection, after: str | None, limit: int) -> list[AnyLock]:
    """Everybody's locks that were not given back, by id."""
    query = _of_all().where(locks.c.token.is_not(None))
    if after is not None:
        query = query.where(locks.c.id > after)
    return [AnyLock.model_validate(row._mapping) for row in connection.execute(query.order_by(locks.c.id).limit(limit))]


def take_away(connection: Connection, lock_id: str) -> tuple[Dataset, AnyLock]:
    """Free a lock, whoever holds it: its token is worth nothing from now on. Raises LockNotFound."""
    held = locks.c.id == lock_id, locks.c.token.is_not(None)
    row = connection.execute(_of_all().where(*held).with_for_update(of=locks)).first()
    if row is None:
        raise LockNotFound(f"there is no lock {lock_id!r} that is held")
    connection.execute(update(locks).where(locks.c.id == lock_id).values(token=None, expires=EPOCH))
    freed = AnyLock.model_validate(row._mapping)
    return Dataset(row.dataset_id, freed.dataset), freed


def mirror(store: Store, dataset: Dataset, tenant: TenantName, name: LockName, lock: HeldLock | None) -> None:
    """Mirror a lock without its token, or its absence, after the fact: whether that works changes nothing."""
    path = dataset.layout.named_lock(tenant, name)
    try:
        if lock is None:
            store.delete([path])
        else:
            store.put_hint(path, lock.model_dump_json(exclude={"token"}).encode())
    except TarnError as error:
        log.warning("a lock is not shown in the layout", dataset=dataset.name, problem=error.slug)


def _first(
    connection: Connection,
    dataset: Dataset,
    tenant: TenantName,
    name: LockName,
    moment: datetime,
    values: dict[str, Any],
) -> Row[Any]:
    """The row of a name that nobody has locked before. Raises Locked if somebody has, meanwhile or all along."""
    count = connection.execute(select(func.count()).select_from(locks).where(*_of(dataset, tenant))).scalar_one()
    own = {"dataset_id": dataset.id, "tenant": tenant, "name": name, "id": new_id(), "fence": 1}
    row = connection.execute(
        upsert(connection, locks).values(**own, **values).on_conflict_do_nothing().returning(locks)
    ).first()
    if row is not None:
        if count >= MAX_NAMES:
            raise QuotaExceeded(f"tenant {tenant!r} has locked {count} names on {dataset.name!r}", retry_after=60)
        return row
    holder = connection.execute(select(locks).where(*_named(dataset, tenant, name))).one()
    left = max(1, math.ceil((holder.expires - moment).total_seconds()))
    raise Locked(f"{name!r} is held for another {left} s", holder=holder.holder, retry_after=left)


def _of(dataset: Dataset, tenant: TenantName) -> tuple[ColumnElement[bool], ...]:
    return locks.c.dataset_id == dataset.id, locks.c.tenant == tenant


def _named(dataset: Dataset, tenant: TenantName, name: LockName) -> tuple[ColumnElement[bool], ...]:
    return *_of(dataset, tenant), locks.c.name == name


def _of_all() -> Any:
    return select(locks, datasets.c.name.label("dataset")).join(datasets, datasets.c.id == locks.c.dataset_id)


def _lost(name: LockName) -> LockLost:
    return LockLost(f"{name!r} is not held under this token: it was given back, taken away, or taken by another")
