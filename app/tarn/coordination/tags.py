"""Tags: a namespace for each tenant, and that of the system tags, which all tenants can read and only Tarn writes.

SQL is authoritative; mirrors in the layout are for people and offline tools.
"""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import ColumnElement, Connection, Row, delete, func, or_, select

from tarn.access.audit import AuditedAction
from tarn.datasets.registry import Dataset, lock_active
from tarn.db.engine import Database
from tarn.db.tables import tags
from tarn.db.upsert import upsert
from tarn.errors import AlreadyExists, Forbidden, QuotaExceeded, TagNotFound, TarnError
from tarn.model.datasets.tag import CORE, Latest, NewTag, Tag, is_core, newer_tags
from tarn.model.ids import now
from tarn.model.names import LAKEHOUSE, TagKey, TenantName
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

MAX_TAGS = 10_000
"""Maximum number of tags of a tenant on one dataset."""

MIN_STEP = timedelta(microseconds=1)


class TagService:
    """Reads and changes tags. Each change and its audit record are one transaction; the mirror follows it."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store

    def page(self, dataset: Dataset, tenant: TenantName, prefix: str, after: str | None, limit: int) -> list[Tag]:
        """Return the tags of a tenant whose keys begin with a prefix, sorted by key.

        A prefix in the namespace of the system tags returns system tags instead.
        """
        owner, inner = (LAKEHOUSE, prefix.removeprefix(CORE)) if prefix.startswith(CORE) else (tenant, prefix)
        query = select(tags).where(*_of(dataset, owner), func.substr(tags.c.key, 1, len(inner)) == inner)
        if after is not None:
            query = query.where(tags.c.key > (after.removeprefix(CORE) if owner == LAKEHOUSE else after))
        with self._database.read() as connection:
            return [_tag(row) for row in connection.execute(query.order_by(tags.c.key).limit(limit))]

    def get(self, dataset: Dataset, tenant: TenantName, key: TagKey) -> Tag:
        """Return a tag. Raises TagNotFound."""
        with self._database.read() as connection:
            return _get(connection, dataset, tenant, key)

    def compare(self, dataset: Dataset, tenant: TenantName, key: TagKey, dependencies: Sequence[TagKey]) -> Latest:
        """Check whether a tag exists and is strictly newer than each of the dependencies that exist."""
        with self._database.read() as connection:
            times = _times(connection, dataset, tenant, [key, *dependencies])
        at = times.get(key)
        newer = newer_tags(at, times, dependencies)
        return Latest(key=key, latest=at is not None and not newer, at=at, newer=newer)

    def set(self, dataset: Dataset, tenant: TenantName, key: TagKey, new: NewTag, act: AuditedAction) -> Tag:
        """Set a tag to a time, by default now; a tag that exists gets a later time than before, even if the clock
        went back.

        Raises Forbidden for a system tag, AlreadyExists if the key is a prefix of another tag's key or the reverse, and
        QuotaExceeded.
        """
        _require_own(key)
        with self._database.write() as connection:
            lock_active(connection, dataset)
            self._database.serialize(connection, f"tags:{dataset.id}:{tenant}")
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
            tag = _get(connection, dataset, tenant, key)
            act.done(connection, key=key)
        mirror(self._store, dataset, tenant, key, tag)
        return tag

    def delete(self, dataset: Dataset, tenant: TenantName, key: TagKey, act: AuditedAction) -> None:
        """Delete a tag. Raises TagNotFound, and Forbidden for a system tag."""
        _require_own(key)
        with self._database.write() as connection:
            if connection.execute(delete(tags).where(*_of(dataset, tenant), tags.c.key == key)).rowcount != 1:
                raise _missing(dataset, key)
            act.done(connection, key=key)
        mirror(self._store, dataset, tenant, key, None)


def mirror(store: Store, dataset: Dataset, tenant: TenantName, key: TagKey, tag: Tag | None) -> None:
    """Mirror a tag or its absence to the layout after the commit; errors are only logged."""
    path = dataset.layout.tag(tenant, key)
    try:
        if tag is None:
            store.delete([path])
        else:
            store.put_hint(path, tag.to_json())
    except TarnError as error:
        log.warning("cannot mirror a tag to the layout", dataset=dataset.name, problem=error.slug)


def _get(connection: Connection, dataset: Dataset, tenant: TenantName, key: TagKey) -> Tag:
    owner, inner = _split(key, tenant)
    row = connection.execute(select(tags).where(*_of(dataset, owner), tags.c.key == inner)).first()
    if row is None:
        raise _missing(dataset, key)
    return _tag(row)


def _times(
    connection: Connection, dataset: Dataset, tenant: TenantName, keys: Collection[TagKey]
) -> dict[TagKey, datetime]:
    """Return the times of those of these tags that exist, by key."""
    by_owner = {_split(key, tenant): key for key in keys}
    query = select(tags).where(
        tags.c.dataset_id == dataset.id,
        tags.c.tenant.in_({owner for owner, _ in by_owner}),
        tags.c.key.in_([inner for _, inner in by_owner]),
    )
    times = {(row.tenant, row.key): row.at for row in connection.execute(query)}
    return {key: times[owned] for owned, key in by_owner.items() if owned in times}


def _require_own(key: TagKey) -> None:
    if is_core(key):
        raise Forbidden(f"tags of {LAKEHOUSE!r} can only be written by the lake itself")


def _require_room(connection: Connection, dataset: Dataset, tenant: TenantName, key: TagKey) -> None:
    parts = key.split("/")
    folders = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
    below = func.substr(tags.c.key, 1, len(key) + 1) == f"{key}/"
    inside = select(tags.c.key).where(*_of(dataset, tenant), or_(tags.c.key.in_(folders), below)).limit(1)
    other = connection.execute(inside).scalar()
    if other is not None:
        raise AlreadyExists(f"the tag {other!r} exists: a key cannot also be the prefix of another tag's key")
    count = connection.execute(select(func.count()).select_from(tags).where(*_of(dataset, tenant))).scalar_one()
    if count >= MAX_TAGS:
        raise QuotaExceeded(f"tenant {tenant!r} has {count} tags on {dataset.name!r} already", retry_after=60)


def _split(key: TagKey, tenant: TenantName) -> tuple[str, str]:
    """Return the owner of the tag that a key names, and the key within the owner's namespace."""
    return (LAKEHOUSE, key.removeprefix(CORE)) if key.startswith(CORE) else (tenant, str(key))


def _of(dataset: Dataset, tenant: str) -> tuple[ColumnElement[bool], ...]:
    return tags.c.dataset_id == dataset.id, tags.c.tenant == tenant


def _missing(dataset: Dataset, key: TagKey) -> TagNotFound:
    return TagNotFound(f"there is no tag {key!r} on {dataset.name!r}")


def _tag(row: Row[Any]) -> Tag:
    return Tag(key=f"{CORE if row.tenant == LAKEHOUSE else ''}{row.key}", at=row.at, value=row.value)
