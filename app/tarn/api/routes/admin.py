"""Administration: tenants, their keys, grants and limits, and the audit log."""

from typing import Annotated

from fastapi import Query

from tarn.access import audit, grants, keys, limits, tenants
from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep
from tarn.api.http.routing import IdParam, router
from tarn.api.http.services.container import ServicesDep
from tarn.db.workload import Work, at_work
from tarn.errors import AlreadyExists, Forbidden, GrantNotFound, KeyNotFound, TenantNotFound
from tarn.model.names import DatasetName, TenantName
from tarn.model.tenant import (
    AnyMoment,
    AuditEntry,
    CreatedKey,
    Grant,
    Key,
    Limits,
    NewGrant,
    NewKey,
    NewLimits,
    NewTenant,
    Outcome,
    Tenant,
    TenantChange,
)

routes = router("/v1/admin", "admin")

ID = r"^[A-Za-z0-9-]+$"
REQUEST = r"^[A-Za-z0-9._:-]{1,128}$"


class TenantPage(Page[Tenant]):
    """Tenants by name."""


class KeyPage(Page[Key]):
    """Keys of one tenant."""


class GrantPage(Page[Grant]):
    """Grants of one tenant, oldest first."""


class AuditPage(Page[AuditEntry]):
    """Audit entries, newest first."""


@routes.get("/worker")
def get_worker(house: ServicesDep) -> Work:
    """Show the workers, what waits in the journals, and the jobs that run or are kept, by what became of them."""
    with house.database.read() as connection:
        return at_work(connection)


@routes.get("/tenants")
def list_tenants(house: ServicesDep, paging: PagingDep) -> TenantPage:
    """List tenants."""
    with house.database.read() as connection:
        found = tenants.page(connection, paging.after, paging.fetch)
    results, cursor = paging.cut(found, lambda tenant: tenant.name)
    return TenantPage(results=results, next=cursor)


@routes.post("/tenants", status_code=201, responses=raises(AlreadyExists))
def create_tenant(house: ServicesDep, caller: CallerDep, new: NewTenant) -> Tenant:
    """Make a tenant, without keys or grants."""
    with house.database.write() as connection:
        tenant = tenants.create(connection, new)
        caller.act.done(connection, target=f"tenants/{tenant.name}")
    return tenant


@routes.get("/tenants/{tenant}", responses=raises(TenantNotFound))
def get_tenant(house: ServicesDep, tenant: TenantName) -> Tenant:
    """Show one tenant."""
    with house.database.read() as connection:
        return tenants.get(connection, tenant)


@routes.patch("/tenants/{tenant}", responses=raises(TenantNotFound))
def update_tenant(house: ServicesDep, caller: CallerDep, tenant: TenantName, change: TenantChange) -> Tenant:
    """Change a tenant's title, or disable and enable it."""
    with house.database.write() as connection:
        changed = tenants.change(connection, tenant, change)
        caller.act.done(connection, changed=sorted(change.model_fields_set))
    return changed


@routes.delete("/tenants/{tenant}", status_code=204, responses=raises(TenantNotFound))
def delete_tenant(house: ServicesDep, caller: CallerDep, tenant: TenantName) -> None:
    """Delete a tenant with its keys and grants. Its name is not given out again."""
    with house.database.write() as connection:
        tenants.remove(connection, tenant)
        caller.act.done(connection)


@routes.get("/tenants/{tenant}/keys", responses=raises(TenantNotFound))
def list_keys(house: ServicesDep, tenant: TenantName, paging: PagingDep) -> KeyPage:
    """List a tenant's keys, without their secrets."""
    with house.database.read() as connection:
        tenants.get(connection, tenant)
        found = keys.page(connection, tenant, paging.after, paging.fetch)
    results, cursor = paging.cut(found, lambda key: key.id)
    return KeyPage(results=results, next=cursor)


@routes.post("/tenants/{tenant}/keys", status_code=201, responses=raises(TenantNotFound))
def create_key(house: ServicesDep, caller: CallerDep, tenant: TenantName, new: NewKey) -> CreatedKey:
    """Make a key for a tenant. Its secret is in this answer and nowhere else."""
    with house.database.write() as connection:
        tenants.get(connection, tenant)
        created = keys.create(connection, tenant, new)
        caller.act.done(connection, target=f"keys/{created.id}", tenant=tenant)
    return created


