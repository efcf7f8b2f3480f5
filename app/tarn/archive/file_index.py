"""The SQL index of the archive's File records, and the announcements of files that are being put.

A blob may be collected if no record refers to it and no put is about to write one. So a put announces its file first,
by a row of `file_puts`, and deletes the row in the transaction that records the file. Both transactions, and those
that collect or delete, hold the lock of the checksum: each sees what the one before it did. A put whose row is gone
was overtaken, by a collector after it expired or by a deletion of the file, and starts again.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, Select, and_, delete, insert, or_, select, union_all, update

from tarn.access import limits
from tarn.datasets.registry import ACTIVE, Dataset
from tarn.db import outbox
from tarn.db.engine import Database
from tarn.db.tables import datasets, file_puts, files, tags, uploads
from tarn.errors import DatasetNotFound, FileNotFound
from tarn.journal.head import touch
from tarn.model.file import ArchiveFile, file_id
from tarn.model.ids import new_id, now
from tarn.model.names import LAKEHOUSE, Checksum, FileId, FilePath, TenantName
from tarn.model.work.event import MOST_FILES, EventKind
from tarn.settings import Settings

LAST_UPDATED = "archive/last_updated"
LAST_DELETED = "archive/last_deleted"
LAST_COLLECTED = "archive/last_collected"

INDEXED = 255
"""Characters of a path that the database index covers."""


SOME = 500
"""Rows that are read in one batch."""


class Announced(NamedTuple):
    """The announcement of a file that is being put."""

    id: str
    checksum: Checksum
    file_id: FileId


@dataclass(frozen=True, slots=True)
class Position:
    """A position in the order of files: by path, then by id."""

    path: str
    id: str


def page(
    connection: Connection,
    dataset: Dataset,
    limit: int,
    after: Position | None = None,
    prefix: str | None = None,
    path: FilePath | None = None,
    checksum: Checksum | None = None,
) -> list[ArchiveFile]:
    """Return a page of files ordered by path: of one path, one content, or all whose paths have a prefix."""
    query = _of(dataset).order_by(files.c.path_head, files.c.path, files.c.id).limit(limit)
    if checksum is not None:
        query = query.where(files.c.checksum == checksum)
    if path is not None:
        query = query.where(files.c.path_head == path[:INDEXED], files.c.path == path)
    if prefix:
        query = query.where(files.c.path_head >= prefix[:INDEXED], files.c.path >= prefix)
        if (end := _after_all(prefix)) is not None:
            query = query.where(files.c.path_head <= end[:INDEXED], files.c.path < end)
    if after is not None:
        head, columns = after.path[:INDEXED], files.c
        later = or_(columns.path > after.path, and_(columns.path == after.path, columns.id > after.id))
        query = query.where(columns.path_head >= head, or_(columns.path_head > head, later))
    return [_file(row) for row in connection.execute(query)]


def get(connection: Connection, dataset: Dataset, checksum: Checksum, file_id: FileId) -> ArchiveFile:
    """Return a file. Raises FileNotFound."""
    row = connection.execute(_of(dataset).where(files.c.id == file_id, files.c.checksum == checksum)).first()
    if row is None:
        raise FileNotFound(f"{dataset.name!r} has no file {file_id!r} with the checksum {checksum}")
    return _file(row)


def find(connection: Connection, dataset: Dataset, file_id: FileId) -> ArchiveFile | None:
    row = connection.execute(_of(dataset).where(files.c.id == file_id)).first()
    return None if row is None else _file(row)


def at(connection: Connection, dataset: Dataset, path: FilePath) -> Iterator[ArchiveFile]:
    """Return all files at a path."""
    query = _of(dataset).where(files.c.path_head == path[:INDEXED], files.c.path == path).order_by(files.c.id)
    return map(_file, connection.execute(query, execution_options={"yield_per": SOME}))


def between(connection: Connection, dataset: Dataset, after: Checksum, last: Checksum) -> Iterator[ArchiveFile]:
    """Return the files whose checksums are greater than `after` and at most `last`, ordered by checksum."""
    query = _of(dataset).where(files.c.checksum > after, files.c.checksum <= last).order_by(files.c.checksum)
    return map(_file, connection.execute(query, execution_options={"yield_per": SOME}))


def first_of(connection: Connection, dataset: Dataset, checksum: Checksum) -> ArchiveFile:
    """Return the first file with this content, by path and id. Raises FileNotFound."""
    first_page = page(connection, dataset, 1, checksum=checksum)
    if not first_page:
        raise FileNotFound(f"{dataset.name!r} has no file with the checksum {checksum}")
    return first_page[0]


def known_paths(connection: Connection, dataset: Dataset, paths: Collection[FilePath]) -> set[str]:
    """Return those of the paths that have a file."""
    conditions = files.c.dataset_id == dataset.id, files.c.path_head.in_({path[:INDEXED] for path in paths})
    return set(connection.execute(select(files.c.path).where(*conditions)).scalars()).intersection(paths)


def known_checksums(connection: Connection, dataset: Dataset, checksums: Collection[Checksum]) -> set[str]:
    """Return those of the checksums that a file has."""
    conditions = files.c.dataset_id == dataset.id, files.c.checksum.in_(checksums)
    return set(connection.execute(select(files.c.checksum).where(*conditions)).scalars())


def hold(
    database: Database,
    connection: Connection,
    dataset: Dataset,
    checksums: Iterable[Checksum],
    paths: Iterable[FilePath] = (),
) -> None:
    """Lock these checksums and paths until the transaction ends, in a fixed order that avoids deadlocks. Changing the
    set of files at a path requires its lock."""
    for checksum in sorted(set(checksums)):
        database.serialize(connection, f"blob:{dataset.id}:{checksum}")
    for path in sorted(set(paths)):
        database.serialize(connection, f"path:{dataset.id}:{path}")


def expiry(settings: Settings) -> datetime:
    """Return when an announcement that is made now expires."""
    return now() + timedelta(seconds=settings.upload_expiry)


def announce(
    connection: Connection,
    settings: Settings,
    dataset: Dataset,
    tenant: TenantName,
    coming: Sequence[ArchiveFile],
    reservations: Collection[str] = (),
) -> list[str]:
    """Announce that these files are about to be put, count them against the quota, and return the announcements' ids.

    They replace what was reserved while the files were received. Raises DatasetNotFound if the dataset is being
    deleted, and QuotaExceeded.
    """
    require_active(connection, dataset)
    withdraw(connection, reservations)
    limits.reserve(connection, tenant, settings, size=sum(file.size for file in coming))
    expires = expiry(settings)
    ids = [new_id() for _ in coming]
    rows = [
        {
            "id": announced,
            "dataset_id": dataset.id,
            "checksum": file.checksum,
            "file_id": file.id,
            "tenant": tenant,
            "reserved": file.size,
            "expires": expires,
        }
        for announced, file in zip(ids, coming, strict=True)
    ]
    connection.execute(insert(file_puts), rows)
    return ids


def announced_for(
    connection: Connection, dataset: Dataset, path: FilePath, besides: Collection[str]
) -> list[Announced]:
    """Return the announcements of other puts for a path. The path is known only from the file id."""
    query = select(file_puts.c.id, file_puts.c.checksum, file_puts.c.file_id).where(
        file_puts.c.dataset_id == dataset.id
    )
    announcements = (
        Announced(row.id, Checksum(row.checksum), FileId(row.file_id)) for row in connection.execute(query)
    )
    return [
        one
        for one in announcements
        if one.id not in besides and one.file_id == file_id(dataset.name, path, one.checksum)
    ]


def is_recorded_or_announced(connection: Connection, dataset: Dataset, file_id: FileId) -> bool:
    """Return whether a file is recorded or announced."""
    recorded = select(files.c.id).where(files.c.dataset_id == dataset.id, files.c.id == file_id)
    coming = select(file_puts.c.id).where(file_puts.c.dataset_id == dataset.id, file_puts.c.file_id == file_id)
    return connection.execute(union_all(recorded, coming).limit(1)).first() is not None


def withdraw(connection: Connection, announced: Iterable[str]) -> set[str]:
    """Delete announcements and reservations, release their quota, and return the ids of those that existed."""
    if not (ids := list(announced)):
        return set()
    deleted = connection.execute(
        delete(file_puts)
        .where(file_puts.c.id.in_(ids))
        .returning(file_puts.c.id, file_puts.c.tenant, file_puts.c.reserved)
    ).all()
    for row in deleted:
        limits.release(connection, row.tenant, size=row.reserved)
    return {row.id for row in deleted}


def record(connection: Connection, dataset: Dataset, announced: str, file: ArchiveFile) -> bool:
    """Record an announced file, replacing its former row. Return False if the put was overtaken."""
    return bool(record_all(connection, dataset, {announced: file}))


def record_all(connection: Connection, dataset: Dataset, coming: Mapping[str, ArchiveFile]) -> set[str]:
    """Record announced files, replacing their former rows. Return the announcements that were not overtaken."""
    own = file_puts.c.id.in_(list(coming))
    statement = delete(file_puts).where(own).returning(file_puts.c.id, file_puts.c.tenant, file_puts.c.reserved)
    claimed = {row.id: row for row in connection.execute(statement)}
    ids = {coming[announced].id for announced in claimed}
    existing = select(files.c.id).where(files.c.dataset_id == dataset.id, files.c.id.in_(ids))
    known = set(connection.execute(existing).scalars())
    new: dict[str, ArchiveFile] = {}
    replaced: list[str] = []
    for announced in (announced for announced in coming if announced in claimed):
        file = coming[announced]
        if file.id in known or file.id in new:
            replaced.append(announced)
        else:
            new[file.id] = file
    if new:
        connection.execute(insert(files), [_row(dataset, file) for file in new.values()])
    for announced in replaced:
        _change(connection, dataset, coming[announced])
        limits.release(connection, claimed[announced].tenant, size=claimed[announced].reserved)
    recorded = {coming[announced].id: coming[announced] for announced in claimed}
    if recorded:
        first = [_named(file) for file in islice(recorded.values(), MOST_FILES)]
        outbox.record(connection, dataset.id, EventKind.FILES_PUT, count=len(recorded), files=first)
    return set(claimed)


def add(connection: Connection, dataset: Dataset, file: ArchiveFile) -> None:
    """Record a file that the archive has without an announcement. It is counted, even beyond the quota."""
    connection.execute(insert(files).values(_row(dataset, file)))
    limits.release(connection, file.tenant, size=-file.size)


def expired(connection: Connection, dataset: Dataset, moment: datetime) -> list[Announced]:
    """Return some of the expired announcements."""
    query = select(file_puts).where(file_puts.c.dataset_id == dataset.id, file_puts.c.expires < moment)
    return [
        Announced(row.id, Checksum(row.checksum), FileId(row.file_id)) for row in connection.execute(query.limit(SOME))
    ]


def touch_collected(connection: Connection, dataset: Dataset, past: datetime) -> None:
    """Set the tag that says that garbage written up to a moment is deleted."""
    touch(connection, dataset.id, LAST_COLLECTED, past)


def has_garbage(connection: Connection, dataset: Dataset, moment: datetime, age: timedelta) -> bool:
    """Return whether a collector might find something: expired uploads and puts, and contents whose files were deleted
    since. It finds only garbage of some age, so running it more often than that is useless."""
    past = moment - age
    for table in (uploads, file_puts):
        expired_rows = select(table.c.id).where(table.c.dataset_id == dataset.id, table.c.expires < moment)
        if connection.execute(expired_rows.limit(1)).first() is not None:
            return True
    query = select(tags.c.key, tags.c.at).where(
        tags.c.dataset_id == dataset.id, tags.c.tenant == LAKEHOUSE, tags.c.key.in_((LAST_DELETED, LAST_COLLECTED))
    )
    at = {row.key: row.at for row in connection.execute(query)}
    deleted, last = at.get(LAST_DELETED), at.get(LAST_COLLECTED)
    return deleted is not None and (last is None or last < min(deleted, past - age))


def unreferenced(connection: Connection, dataset: Dataset, checksums: Sequence[Checksum]) -> set[Checksum]:
    """Return those of the checksums to which no file and no announcement refers."""
    candidates = set(checksums)
    for table in (files, file_puts):
        conditions = table.c.dataset_id == dataset.id, table.c.checksum.in_(checksums)
        candidates -= set(connection.execute(select(table.c.checksum).where(*conditions)).scalars())
    return candidates


def touch_updated(connection: Connection, dataset: Dataset) -> None:
    """Set the tag of the archive's last change. Raises DatasetNotFound if the dataset is being deleted."""
    require_active(connection, dataset)
    touch(connection, dataset.id, LAST_UPDATED, now())


