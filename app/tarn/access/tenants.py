"""Tenants: create, change, disable and delete. The name of a deleted tenant is never reused."""

from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from tarn.access.audit import AuditedAction
from tarn.access.revision import bump
from tarn.db.engine import Database
from tarn.db.tables import api_keys, grants, tenants, webhook_cursors, webhooks
from tarn.errors import AlreadyExists, Forbidden, TenantNotFound
from tarn.model.ids import now
from tarn.model.names import TenantName
from tarn.model.tenant import ADMIN, NewTenant, Tenant, TenantChange


class TenantService:
    """Reads and changes tenants. Each change and its audit record are one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def page(self, after: str | None, limit: int) -> list[Tenant]:
        """Return tenants, sorted by name."""
        query = _existing().order_by(tenants.c.name).limit(limit)
        if after is not None:
            query = query.where(tenants.c.name > after)
        with self._database.read() as connection:
            return [_tenant(row) for row in connection.execute(query)]

    def get(self, name: TenantName) -> Tenant:
        """Return a tenant. Raises TenantNotFound."""
        with self._database.read() as connection:
            return get(connection, name)

    def create(self, new: NewTenant, act: AuditedAction) -> Tenant:
        """Create a tenant without keys or grants. Raises AlreadyExists, also for the name of a deleted tenant."""
        with self._database.write() as connection:
            tenant = create(connection, new)
            act.done(connection, target=f"tenants/{tenant.name}")
        return tenant

    def change(self, name: TenantName, requested: TenantChange, act: AuditedAction) -> Tenant:
        """Change the fields of a tenant that are set.

        Raises TenantNotFound, and Forbidden to disable the administrator's tenant.
        """
        values = requested.model_dump(exclude_none=True)
        if name == ADMIN and values.get("disabled"):
            raise Forbidden("the administrator's tenant cannot be disabled: it could not be enabled again")
        with self._database.write() as connection:
            if values:
                existing = tenants.c.name == name, tenants.c.deleted.is_(None)
                connection.execute(update(tenants).where(*existing).values(**values))
                bump(connection)
            tenant = get(connection, name)
            act.done(connection, changed=sorted(requested.model_fields_set))
        return tenant

    def delete(self, name: TenantName, act: AuditedAction) -> None:
        """Delete a tenant with its keys, grants and webhook; data that it wrote is kept.

        Raises TenantNotFound, and Forbidden for the administrator's tenant.
        """
        if name == ADMIN:
            raise Forbidden("the administrator's tenant cannot be deleted: without it the lake has no administrator")
        with self._database.write() as connection:
            get(connection, name)
            for table in (api_keys, grants, webhook_cursors, webhooks):
                connection.execute(delete(table).where(table.c.tenant == name))
            connection.execute(update(tenants).where(tenants.c.name == name).values(deleted=now()))
            bump(connection)
            act.done(connection)


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
        exists = find(connection, new.name) is not None
        raise AlreadyExists(
            f"the tenant {new.name!r} exists"
            if exists
            else f"the name {new.name!r} belonged to a deleted tenant and is not reused"
        ) from None
    bump(connection)
    return get(connection, new.name)


def get(connection: Connection, name: TenantName) -> Tenant:
    """Return a tenant. Raises TenantNotFound."""
    tenant = find(connection, name)
    if tenant is None:
        raise TenantNotFound(f"there is no tenant {name!r}")
    return tenant


def find(connection: Connection, name: str) -> Tenant | None:
    """Return a tenant, or None."""
    row = find_row(connection, name)
    return None if row is None else _tenant(row)


def find_row(connection: Connection, name: str) -> Row[Any] | None:
    """Return the row of a tenant, including its limits; None if it does not exist."""
    row: Row[Any] | None = connection.execute(_existing().where(tenants.c.name == name)).first()
    return row


def _existing() -> Any:
    return select(tenants).where(tenants.c.deleted.is_(None))


def _tenant(row: Row[Any]) -> Tenant:
    return Tenant.model_validate(row._mapping, from_attributes=True)
