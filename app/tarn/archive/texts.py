"""Accounting of extracted texts in SQL: the tenant that put each, and its bytes, which count against the quota.

The object in the archive is the text; its row only counts it. A text without a row, put by a release of Tarn that did
not count texts, is read like any other, and counted by the next verification that repairs.

All changes are made under the lock of the checksum (`file_index.hold`).
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, delete, select

from tarn.access import limits
from tarn.datasets.registry import Dataset
from tarn.db.tables import file_texts, tenants
from tarn.db.upsert import upsert
from tarn.model.names import Checksum, Origin, TenantName
from tarn.settings import Settings


class CountedText(NamedTuple):
    """The accounting row of a text."""

    checksum: Checksum
    origin: Origin
    tenant: TenantName
    size: int


def find(connection: Connection, dataset: Dataset, checksum: Checksum, origin: Origin) -> CountedText | None:
    row = connection.execute(select(file_texts).where(*_of(dataset, [checksum]), file_texts.c.origin == origin)).first()
    return None if row is None else _counted(row)


def between(connection: Connection, dataset: Dataset, after: Checksum, last: Checksum) -> Iterator[CountedText]:
    """Return the texts of contents whose checksums are greater than `after` and at most `last`."""
    columns = file_texts.c
    query = select(file_texts).where(
        columns.dataset_id == dataset.id, columns.checksum > after, columns.checksum <= last
    )
    return map(_counted, connection.execute(query))


def replace(connection: Connection, settings: Settings, dataset: Dataset, new: CountedText) -> None:
    """Count a text in place of the former one, whose bytes are released first. Raises QuotaExceeded."""
    old = find(connection, dataset, new.checksum, new.origin)
    if old is not None:
        if old.tenant != new.tenant:
            # Lock in a fixed order, so that two tenants who replace each other's texts do not deadlock.
            both = select(tenants.c.name).where(tenants.c.name.in_([old.tenant, new.tenant])).order_by(tenants.c.name)
            connection.execute(both.with_for_update()).all()
        limits.release(connection, old.tenant, size=old.size)
    limits.reserve(connection, new.tenant, settings, size=new.size)
    _write(connection, dataset, new)


def recount(connection: Connection, dataset: Dataset, new: CountedText) -> None:
    """Count a text with its size in the archive, whatever the quota is."""
    old = find(connection, dataset, new.checksum, new.origin)
    if old is not None:
        limits.release(connection, old.tenant, size=old.size)
    limits.release(connection, new.tenant, size=-new.size)
    _write(connection, dataset, new)


def forget(
    connection: Connection, dataset: Dataset, checksums: Collection[Checksum], origin: Origin | None = None
) -> list[CountedText]:
    """Delete the rows of texts of these contents, or of one origin only, and return them. Their bytes are released."""
    if not checksums:
        return []
    conditions = _of(dataset, checksums)
    if origin is not None:
        conditions = (*conditions, file_texts.c.origin == origin)
    deleted = [_counted(row) for row in connection.execute(delete(file_texts).where(*conditions).returning(file_texts))]
    for text in sorted(deleted, key=lambda text: text.tenant):
        limits.release(connection, text.tenant, size=text.size)
    return deleted


def _write(connection: Connection, dataset: Dataset, new: CountedText) -> None:
    values = {"tenant": new.tenant, "size": new.size}
    key = {"dataset_id": dataset.id, "checksum": new.checksum, "origin": new.origin}
    connection.execute(
        upsert(connection, file_texts).values(**key, **values).on_conflict_do_update(index_elements=[*key], set_=values)
    )


def _of(dataset: Dataset, checksums: Collection[Checksum]) -> tuple[Any, ...]:
    return file_texts.c.dataset_id == dataset.id, file_texts.c.checksum.in_(checksums)


def _counted(row: Row[Any]) -> CountedText:
    return CountedText(Checksum(row.checksum), Origin(row.origin), TenantName(row.tenant), row.size)
