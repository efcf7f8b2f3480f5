"""Tags of tenants, each in a namespace of its own, and the core's, which all may read and nobody else writes.

SQL decides; the layout shows them to people and offline tools.
"""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import ColumnElement, Connection, Row, delete, func, or_, select

from tarn.datasets.registry import Dataset, lock_active
from tarn.db.engine import Database
from tarn.db.tables import tags
from tarn.db.upsert import upsert
from tarn.errors import AlreadyExists, Forbidden, QuotaExceeded, TagNotFound, TarnError
from tarn.model.ids import now
from tarn.model.names import LAKEHOUSE, TagKey, TenantName
from tarn.model.tag import CORE, NewTag, Tag, is_core
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

MAX_TAGS = 10_000
"""Tags that a tenant has on one dataset, at most."""

MIN_STEP = timedelta(microseconds=1)


def page(
    connection: Connection, dataset: Dataset, tenant: TenantName, prefix: str, after: str | None, limit: int
) -> list[Tag]:
    """A tenant's tags whose keys begin with a prefix, by key; the core's, if it is that of their namespace."""
    owner, inner = (LAKEHOUSE, prefix.removeprefix(CORE)) if prefix.startswith(CORE) else (tenant, prefix)
    query = select(tags).where(*_of(dataset, owner), func.substr(tags.c.key, 1, len(inner)) == inner)
    if after is not None:
        query = query.where(tags.c.key > (after.removeprefix(CORE) if owner == LAKEHOUSE else after))
    return [_tag(row) for row in connection.execute(query.order_by(tags.c.key).limit(limit))]


def _get(connection: Connection, dataset: Dataset, tenant: TenantName, key: TagKey) -> Tag:
    """Raises TagNotFound."""
    owner, inner = _split(key, tenant)
    row = connection.execute(select(tags).where(*_of(dataset, owner), tags.c.key == inner)).first()
    if row is None:
        raise _missing(dataset, key)
    return _tag(row)


def _times(
    connection: Connection, dataset: Dataset, tenant: TenantName, keys: Collection[TagKey]
) -> dict[TagKey, datetime]:
    """The moments of those of some tags that are there, by their keys."""
    places = {_split(key, tenant): key for key in keys}
    wanted = [key for _, key in places]
    query = select(tags).where(
        tags.c.dataset_id == dataset.id, tags.c.tenant.in_({owner for owner, _ in places}), tags.c.key.in_(wanted)
    )
    found = {(row.tenant, row.key): row.at for row in connection.execute(query)}
    return {key: found[place] for place, key in places.items() if place in found}


def put(
    database: Database, connection: Connection, dataset: Dataset, tenant: TenantName, key: TagKey, new: NewTag
) -> Tag:
    """Set a tag. Without a moment it gets the present one, and a later one than it had, whatever the clock says.

    Raises Forbidden for one of the core's, AlreadyExists where a key would be both a tag and a folder of tags, and
    QuotaExceeded.
    """
    _require_own(key)
    lock_active(connection, dataset)
    database.serialize(connection, f"tags:{dataset.id}:{tenant}")
    before = connection.execute(select(tags.c.at).where(*_of(dataset, tenant), tags.c.key == key)).scalar()
    if before is None:
        _require_room(connection, dataset, tenant, key)
    at = new.at or (now() if before is None else max(now(), before + MIN_STEP))
    values = {"at": at, "value": new.value}
    connection.execute(
        upsert(connection, tags)
        .values(dataset_id=dataset.id, tenant=tenant, key=key, **values)
        .on_conflict_do_update(index_elements=["dataset_id", "tenant", "key"], set_=values)
    )
    return _get(connection, dataset, tenant, key)


def remove(connection: Connection, dataset: Dataset, tenant: TenantName, key: TagKey) -> None:
    """Raises TagNotFound, and Forbidden for one of the core's."""
    _require_own(key)
    if connection.execute(delete(tags).where(*_of(dataset, tenant), tags.c.key == key)).rowcount != 1:
        raise _missing(dataset, key)


def mirror(store: Store, dataset: Dataset, tenant: TenantName, key: TagKey, tag: Tag | None) -> None:
    """Mirror a tag, or its absence, after the fact: whether that works changes nothing."""
    path = dataset.layout.tag(tenant, key)
    try:
        if tag is None:
            store.delete([path])
        else:
            store.put_hint(path, tag.to_json())
    except TarnError as error:
        log.warning("a tag is not shown in the layout", dataset=dataset.name, problem=error.slug)


def _require_own(key: TagKey) -> None:
    if is_core(key):
        raise Forbidden(f"tags of {LAKEHOUSE!r} are written by nobody but the lake itself")


def _require_room(connection: Connection, dataset: Dataset, tenant: TenantName, key: TagKey) -> None:
    parts = key.split("/")
    folders = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
    below = func.substr(tags.c.key, 1, len(key) + 1) == f"{key}/"
    inside = select(tags.c.key).where(*_of(dataset, tenant), or_(tags.c.key.in_(folders), below)).limit(1)
    other = connection.execute(inside).scalar()
    if other is not None:
        raise AlreadyExists(f"there is a tag {other!r}, and nothing is both a tag and a folder of tags")
    count = connection.execute(select(func.count()).select_from(tags).where(*_of(dataset, tenant))).scalar_one()
    if count >= MAX_TAGS:
        raise QuotaExceeded(f"tenant {tenant!r} has {count} tags on {dataset.name!r} already", retry_after=60)


def _split(key: TagKey, tenant: TenantName) -> tuple[str, str]:
    """Whose tag a key means, and the key in its namespace."""
    return (LAKEHOUSE, key.removeprefix(CORE)) if key.startswith(CORE) else (tenant, str(key))


def _of(dataset: Dataset, tenant: str) -> tuple[ColumnElement[bool], ...]:
    return tags.c.dataset_id == dataset.id, tags.c.tenant == tenant


def _missing(dataset: Dataset, key: TagKey) -> TagNotFound:
    return TagNotFound(f"there is no tag {key!r} on {dataset.name!r}")


def _tag(row: Row[Any]) -> Tag:
    return Tag(key=f"{CORE if row.tenant == LAKEHOUSE else ''}{row.key}", at=row.at, value=row.value)
