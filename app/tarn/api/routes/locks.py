"""Lock routes: a tenant's own locks, and those of all tenants for administrators of the lake."""

from typing import Annotated

from fastapi import Query

from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep, DatasetDep
from tarn.api.http.routing import IdParam, router
from tarn.api.http.services.container import ServicesDep
from tarn.errors import Locked, LockLost, LockNotFound, QuotaExceeded
from tarn.model.names import LockName
from tarn.model.work.lock import AnyLock, HeldLock, Lock, NewLock, Token

routes = router("/v1/datasets/{dataset}/locks", "locks")
admin_routes = router("/v1/admin/locks", "admin")


class LockPage(Page[Lock]):
    """Locks, sorted by name."""


class AnyLockPage(Page[AnyLock]):
    """Locks of all tenants, sorted by id."""


@routes.get("")
def list_locks(services: ServicesDep, caller: CallerDep, dataset: DatasetDep, paging: PagingDep) -> LockPage:
    """List the caller's locks on a dataset that were not released."""
    locks = services.locks.page(dataset, caller.identity.tenant, paging.after, paging.fetch)
    results, cursor = paging.cut(locks, lambda lock: lock.name)
    return LockPage(results=results, next=cursor)


@routes.put("/{lock}", responses=raises(Locked, LockLost, QuotaExceeded))
def take_lock(services: ServicesDep, caller: CallerDep, dataset: DatasetDep, lock: LockName, new: NewLock) -> HeldLock:
    """Acquire a lock that is free or has expired; with its token, renew it."""
    return services.locks.take(dataset, caller.identity.tenant, lock, new, caller.act)


@routes.delete("/{lock}", status_code=204, responses=raises(LockLost))
def release_lock(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    lock: LockName,
    token: Annotated[Token, Query(description="The token that was returned when the lock was acquired.")],
) -> None:
    """Release a lock."""
    services.locks.release(dataset, caller.identity.tenant, lock, token, caller.act)


@admin_routes.get("")
def list_all_locks(services: ServicesDep, paging: PagingDep) -> AnyLockPage:
    """List the locks of all tenants that were not released."""
    locks = services.locks.page_of_all(paging.after, paging.fetch)
    results, cursor = paging.cut(locks, lambda lock: lock.id)
    return AnyLockPage(results=results, next=cursor)


@admin_routes.delete("/{lock}", responses=raises(LockNotFound))
def force_release_lock(services: ServicesDep, caller: CallerDep, lock: IdParam) -> AnyLock:
    """Release a lock of any tenant; its holder gets `lock-lost` when it renews it."""
    return services.locks.force_release(lock, caller.act)
