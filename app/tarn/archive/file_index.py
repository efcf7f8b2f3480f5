"""The index of the archive's File records in SQL, and which files are on their way into it.

A blob may be collected when no record refers to it and nobody is about to write one. So whoever puts a file says so
first, by a row of `file_puts`, and takes it away in the transaction that records the file. Both transactions, and those
that collect or delete, hold the lock of the checksum: each sees what the one before it did. A put whose row is gone was
overtaken, by a collector after it expired or by somebody who deleted the file, and begins again.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, Select, and_, delete, insert, or_, select, union_all, update

from tarn.access import limits
from tarn.datasets.registry import ACTIVE, Dataset
from tarn.db import outbox as events
from tarn.db.engine import Database
from tarn.db.tables import datasets, file_puts, files, tags, uploads
from tarn.errors import DatasetNotFound, FileNotFound
from tarn.journal.head import touch
from tarn.model.event import MOST_FILES, EventKind
from tarn.model.file import ArchiveFile, file_id
from tarn.model.ids import new_id, now
from tarn.model.names import LAKEHOUSE, Checksum, FileId, FilePath, TenantName
from tarn.settings import Settings

LAST_UPDATED = "archive/last_updated"
LAST_DELETED = "archive/last_deleted"
LAST_COLLECTED = "archive/last_collected"

INDEXED = 255
"""Characters of a path that are in an index."""


SOME = 500
"""Rows that are read at once, where there may be many."""


class Announced(NamedTuple):
    """A file that is about to be put, or was."""

    id: str
    checksum: Checksum
    file_id: FileId


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the order of files: by path, and of one path by id."""

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
    """Files by path: of one path or one content, or those whose paths begin with a text."""
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
    """Raises FileNotFound."""
    row = connection.execute(_of(dataset).where(files.c.id == file_id, files.c.checksum == checksum)).first()
    if row is None:
        raise FileNotFound(f"{dataset.name!r} has no file {file_id!r} with the checksum {checksum}")
    return _file(row)


def find(connection: Connection, dataset: Dataset, file_id: FileId) -> ArchiveFile | None:
    row = connection.execute(_of(dataset).where(files.c.id == file_id)).first()
    return None if row is None else _file(row)


def at(connection: Connection, dataset: Dataset, path: FilePath) -> Iterator[ArchiveFile]:
    """All files at a path."""
    query = _of(dataset).where(files.c.path_head == path[:INDEXED], files.c.path == path).order_by(files.c.id)
    return map(_file, connection.execute(query, execution_options={"yield_per": SOME}))


def between(connection: Connection, dataset: Dataset, after: Checksum, last: Checksum) -> Iterator[ArchiveFile]:
    """Files whose contents' checksums are greater than one, and not greater than another, in their order."""
    query = _of(dataset).where(files.c.checksum > after, files.c.checksum <= last).order_by(files.c.checksum)
    return map(_file, connection.execute(query, execution_options={"yield_per": SOME}))


def first_of(connection: Connection, dataset: Dataset, checksum: Checksum) -> ArchiveFile:
    """A file with this content, always the same while it is there. Raises FileNotFound."""
    found = page(connection, dataset, 1, checksum=checksum)
    if not found:
        raise FileNotFound(f"{dataset.name!r} has no file with the checksum {checksum}")
    return found[0]


def known_paths(connection: Connection, dataset: Dataset, paths: Collection[FilePath]) -> set[str]:
    """Those of some paths at which there is a file."""
    same = files.c.dataset_id == dataset.id, files.c.path_head.in_({path[:INDEXED] for path in paths})
    return set(connection.execute(select(files.c.path).where(*same)).scalars()).intersection(paths)


def known_checksums(connection: Connection, dataset: Dataset, checksums: Collection[Checksum]) -> set[str]:
    """Those of some contents that a file has."""
    same = files.c.dataset_id == dataset.id, files.c.checksum.in_(checksums)
    return set(connection.execute(select(files.c.checksum).where(*same)).scalars())


def hold(
    database: Database,
    connection: Connection,
    dataset: Dataset,
    checksums: Iterable[Checksum],
    paths: Iterable[FilePath] = (),
) -> None:
    """Take the locks of these checksums, and of these paths, until the transaction ends, in an order in which nobody
    waits in a circle. Who changes which files a path has holds the path."""
    for checksum in sorted(set(checksums)):
        database.serialize(connection, f"blob:{dataset.id}:{checksum}")
    for path in sorted(set(paths)):
        database.serialize(connection, f"path:{dataset.id}:{path}")


