"""Tenants: made, changed, disabled, deleted. A deleted tenant's name is never given out again."""

from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from tarn.access.revision import bump
from tarn.coordination import webhooks
from tarn.db.tables import api_keys, grants, tenants
from tarn.errors import AlreadyExists, Forbidden, TenantNotFound
from tarn.model.ids import now
from tarn.model.names import TenantName
from tarn.model.tenant import ADMIN, NewTenant, Tenant, TenantChange


def create(connection: Connection, new: NewTenant) -> Tenant:
    """Add a tenant without keys or grants. Raises AlreadyExists, also for the name of a deleted one."""
    try:
        with connection.begin_nested():
            connection.execute(
                insert(tenants).values(
                    name=new.name,
                    title=new.title,
                    created=now(),
                    disabled=False,
                    used_statements=0,
                    used_bytes=0,
                )
            )
    except IntegrityError:
        taken = find(connection, new.name) is not None
        raise AlreadyExists(
            f"the tenant {new.name!r} exists"
            if taken
            else f"the name {new.name!r} belonged to a deleted tenant and is not given out again"
        ) from None
    bump(connection)
    return get(connection, new.name)


def get(connection: Connection, name: TenantName) -> Tenant:
    tenant = find(connection, name)
    if tenant is None:
        raise TenantNotFound(f"there is no tenant {name!r}")
    return tenant


def find(connection: Connection, name: str) -> Tenant | None:
    row = find_row(connection, name)
    return None if row is None else _tenant(row)


def find_row(connection: Connection, name: str) -> Row[Any] | None:
    """The whole row of a tenant, its limits included."""
    row: Row[Any] | None = connection.execute(_existing().where(tenants.c.name == name)).first()
    return row


def page(connection: Connection, after: str | None, limit: int) -> list[Tenant]:
    query = _existing().order_by(tenants.c.name).limit(limit)
    if after is not None:
        query = query.where(tenants.c.name > after)
    return [_tenant(row) for row in connection.execute(query)]


def change(connection: Connection, name: TenantName, wanted: TenantChange) -> Tenant:
    values = wanted.model_dump(exclude_none=True)
    if name == ADMIN and values.get("disabled"):
        raise Forbidden("the administrator's tenant cannot be disabled: nobody could enable it again")
    if values:
        connection.execute(update(tenants).where(tenants.c.name == name, tenants.c.deleted.is_(None)).values(**values))
        bump(connection)
    return get(connection, name)


def remove(connection: Connection, name: TenantName) -> None:
    """Delete a tenant with its keys, grants and webhook; what it wrote stays."""
    if name == ADMIN:
        raise Forbidden("the administrator's tenant cannot be deleted: nobody could administer the lake")
    get(connection, name)
    connection.execute(delete(api_keys).where(api_keys.c.tenant == name))
    connection.execute(delete(grants).where(grants.c.tenant == name))
    webhooks.remove(connection, name)
    connection.execute(update(tenants).where(tenants.c.name == name).values(deleted=now()))
    bump(connection)


def _existing() -> Any:
    return select(tenants).where(tenants.c.deleted.is_(None))


def _tenant(row: Row[Any]) -> Tenant:
    return Tenant.model_validate(row._mapping, from_attributes=True)
