"""Administration routes: tenants, keys, grants, limits, the audit log and worker status."""

from typing import Annotated

from fastapi import Query

from tarn.access.audit import AuditFilter
from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep
from tarn.api.http.routing import IdParam, router
from tarn.api.http.services.container import ServicesDep
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
from tarn.model.work.workload import Work

routes = router("/v1/admin", "admin")

ID = r"^[A-Za-z0-9-]+$"
REQUEST = r"^[A-Za-z0-9._:-]{1,128}$"


class TenantPage(Page[Tenant]):
    """Tenants, sorted by name."""


class KeyPage(Page[Key]):
    """Keys of one tenant."""


class GrantPage(Page[Grant]):
    """Grants of one tenant, oldest first."""


class AuditPage(Page[AuditEntry]):
    """Audit entries, newest first."""


@routes.get("/worker")
def get_worker(services: ServicesDep) -> Work:
    """Get the status of the workers, the journals, the running jobs, and the number of jobs by state."""
    return services.workload.workload()


@routes.get("/tenants")
def list_tenants(services: ServicesDep, paging: PagingDep) -> TenantPage:
    """List tenants."""
    tenants = services.tenants.page(paging.after, paging.fetch)
    results, cursor = paging.cut(tenants, lambda tenant: tenant.name)
    return TenantPage(results=results, next=cursor)


@routes.post("/tenants", status_code=201, responses=raises(AlreadyExists))
def create_tenant(services: ServicesDep, caller: CallerDep, new: NewTenant) -> Tenant:
    """Create a tenant without keys or grants."""
    return services.tenants.create(new, caller.act)


@routes.get("/tenants/{tenant}", responses=raises(TenantNotFound))
def get_tenant(services: ServicesDep, tenant: TenantName) -> Tenant:
    """Get a tenant."""
    return services.tenants.get(tenant)


@routes.patch("/tenants/{tenant}", responses=raises(TenantNotFound))
def update_tenant(services: ServicesDep, caller: CallerDep, tenant: TenantName, change: TenantChange) -> Tenant:
    """Update a tenant's title, or disable or enable it."""
    return services.tenants.change(tenant, change, caller.act)


@routes.delete("/tenants/{tenant}", status_code=204, responses=raises(TenantNotFound))
def delete_tenant(services: ServicesDep, caller: CallerDep, tenant: TenantName) -> None:
    """Delete a tenant with its keys and grants. Its name cannot be used again."""
    services.tenants.delete(tenant, caller.act)


@routes.get("/tenants/{tenant}/keys", responses=raises(TenantNotFound))
def list_keys(services: ServicesDep, tenant: TenantName, paging: PagingDep) -> KeyPage:
    """List a tenant's keys, without their secrets."""
    keys = services.keys.page(tenant, paging.after, paging.fetch)
    results, cursor = paging.cut(keys, lambda key: key.id)
    return KeyPage(results=results, next=cursor)


@routes.post("/tenants/{tenant}/keys", status_code=201, responses=raises(TenantNotFound))
def create_key(services: ServicesDep, caller: CallerDep, tenant: TenantName, new: NewKey) -> CreatedKey:
    """Create a key for a tenant. Only this response contains its secret."""
    return services.keys.create(tenant, new, caller.act)


@routes.delete("/keys/{key}", responses=raises(KeyNotFound))
def revoke_key(services: ServicesDep, caller: CallerDep, key: IdParam) -> Key:
    """Revoke a key, with immediate effect."""
    return services.keys.revoke(key, caller.act)


@routes.get("/tenants/{tenant}/grants", responses=raises(TenantNotFound))
def list_grants(services: ServicesDep, tenant: TenantName, paging: PagingDep) -> GrantPage:
    """List a tenant's grants."""
    grants = services.grants.page(tenant, paging.after, paging.fetch)
    results, cursor = paging.cut(grants, lambda grant: grant.id)
    return GrantPage(results=results, next=cursor)


@routes.post("/tenants/{tenant}/grants", status_code=201, responses=raises(TenantNotFound, AlreadyExists))
def create_grant(services: ServicesDep, caller: CallerDep, tenant: TenantName, new: NewGrant) -> Grant:
    """Create a grant: a level for a tenant on the datasets that a pattern matches."""
    return services.grants.create(tenant, new, caller.act)


@routes.delete("/grants/{grant}", status_code=204, responses=raises(GrantNotFound, Forbidden))
def delete_grant(services: ServicesDep, caller: CallerDep, grant: IdParam) -> None:
    """Revoke a grant, with immediate effect."""
    services.grants.revoke(grant, caller.act)


@routes.get("/tenants/{tenant}/limits", responses=raises(TenantNotFound))
def get_limits(services: ServicesDep, tenant: TenantName) -> Limits:
    """Get a tenant's effective limits and its usage."""
    return services.limits.get(tenant)


@routes.put("/tenants/{tenant}/limits", responses=raises(TenantNotFound))
def set_limits(services: ServicesDep, caller: CallerDep, tenant: TenantName, new: NewLimits) -> Limits:
    """Replace a tenant's limits; omitted or null limits are the server's defaults."""
    return services.limits.replace(tenant, new, caller.act)


@routes.get("/audit")
def list_audit(
    services: ServicesDep,
    paging: PagingDep,
    tenant: Annotated[TenantName | None, Query(description="The tenant that acted.")] = None,
    key: Annotated[
        str | None,
        Query(max_length=36, pattern=ID, description="The id of the key that was used, or that was acted on."),
    ] = None,
    action: Annotated[
        str | None, Query(max_length=64, pattern=r"^[a-z_]+$", description="The operationId of the request.")
    ] = None,
    outcome: Annotated[Outcome | None, Query(description="`done` or `denied`.")] = None,
    dataset: Annotated[DatasetName | None, Query(description="The dataset that was acted on.")] = None,
    request: Annotated[str | None, Query(pattern=REQUEST, description="The request id.")] = None,
    since: Annotated[AnyMoment | None, Query(description="At this time or later.")] = None,
    until: Annotated[AnyMoment | None, Query(description="Before this time.")] = None,
) -> AuditPage:
    """List the audit log, newest first: successful writes and denied requests.

    Equal denials within a minute are one entry: `detail.count` is their number.
    """
    criteria = AuditFilter(
        tenant=tenant,
        key=key,
        action=action,
        outcome=outcome,
        dataset=dataset,
        request=request,
        since=since,
        until=until,
    )
    entries = services.audit.page(criteria, paging.after, paging.fetch)
    results, cursor = paging.cut(entries, lambda entry: entry.id)
    return AuditPage(results=results, next=cursor)