def expiry(settings: Settings) -> datetime:
    """When what is announced now is given up."""
    return now() + timedelta(seconds=settings.upload_expiry)


def announce(
    connection: Connection,
    settings: Settings,
    dataset: Dataset,
    tenant: TenantName,
    coming: Sequence[ArchiveFile],
    reservations: Collection[str] = (),
) -> list[str]:
    """Say that these files are about to be put, and take them from the tenant's quota; the ids of the announcements.

    They take the place of what was reserved while they arrived. Raises DatasetNotFound for one that is being deleted,
    and QuotaExceeded.
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
    """Files that others have announced for a path, which only their ids tell."""
    query = select(file_puts.c.id, file_puts.c.checksum, file_puts.c.file_id).where(
        file_puts.c.dataset_id == dataset.id
    )
    found = (Announced(row.id, Checksum(row.checksum), FileId(row.file_id)) for row in connection.execute(query))
    return [one for one in found if one.id not in besides and one.file_id == file_id(dataset.name, path, one.checksum)]


def is_recorded_or_announced(connection: Connection, dataset: Dataset, file_id: FileId) -> bool:
    """Whether a file is recorded, or about to be."""
    recorded = select(files.c.id).where(files.c.dataset_id == dataset.id, files.c.id == file_id)
    coming = select(file_puts.c.id).where(file_puts.c.dataset_id == dataset.id, file_puts.c.file_id == file_id)
    return connection.execute(union_all(recorded, coming).limit(1)).first() is not None


def withdraw(connection: Connection, announced: Iterable[str]) -> set[str]:
    """Take announcements and reservations back, with what they took from quotas; those that were still there."""
    if not (ids := list(announced)):
        return set()
    gone = connection.execute(
        delete(file_puts)
        .where(file_puts.c.id.in_(ids))
        .returning(file_puts.c.id, file_puts.c.tenant, file_puts.c.reserved)
    ).all()
    for row in gone:
        limits.release(connection, row.tenant, size=row.reserved)
    return {row.id for row in gone}


def record(connection: Connection, dataset: Dataset, announced: str, file: ArchiveFile) -> bool:
    """Record a file that was announced, in the place of what its record said before. False if it was overtaken."""
    return bool(record_all(connection, dataset, {announced: file}))


def record_all(connection: Connection, dataset: Dataset, coming: Mapping[str, ArchiveFile]) -> set[str]:
    """Record files by their announcements, in the place of what their records said before; those not overtaken."""
    own = file_puts.c.id.in_(list(coming))
    taken = delete(file_puts).where(own).returning(file_puts.c.id, file_puts.c.tenant, file_puts.c.reserved)
    gone = {row.id: row for row in connection.execute(taken)}
    ids = {coming[announced].id for announced in gone}
    there = select(files.c.id).where(files.c.dataset_id == dataset.id, files.c.id.in_(ids))
    known = set(connection.execute(there).scalars())
    new: dict[str, ArchiveFile] = {}
    again: list[str] = []
    for announced in (announced for announced in coming if announced in gone):
        file = coming[announced]
        if file.id in known or file.id in new:
            again.append(announced)
        else:
            new[file.id] = file
    if new:
        connection.execute(insert(files), [_row(dataset, file) for file in new.values()])
    for announced in again:
        _change(connection, dataset, coming[announced])
        limits.release(connection, gone[announced].tenant, size=gone[announced].reserved)
    put = {coming[announced].id: coming[announced] for announced in gone}
    if put:
        first = [_named(file) for file in islice(put.values(), MOST_FILES)]
        events.record(connection, dataset.id, EventKind.FILES_PUT, count=len(put), files=first)
    return set(gone)


def add(connection: Connection, dataset: Dataset, file: ArchiveFile) -> None:
    """Record a file that the archive has, though nobody announced it; it counts, whatever the quota is."""
    connection.execute(insert(files).values(_row(dataset, file)))
    limits.release(connection, file.tenant, size=-file.size)


def expired(connection: Connection, dataset: Dataset, moment: datetime) -> list[Announced]:
    """Some of the announcements that nobody has come back to."""
    query = select(file_puts).where(file_puts.c.dataset_id == dataset.id, file_puts.c.expires < moment)
    return [
        Announced(row.id, Checksum(row.checksum), FileId(row.file_id)) for row in connection.execute(query.limit(SOME))
    ]


def touch_collected(connection: Connection, dataset: Dataset, past: datetime) -> None:
    """Say that what was written and not needed any more at a moment is gone."""
    touch(connection, dataset.id, LAST_COLLECTED, past)


def has_garbage(connection: Connection, dataset: Dataset, moment: datetime, age: timedelta) -> bool:
    """Whether a collector might find something: uploads and puts that were given up, and contents whose files were
    deleted since. It finds only what is of some age, and is not worth sending more often than that."""
    past = moment - age
    for table in (uploads, file_puts):
        given_up = select(table.c.id).where(table.c.dataset_id == dataset.id, table.c.expires < moment)
        if connection.execute(given_up.limit(1)).first() is not None:
            return True
    query = select(tags.c.key, tags.c.at).where(
        tags.c.dataset_id == dataset.id, tags.c.tenant == LAKEHOUSE, tags.c.key.in_((LAST_DELETED, LAST_COLLECTED))
    )
    at = {row.key: row.at for row in connection.execute(query)}
    deleted, last = at.get(LAST_DELETED), at.get(LAST_COLLECTED)
    return deleted is not None and (last is None or last < min(deleted, past - age))


def unreferenced(connection: Connection, dataset: Dataset, checksums: Sequence[Checksum]) -> set[Checksum]:
    """Those of some checksums to which no file refers, and none that is about to be put."""
    left = set(checksums)
    for table in (files, file_puts):
        same = table.c.dataset_id == dataset.id, table.c.checksum.in_(checksums)
        left -= set(connection.execute(select(table.c.checksum).where(*same)).scalars())
    return left


def touch_updated(connection: Connection, dataset: Dataset) -> None:
    """Say that the archive is another now. Raises DatasetNotFound for one that is being deleted."""
    require_active(connection, dataset)
    touch(connection, dataset.id, LAST_UPDATED, now())


def forget(connection: Connection, dataset: Dataset, file: ArchiveFile) -> None:
    """Take a file out of the index, and let those who are putting it begin again."""
    connection.execute(delete(files).where(files.c.dataset_id == dataset.id, files.c.id == file.id))
    touch(connection, dataset.id, LAST_DELETED, now())
    limits.release(connection, file.tenant, size=file.size)
    same = file_puts.c.dataset_id == dataset.id, file_puts.c.file_id == file.id
    withdraw(connection, connection.execute(select(file_puts.c.id).where(*same)).scalars())
    events.record(connection, dataset.id, EventKind.FILE_DELETED, file=_named(file))


def _named(file: ArchiveFile) -> dict[str, str]:
    return {"id": file.id, "checksum": file.checksum, "path": file.path}


def _change(connection: Connection, dataset: Dataset, file: ArchiveFile) -> None:
    said = {"mime_type": file.mime_type, "origin": file.origin, "meta": file.meta}
    own = files.c.dataset_id == dataset.id, files.c.id == file.id
    connection.execute(update(files).where(*own).values(**said))


def require_active(connection: Connection, dataset: Dataset) -> None:
    """Raise DatasetNotFound for a dataset that is being deleted."""
    found = select(datasets.c.id).where(datasets.c.id == dataset.id, datasets.c.state == ACTIVE)
    if connection.execute(found).first() is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")


def _after_all(prefix: str) -> str | None:
    """The least text that is greater than all that begin with a prefix; None: there is none."""
    while prefix:
        code = ord(prefix[-1]) + 1
        if code <= 0x10FFFF:
            # No text has the halves of a pair.
            return prefix[:-1] + chr(0xE000 if 0xD800 <= code <= 0xDFFF else code)
        prefix = prefix[:-1]
    return None


def _of(dataset: Dataset) -> Select[Any]:
    return select(files).where(files.c.dataset_id == dataset.id)


def _row(dataset: Dataset, file: ArchiveFile) -> dict[str, Any]:
    said = file.model_dump(exclude={"name"})
    return {"dataset_id": dataset.id, "path_head": file.path[:INDEXED], **said}


def _file(row: Row[Any]) -> ArchiveFile:
    said = {name: value for name, value in row._mapping.items() if name not in ("dataset_id", "path_head")}
    return ArchiveFile.model_validate({**said, "name": FilePath(row.path).name})
