"""Grants: (tenant, dataset pattern, level)."""

from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select
from sqlalchemy.exc import IntegrityError

from tarn.access.revision import bump
from tarn.db.tables import grants, tenants
from tarn.errors import AlreadyExists, Forbidden, GrantNotFound
from tarn.model.ids import new_id, now
from tarn.model.names import DatasetPattern, TenantName
from tarn.model.tenant import ADMIN, Grant, Level, NewGrant


def create(connection: Connection, tenant: TenantName, new: NewGrant) -> Grant:
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


def _get(connection: Connection, grant_id: str) -> Grant:
    row = connection.execute(select(grants).where(grants.c.id == grant_id)).first()
    if row is None:
        raise GrantNotFound(f"there is no grant {grant_id!r}")
    return _grant(row)


def page(connection: Connection, tenant: TenantName, after: str | None, limit: int) -> list[Grant]:
    query = select(grants).where(grants.c.tenant == tenant).order_by(grants.c.id).limit(limit)
    if after is not None:
        query = query.where(grants.c.id > after)
    return [_grant(row) for row in connection.execute(query)]


def is_known_on(connection: Connection, tenant: TenantName, dataset: str) -> bool:
    """Whether there is such a tenant, and a dataset exists for it."""
    held = select(grants.c.dataset).join(tenants, tenants.c.name == grants.c.tenant)
    patterns = connection.execute(held.where(grants.c.tenant == tenant, tenants.c.deleted.is_(None))).scalars()
    return any(DatasetPattern(pattern).matches(dataset) for pattern in patterns)


def held_by(connection: Connection, tenant: str) -> tuple[tuple[DatasetPattern, Level], ...]:
    """What a tenant holds, and on which datasets."""
    rows = connection.execute(select(grants.c.dataset, grants.c.level).where(grants.c.tenant == tenant))
    return tuple((DatasetPattern(dataset), Level(level)) for dataset, level in rows)


def remove(connection: Connection, grant_id: str) -> Grant:
    grant = _get(connection, grant_id)
    if grant.tenant == ADMIN and grant.dataset == "*" and grant.level is Level.ADMIN:
        raise Forbidden("the administrator's own grant cannot be deleted: nobody could administer the lake")
    connection.execute(delete(grants).where(grants.c.id == grant_id))
    bump(connection)
    return grant


def _grant(row: Row[Any]) -> Grant:
    return Grant.model_validate(row._mapping, from_attributes=True)
