"""Grants: (tenant, dataset pattern, level)."""

from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select
from sqlalchemy.exc import IntegrityError

from tarn.access.audit import AuditedAction
from tarn.access.revision import bump
from tarn.access.tenants import get as get_tenant
from tarn.db.engine import Database
from tarn.db.tables import grants, tenants
from tarn.errors import AlreadyExists, Forbidden, GrantNotFound
from tarn.model.ids import new_id, now
from tarn.model.names import DatasetPattern, TenantName
from tarn.model.tenant import ADMIN, Grant, Level, NewGrant


class GrantService:
    """Lists, creates and revokes grants. Each change and its audit record are one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def page(self, tenant: TenantName, after: str | None, limit: int) -> list[Grant]:
        """Return a tenant's grants, oldest first. Raises TenantNotFound."""
        query = select(grants).where(grants.c.tenant == tenant).order_by(grants.c.id).limit(limit)
        if after is not None:
            query = query.where(grants.c.id > after)
        with self._database.read() as connection:
            get_tenant(connection, tenant)
            return [_grant(row) for row in connection.execute(query)]

    def create(self, tenant: TenantName, new: NewGrant, act: AuditedAction) -> Grant:
        """Create a grant. Raises TenantNotFound, AlreadyExists."""
        with self._database.write() as connection:
            get_tenant(connection, tenant)
            grant = create(connection, tenant, new)
            target = f"grants/{grant.id}"
            act.done(connection, target=target, tenant=tenant, dataset=new.dataset, level=new.level)
        return grant

    def revoke(self, grant_id: str, act: AuditedAction) -> None:
        """Revoke a grant with immediate effect. Raises GrantNotFound, and Forbidden for the administrator's own."""
        with self._database.write() as connection:
            grant = _get(connection, grant_id)
            if grant.tenant == ADMIN and grant.dataset == "*" and grant.level is Level.ADMIN:
                raise Forbidden(
                    "the administrator's own grant cannot be deleted: without it the lake has no administrator"
                )
            connection.execute(delete(grants).where(grants.c.id == grant_id))
            bump(connection)
            act.done(connection, tenant=grant.tenant, dataset=grant.dataset, level=grant.level)


def create(connection: Connection, tenant: TenantName, new: NewGrant) -> Grant:
    """Create a grant in the caller's transaction. Raises AlreadyExists."""
    grant_id = new_id()
    try:
        with connection.begin_nested():
            connection.execute(
                insert(grants).values(id=grant_id, tenant=tenant, dataset=new.dataset, level=new.level, created=now())
            )
    except IntegrityError:
        raise AlreadyExists(f"{tenant!r} has {new.level} on {new.dataset!r} already") from None
    bump(connection)
    return _get(connection, grant_id)


def is_known_on(connection: Connection, tenant: TenantName, dataset: str) -> bool:
    """Return whether the tenant exists and has a grant on the dataset."""
    held = select(grants.c.dataset).join(tenants, tenants.c.name == grants.c.tenant)
    patterns = connection.execute(held.where(grants.c.tenant == tenant, tenants.c.deleted.is_(None))).scalars()
    return any(DatasetPattern(pattern).matches(dataset) for pattern in patterns)


def held_by(connection: Connection, tenant: str) -> tuple[tuple[DatasetPattern, Level], ...]:
    """Return the dataset patterns and levels that a tenant was granted."""
    rows = connection.execute(select(grants.c.dataset, grants.c.level).where(grants.c.tenant == tenant))
    return tuple((DatasetPattern(dataset), Level(level)) for dataset, level in rows)


def _get(connection: Connection, grant_id: str) -> Grant:
    row = connection.execute(select(grants).where(grants.c.id == grant_id)).first()
    if row is None:
        raise GrantNotFound(f"there is no grant {grant_id!r}")
    return _grant(row)


def _grant(row: Row[Any]) -> Grant:
    return Grant.model_validate(row._mapping, from_attributes=True)
