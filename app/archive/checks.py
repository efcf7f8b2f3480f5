"""The archive, looked over: that the index and the records tell of the same files, and that their contents are there.

The archive is listed once, in the order of checksums, and the index is read beside it. Files are put and deleted
meanwhile; so whatever looks wrong is looked at again, by itself, before it is told. No content is read.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import NamedTuple

import structlog
from pydantic import ValidationError
from sqlalchemy import Connection

from app.archive import records
from app.db.engine import Database
from app.lake.datasets import Dataset
from app.lake.documents import require_alive
from app.lake.findings import Findings
from app.model.file import ArchiveFile
from app.model.finding import FindingKind
from app.model.job import Report
from app.model.names import Checksum, FileId
from app.storage.store import Missing, Store

log = structlog.get_logger(__name__)

STEP = 500
"""Contents that are compared between two reports."""

FIRST, LAST = Checksum("0" * 64), Checksum("f" * 64)

RECORD = re.compile(rf"({FileId.pattern})\.json")


class Listed(NamedTuple):
    """What lies in the archive of one content."""

    checksum: Checksum
    size: int | None
    """Of the data; None: it is not there."""
    records: frozenset[str]


class Wrong(NamedTuple):
    """Something that is not as it should be with a file."""

    kind: FindingKind
    checksum: Checksum
    file_id: FileId
    detail: str


def check(database: Database, store: Store, dataset: Dataset, found: Findings, report: Report) -> None:
    """Tell what is wrong with the archive."""
    for wrong in each(database, store, dataset, report):
        missing = wrong.kind in (FindingKind.BLOB_MISSING, FindingKind.BLOB_SIZE)
        layout = dataset.layout
        place = layout.blob_data(wrong.checksum) if missing else layout.file_record(wrong.checksum, wrong.file_id)
        found.add(wrong.kind, wrong.detail, place)


def mend(database: Database, store: Store, dataset: Dataset, report: Report) -> None:
    """Record again what only the archive knows, and put again the records that only the index knows."""
    for wrong in each(database, store, dataset, report):
        if wrong.kind not in (FindingKind.FILE_UNRECORDED, FindingKind.FILE_RECORD_MISSING):
            continue
        path = dataset.layout.file_record(wrong.checksum, wrong.file_id)
        with database.write() as connection:
            records.hold(database, connection, dataset, [wrong.checksum])
            records.require_active(connection, dataset)
            known = records.find(connection, dataset, wrong.file_id)
            record = written(store, path)
            if known is None and record is not None:
                records.add(connection, dataset, record)
                records.moved(connection, dataset)
            elif known is not None and record is None:
                require_alive(connection)
                store.put(path, known.to_json())
        log.warning("a file is mended", dataset=dataset.name, file=wrong.file_id, kind=wrong.kind)


def each(database: Database, store: Store, dataset: Dataset, report: Report) -> Iterator[Wrong]:
    """Whatever is wrong, one by one."""
    listing = _listed(store, dataset)
    after, over = FIRST, False
    while not over:
        report(None)
        some = list(islice(listing, STEP))
        over = len(some) < STEP
        last = LAST if over else some[-1].checksum
        for wrong in _compared(database, dataset, some, after, last):
            with database.read() as connection:
                if _holds(connection, store, dataset, wrong):
                    yield wrong
        after = last


def _listed(store: Store, dataset: Dataset) -> Iterator[Listed]:
    entries = store.list(dataset.layout.archive)
    for folder, group in groupby(entries, lambda entry: entry.path.rsplit("/", 1)[0]):
        size, named = None, set()
        for entry in group:
            name = entry.path.rsplit("/", 1)[-1]
            if name == "data":
                size = entry.size
            elif record := RECORD.fullmatch(name):
                named.add(record[1])
        try:
            yield Listed(Checksum(folder.rsplit("/", 1)[-1]), size, frozenset(named))
        except ValueError:
            continue  # not ours


def _compared(
    database: Database, dataset: Dataset, listed: Iterable[Listed], after: Checksum, last: Checksum
) -> list[Wrong]:
    """What differs between a part of the listing and the index, which is read after it."""
    by_checksum = {one.checksum: one for one in listed}
    wrong: list[Wrong] = []
    known: set[str] = set()
    with database.read() as connection:
        for file in records.between(connection, dataset, after, last):
            known.add(file.id)
            there = by_checksum.get(file.checksum)
            if there is None or there.size is None:
                detail = f"{file.path!r} has this content, and it is not there"
                wrong.append(Wrong(FindingKind.BLOB_MISSING, file.checksum, file.id, detail))
            elif there.size != file.size:
                detail = f"it has {there.size} bytes, and should have {file.size}"
                wrong.append(Wrong(FindingKind.BLOB_SIZE, file.checksum, file.id, detail))
            if there is None or file.id not in there.records:
                detail = f"the index knows {file.path!r}, and its record is not there"
                wrong.append(Wrong(FindingKind.FILE_RECORD_MISSING, file.checksum, file.id, detail))
    for one in by_checksum.values():
        for name in sorted(one.records - known):
            detail = "the index does not know the file that this record tells of"
            wrong.append(Wrong(FindingKind.FILE_UNRECORDED, one.checksum, FileId(name), detail))
    return wrong


def _holds(connection: Connection, store: Store, dataset: Dataset, wrong: Wrong) -> bool:
    """Whether it is still so: somebody may have been putting or deleting the file."""
    known = records.find(connection, dataset, wrong.file_id)
    record = dataset.layout.file_record(wrong.checksum, wrong.file_id)
    if wrong.kind is FindingKind.FILE_UNRECORDED:
        # One that is announced will be recorded.
        return not records.is_wanted(connection, dataset, wrong.file_id) and store.head(record) is not None
    if known is None:
        return False
    if wrong.kind is FindingKind.FILE_RECORD_MISSING:
        return store.head(record) is None
    entry = store.head(dataset.layout.blob_data(wrong.checksum))
    return entry is None or entry.size != known.size


def written(store: Store, path: str) -> ArchiveFile | None:
    """What a record says; None: it is not there, or says nothing."""
    try:
        return ArchiveFile.model_validate_json(store.get(path))
    except (Missing, ValidationError):
        return None
