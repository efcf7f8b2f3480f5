"""Named locks of tenants: leases with fencing numbers. Acquire, refresh, release and revoke.

Expiry is determined by the database's clock; an expired lock can be acquired by another holder. The resource that a
lock protects must check the fence and reject a lower number than it has seen, because a holder that was paused past its
expiry does not know that it lost the lock.
"""

import math
import secrets
from datetime import timedelta
from typing import Any

import structlog
from sqlalchemy import ColumnElement, Connection, func, select, update

from tarn.access.audit import AuditedAction
from tarn.datasets.registry import Dataset, lock_active
from tarn.db.database_clock import database_time
from tarn.db.engine import Database
from tarn.db.lease import LeaseColumns
from tarn.db.tables import datasets, locks
from tarn.errors import Locked, LockLost, LockNotFound, QuotaExceeded, TarnError
from tarn.model.ids import new_id
from tarn.model.names import LockName, TenantName
from tarn.model.work.lock import AnyLock, HeldLock, Lock, NewLock
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

MAX_NAMES = 1_000
"""Maximum number of names that a tenant locks on one dataset. Each row is kept, so that its fence keeps rising."""

LEASE = LeaseColumns(holder=locks.c.token, expires=locks.c.expires, number=locks.c.fence)
"""A holder proves a lock with its secret token; the column `holder` only describes it."""


class LockService:
    """Reads and changes locks. Each change and its audit record are one transaction; the mirror follows it."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store

    def page(self, dataset: Dataset, tenant: TenantName, after: str | None, limit: int) -> list[Lock]:
        """Return a tenant's locks that were not released, sorted by name."""
        query = select(locks).where(*_of(dataset, tenant), locks.c.token.is_not(None))
        if after is not None:
            query = query.where(locks.c.name > after)
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(locks.c.name).limit(limit))
            return [Lock.model_validate(row._mapping) for row in rows]

    def page_of_all(self, after: str | None, limit: int) -> list[AnyLock]:
        """Return the locks of all tenants that were not released, sorted by id."""
        query = _of_all().where(locks.c.token.is_not(None))
        if after is not None:
            query = query.where(locks.c.id > after)
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(locks.c.id).limit(limit))
            return [AnyLock.model_validate(row._mapping) for row in rows]

    def take(self, dataset: Dataset, tenant: TenantName, name: LockName, new: NewLock, act: AuditedAction) -> HeldLock:
        """Acquire a lock that is free or has expired; with its token, extend it.

        Raises Locked, LockLost, QuotaExceeded.
        """
        with self._database.write() as connection:
            take = _acquire if new.token is None else _refresh
            lock = take(connection, dataset, tenant, name, new)
            act.done(connection, fence=lock.fence, ttl=new.ttl)
        mirror(self._store, dataset, tenant, name, lock)
        return lock

    def release(self, dataset: Dataset, tenant: TenantName, name: LockName, token: str, act: AuditedAction) -> None:
        """Release a lock. Raises LockLost."""
        with self._database.write() as connection:
            released = LEASE.release(token).where(*_named(dataset, tenant, name))
            if connection.execute(released).rowcount != 1:
                raise _lost(name)
            act.done(connection)
        mirror(self._store, dataset, tenant, name, None)

    def force_release(self, lock_id: str, act: AuditedAction) -> AnyLock:
        """Release a lock regardless of its holder, and invalidate its token. Raises LockNotFound."""
        condition = locks.c.id == lock_id, locks.c.token.is_not(None)
        with self._database.write() as connection:
            row = connection.execute(_of_all().where(*condition).with_for_update(of=locks)).first()
            if row is None:
                raise LockNotFound(f"there is no lock {lock_id!r} that is held")
            connection.execute(update(locks).where(locks.c.id == lock_id).values(LEASE.released))
            lock = AnyLock.model_validate(row._mapping)
            act.done(connection, dataset=lock.dataset, tenant=lock.tenant, name=lock.name, fence=lock.fence)
        mirror(self._store, Dataset(row.dataset_id, lock.dataset), lock.tenant, lock.name, None)
        return lock


def _acquire(connection: Connection, dataset: Dataset, tenant: TenantName, name: LockName, new: NewLock) -> HeldLock:
    """Acquire a lock that is free or expired. Raises Locked, with its holder, and QuotaExceeded."""
    lock_active(connection, dataset)
    moment = database_time(connection)
    token, until = secrets.token_urlsafe(24), moment + timedelta(seconds=new.ttl)
    values = {"holder": new.holder, "taken": moment}
    condition = _named(dataset, tenant, name)
    acquired = LEASE.acquire(token, moment, until).where(*condition).values(values)
    row = connection.execute(acquired.returning(locks)).first()
    if row is None:
        key = {"dataset_id": dataset.id, "tenant": tenant, "name": name, "id": new_id()}
        row = LEASE.create(connection, token, until, key | values)
        if row is not None:
            _check_number_of_names(connection, dataset, tenant)
    if row is None:
        other = connection.execute(select(locks).where(*condition)).one()
        seconds_left = max(1, math.ceil((other.expires - moment).total_seconds()))
        raise Locked(f"{name!r} is held for another {seconds_left} s", holder=other.holder, retry_after=seconds_left)
    return HeldLock.model_validate(row._mapping)


def _refresh(connection: Connection, dataset: Dataset, tenant: TenantName, name: LockName, new: NewLock) -> HeldLock:
    """Extend a lock, even if it has expired, unless another holder acquired it. Raises LockLost."""
    assert new.token is not None, "a request without a token acquires the lock"
    until = database_time(connection) + timedelta(seconds=new.ttl)
    renewed = LEASE.renew(new.token, until).where(*_named(dataset, tenant, name))
    row = connection.execute(renewed.returning(locks)).first()
    if row is None:
        raise _lost(name)
    return HeldLock.model_validate(row._mapping)


def mirror(store: Store, dataset: Dataset, tenant: TenantName, name: LockName, lock: HeldLock | None) -> None:
    """Mirror a lock (without its token) or its absence to the layout after the commit; errors are only logged."""
    path = dataset.layout.named_lock(tenant, name)
    try:
        if lock is None:
            store.delete([path])
        else:
            store.put_hint(path, lock.model_dump_json(exclude={"token"}).encode())
    except TarnError as error:
        log.warning("cannot mirror a lock to the layout", dataset=dataset.name, problem=error.slug)


def _check_number_of_names(connection: Connection, dataset: Dataset, tenant: TenantName) -> None:
    """Raise QuotaExceeded if a tenant has locked too many names, the new one included."""
    count = connection.execute(select(func.count()).select_from(locks).where(*_of(dataset, tenant))).scalar_one()
    if count > MAX_NAMES:
        raise QuotaExceeded(f"tenant {tenant!r} has locked {count - 1} names on {dataset.name!r}", retry_after=60)


def _of(dataset: Dataset, tenant: TenantName) -> tuple[ColumnElement[bool], ...]:
    return locks.c.dataset_id == dataset.id, locks.c.tenant == tenant


def _named(dataset: Dataset, tenant: TenantName, name: LockName) -> tuple[ColumnElement[bool], ...]:
    return *_of(dataset, tenant), locks.c.name == name


def _of_all() -> Any:
    return select(locks, datasets.c.name.label("dataset")).join(datasets, datasets.c.id == locks.c.dataset_id)


def _lost(name: LockName) -> LockLost:
    return LockLost(f"{name!r} is not held under this token: it was released, revoked, or acquired by another holder")
