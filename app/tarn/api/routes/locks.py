"""Locks: the caller's own, and everybody's for the lake's administrator."""

from typing import Annotated

from fastapi import Query

from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep, DatasetDep
from tarn.api.http.routing import IdParam, router
from tarn.api.http.services.container import ServicesDep
from tarn.coordination import locks
from tarn.errors import Locked, LockLost, LockNotFound, QuotaExceeded
from tarn.model.lock import AnyLock, HeldLock, Lock, NewLock, Token
from tarn.model.names import LockName

routes = router("/v1/datasets/{dataset}/locks", "locks")
admin_routes = router("/v1/admin/locks", "admin")


class LockPage(Page[Lock]):
    """Locks by name."""


class AnyLockPage(Page[AnyLock]):
    """Locks of everybody, oldest name first."""


@routes.get("")
def list_locks(house: ServicesDep, caller: CallerDep, dataset: DatasetDep, paging: PagingDep) -> LockPage:
    """List the caller's locks on a dataset that were not given back."""
    with house.database.read() as connection:
        found = locks.page(connection, dataset, caller.identity.tenant, paging.after, paging.fetch)
    results, cursor = paging.cut(found, lambda lock: lock.name)
    return LockPage(results=results, next=cursor)


@routes.put("/{lock}", responses=raises(Locked, LockLost, QuotaExceeded))
def take_lock(house: ServicesDep, caller: CallerDep, dataset: DatasetDep, lock: LockName, new: NewLock) -> HeldLock:
    """Take a lock that is free or has expired; with its token, hold it on."""
    tenant = caller.identity.tenant
    with house.database.write() as connection:
        act = locks.take if new.token is None else locks._refresh
        held = act(connection, dataset, tenant, lock, new)
        caller.act.done(connection, fence=held.fence, ttl=new.ttl)
    locks.mirror(house.store, dataset, tenant, lock, held)
    return held


@routes.delete("/{lock}", status_code=204, responses=raises(LockLost))
def release_lock(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    lock: LockName,
    token: Annotated[Token, Query(description="What its holder got when it took it.")],
) -> None:
    """Give a lock back."""
    tenant = caller.identity.tenant
    with house.database.write() as connection:
        locks.release(connection, dataset, tenant, lock, token)
        caller.act.done(connection)
    locks.mirror(house.store, dataset, tenant, lock, None)


@admin_routes.get("")
def list_all_locks(house: ServicesDep, paging: PagingDep) -> AnyLockPage:
    """List the locks of all tenants that were not given back."""
    with house.database.read() as connection:
        found = locks.page_of_all(connection, paging.after, paging.fetch)
    results, cursor = paging.cut(found, lambda lock: lock.id)
    return AnyLockPage(results=results, next=cursor)


@admin_routes.delete("/{lock}", responses=raises(LockNotFound))
def force_release_lock(house: ServicesDep, caller: CallerDep, lock: IdParam) -> AnyLock:
    """Free a lock, whoever holds it; its holder finds out when it refreshes it."""
    with house.database.write() as connection:
        dataset, freed = locks.take_away(connection, lock)
        caller.act.done(connection, dataset=dataset.name, tenant=freed.tenant, name=freed.name, fence=freed.fence)
    locks.mirror(house.store, dataset, freed.tenant, freed.name, None)
    return freed