@routes.delete("/keys/{key}", responses=raises(KeyNotFound))
def revoke_key(house: ServicesDep, caller: CallerDep, key: IdParam) -> Key:
    """Revoke a key, at once."""
    with house.database.write() as connection:
        revoked = keys.revoke(connection, key)
        caller.act.done(connection, tenant=revoked.tenant)
    return revoked


@routes.get("/tenants/{tenant}/grants", responses=raises(TenantNotFound))
def list_grants(house: ServicesDep, tenant: TenantName, paging: PagingDep) -> GrantPage:
    """List a tenant's grants."""
    with house.database.read() as connection:
        tenants.get(connection, tenant)
        found = grants.page(connection, tenant, paging.after, paging.fetch)
    results, cursor = paging.cut(found, lambda grant: grant.id)
    return GrantPage(results=results, next=cursor)


@routes.post("/tenants/{tenant}/grants", status_code=201, responses=raises(TenantNotFound, AlreadyExists))
def create_grant(house: ServicesDep, caller: CallerDep, tenant: TenantName, new: NewGrant) -> Grant:
    """Grant a tenant a level on the datasets that a pattern matches."""
    with house.database.write() as connection:
        tenants.get(connection, tenant)
        grant = grants.create(connection, tenant, new)
        caller.act.done(connection, target=f"grants/{grant.id}", tenant=tenant, dataset=new.dataset, level=new.level)
    return grant


@routes.delete("/grants/{grant}", status_code=204, responses=raises(GrantNotFound, Forbidden))
def delete_grant(house: ServicesDep, caller: CallerDep, grant: IdParam) -> None:
    """Take a grant back, at once."""
    with house.database.write() as connection:
        removed = grants.remove(connection, grant)
        caller.act.done(connection, tenant=removed.tenant, dataset=removed.dataset, level=removed.level)


@routes.get("/tenants/{tenant}/limits", responses=raises(TenantNotFound))
def get_limits(house: ServicesDep, tenant: TenantName) -> Limits:
    """Show the limits in force for a tenant, and what it has used."""
    with house.database.read() as connection:
        return limits.of(connection, tenant, house.settings)


@routes.put("/tenants/{tenant}/limits", responses=raises(TenantNotFound))
def set_limits(house: ServicesDep, caller: CallerDep, tenant: TenantName, new: NewLimits) -> Limits:
    """Replace a tenant's own limits; what is left out or null is the server's default."""
    with house.database.write() as connection:
        tenants.get(connection, tenant)
        limits.set_limits(connection, tenant, new)
        caller.act.done(connection, **new.model_dump())
        return limits.of(connection, tenant, house.settings)


@routes.get("/audit")
def list_audit(
    house: ServicesDep,
    paging: PagingDep,
    tenant: Annotated[TenantName | None, Query(description="Who did it.")] = None,
    key: Annotated[str | None, Query(max_length=36, pattern=ID, description="By which key, or with which.")] = None,
    action: Annotated[str | None, Query(max_length=64, pattern=r"^[a-z_]+$", description="An operationId.")] = None,
    outcome: Annotated[Outcome | None, Query(description="`done` or `denied`.")] = None,
    dataset: Annotated[DatasetName | None, Query(description="To which dataset.")] = None,
    request: Annotated[str | None, Query(pattern=REQUEST, description="In which request, by its id.")] = None,
    since: Annotated[AnyMoment | None, Query(description="At this moment or later.")] = None,
    until: Annotated[AnyMoment | None, Query(description="Before this moment.")] = None,
) -> AuditPage:
    """List what was written and what was refused, newest first.

    Refusals of one kind are one entry a minute: `detail.count` says how many they were.
    """
    wanted = audit.AuditFilter(
        tenant=tenant,
        key=key,
        action=action,
        outcome=outcome,
        dataset=dataset,
        request=request,
        since=since,
        until=until,
    )
    with house.database.read() as connection:
        found = audit.page(connection, wanted, paging.after, paging.fetch)
    results, cursor = paging.cut(found, lambda entry: entry.id)
    return AuditPage(results=results, next=cursor)