def forget(connection: Connection, dataset: Dataset, file: ArchiveFile) -> None:
    """Remove a file from the index, and withdraw its announcements, so that concurrent puts of it start again."""
    connection.execute(delete(files).where(files.c.dataset_id == dataset.id, files.c.id == file.id))
    touch(connection, dataset.id, LAST_DELETED, now())
    limits.release(connection, file.tenant, size=file.size)
    conditions = file_puts.c.dataset_id == dataset.id, file_puts.c.file_id == file.id
    withdraw(connection, connection.execute(select(file_puts.c.id).where(*conditions)).scalars())
    outbox.record(connection, dataset.id, EventKind.FILE_DELETED, file=_named(file))


def _named(file: ArchiveFile) -> dict[str, str]:
    return {"id": file.id, "checksum": file.checksum, "path": file.path}


def _change(connection: Connection, dataset: Dataset, file: ArchiveFile) -> None:
    values = {"mime_type": file.mime_type, "origin": file.origin, "meta": file.meta}
    own = files.c.dataset_id == dataset.id, files.c.id == file.id
    connection.execute(update(files).where(*own).values(**values))


def require_active(connection: Connection, dataset: Dataset) -> None:
    """Raise DatasetNotFound for a dataset that is being deleted."""
    query = select(datasets.c.id).where(datasets.c.id == dataset.id, datasets.c.state == ACTIVE)
    if connection.execute(query).first() is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")


def _after_all(prefix: str) -> str | None:
    """Return the least string greater than all that begin with a prefix, or None if there is none."""
    while prefix:
        code = ord(prefix[-1]) + 1
        if code <= 0x10FFFF:
            # Strings contain no surrogates.
            return prefix[:-1] + chr(0xE000 if 0xD800 <= code <= 0xDFFF else code)
        prefix = prefix[:-1]
    return None


def _of(dataset: Dataset) -> Select[Any]:
    return select(files).where(files.c.dataset_id == dataset.id)


def _row(dataset: Dataset, file: ArchiveFile) -> dict[str, Any]:
    values = file.model_dump(exclude={"name"})
    return {"dataset_id": dataset.id, "path_head": file.path[:INDEXED], **values}


def _file(row: Row[Any]) -> ArchiveFile:
    values = {name: value for name, value in row._mapping.items() if name not in ("dataset_id", "path_head")}
    return ArchiveFile.model_validate({**values, "name": FilePath(row.path).name})
