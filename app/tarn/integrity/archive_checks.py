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

from tarn.archive import file_index as records
from tarn.archive import texts
from tarn.archive.reservations import NO_FILE
from tarn.archive.texts import CountedText
from tarn.datasets.documents import require_alive
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.integrity.findings import Findings
from tarn.model.cancellation import checked
from tarn.model.file import ArchiveFile
from tarn.model.finding import FindingKind
from tarn.model.job import Report
from tarn.model.names import Checksum, FileId, Origin, TenantName
from tarn.storage.store import Missing, Store

log = structlog.get_logger(__name__)

STEP = 500
"""Contents that are compared between two reports."""

FIRST, LAST = Checksum("0" * 64), Checksum("f" * 64)

TEXT = ".txt"

RECORD = re.compile(rf"({FileId.pattern})\.json")


class ContentObjects(NamedTuple):
    """What lies in the archive of one content."""

    checksum: Checksum
    size: int | None
    """Of the data; None: it is not there."""
    records: frozenset[str]
    texts: dict[str, int]
    """By origin, their sizes."""


class Mismatch(NamedTuple):
    """Something that is not as it should be with a file."""

    kind: FindingKind
    checksum: Checksum
    file_id: FileId
    """Of a text, a file that has its content, or none of them has."""
    detail: str
    origin: Origin | None = None
    """Of a text."""


def check(database: Database, store: Store, dataset: Dataset, found: Findings, report: Report) -> None:
    """Tell what is wrong with the archive."""
    for wrong in each(database, store, dataset, report):
        missing = wrong.kind in (FindingKind.BLOB_MISSING, FindingKind.BLOB_SIZE)
        layout = dataset.layout
        place = layout.blob_data(wrong.checksum) if missing else layout.file_record(wrong.checksum, wrong.file_id)
        if wrong.origin is not None:
            place = layout.text(wrong.checksum, wrong.origin)
        found.add(wrong.kind, wrong.detail, place)


def repair(database: Database, store: Store, dataset: Dataset, report: Report) -> None:
    """Record again what only the archive knows, and put again the records that only the index knows."""
    for wrong in each(database, store, dataset, report):
        if wrong.origin is not None:
            with database.write() as connection:
                _recount(database, connection, store, dataset, wrong.checksum, wrong.origin)
            continue
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


def each(database: Database, store: Store, dataset: Dataset, report: Report) -> Iterator[Mismatch]:
    """Whatever is wrong, one by one."""
    listing = _listed(store, dataset)
    after, over = FIRST, False
    while not over:
        report(None)
        some = list(islice(listing, STEP))
        over = len(some) < STEP
        last = LAST if over else some[-1].checksum
        for wrong in checked(_compared(database, dataset, some, after, last)):
            if _is_so(database, store, dataset, wrong):
                yield wrong
        after = last


def _listed(store: Store, dataset: Dataset) -> Iterator[ContentObjects]:
    entries = checked(store.list(dataset.layout.archive))
    for folder, group in groupby(entries, lambda entry: entry.path.rsplit("/", 1)[0]):
        size, named, sizes = None, set(), {}
        for entry in group:
            name = entry.path.rsplit("/", 1)[-1]
            if name == "data":
                size = entry.size
            elif name.endswith(TEXT):
                sizes[name.removesuffix(TEXT)] = entry.size
            elif record := RECORD.fullmatch(name):
                named.add(record[1])
        try:
            yield ContentObjects(Checksum(folder.rsplit("/", 1)[-1]), size, frozenset(named), sizes)
        except ValueError:
            continue  # not ours


def _compared(
    database: Database, dataset: Dataset, listed: Iterable[ContentObjects], after: Checksum, last: Checksum
) -> list[Mismatch]:
    """What differs between a part of the listing and the index, which is read after it."""
    by_checksum = {one.checksum: one for one in listed}
    wrong: list[Mismatch] = []
    known: set[str] = set()
    contents: set[str] = set()
    """Those that a file has: texts of others are left to a vacuum."""
    with database.read() as connection:
        counted = {(text.checksum, text.origin): text.size for text in texts.between(connection, dataset, after, last)}
        for file in records.between(connection, dataset, after, last):
            known.add(file.id)
            contents.add(file.checksum)
            there = by_checksum.get(file.checksum)
            if there is None or there.size is None:
                detail = f"{file.path!r} has this content, and it is not there"
                wrong.append(Mismatch(FindingKind.BLOB_MISSING, file.checksum, file.id, detail))
            elif there.size != file.size:
                detail = f"it has {there.size} bytes, and should have {file.size}"
                wrong.append(Mismatch(FindingKind.BLOB_SIZE, file.checksum, file.id, detail))
            if there is None or file.id not in there.records:
                detail = f"the index knows {file.path!r}, and its record is not there"
                wrong.append(Mismatch(FindingKind.FILE_RECORD_MISSING, file.checksum, file.id, detail))
    for one in by_checksum.values():
        if one.checksum in contents:
            wrong += _miscounted(one, counted)
        for name in sorted(one.records - known):
            detail = "the index does not know the file that this record tells of"
            wrong.append(Mismatch(FindingKind.FILE_UNRECORDED, one.checksum, FileId(name), detail))
    for (checksum, origin), size in counted.items():
        there = by_checksum.get(checksum)
        if there is None or origin not in there.texts:
            detail = f"{size} bytes are counted for it, and it is not there"
            wrong.append(Mismatch(FindingKind.TEXT_MISCOUNTED, checksum, NO_FILE, detail, origin))
    return wrong


def _miscounted(one: ContentObjects, counted: dict[tuple[Checksum, Origin], int]) -> Iterator[Mismatch]:
    """Texts of a content that are not counted, or not as they are."""
    for name, size in one.texts.items():
        try:
            origin = Origin(name)
        except ValueError:
            continue  # not ours
        known = counted.get((one.checksum, origin))
        if known != size:
            detail = f"it has {size} bytes, and {'none' if known is None else known} are counted against a quota"
            yield Mismatch(FindingKind.TEXT_MISCOUNTED, one.checksum, NO_FILE, detail, origin)


def _recount(
    database: Database, connection: Connection, store: Store, dataset: Dataset, checksum: Checksum, origin: Origin
) -> None:
    """Count a text as it lies in the archive: for who put it, or else for who put a file with its content."""
    records.hold(database, connection, dataset, [checksum])
    records.require_active(connection, dataset)
    entry = store.head(dataset.layout.text(checksum, origin))
    if entry is None:
        texts.forget(connection, dataset, [checksum], origin)
        return
    known = texts.find(connection, dataset, checksum, origin)
    files = records.page(connection, dataset, 1, checksum=checksum)
    if known is not None or files:
        tenant = TenantName(files[0].tenant) if known is None else known.tenant
        texts.recount(connection, dataset, CountedText(checksum, origin, tenant, entry.size))
    log.warning("a text is counted", dataset=dataset.name, checksum=checksum, origin=origin)


def _is_so(database: Database, store: Store, dataset: Dataset, wrong: Mismatch) -> bool:
    if wrong.origin is None:
        with database.read() as connection:
            return _holds(connection, store, dataset, wrong)
    with database.write() as connection:
        # Who replaces a text holds its content from before it is written until it is counted.
        records.hold(database, connection, dataset, [wrong.checksum])
        return _holds(connection, store, dataset, wrong)


def _holds(connection: Connection, store: Store, dataset: Dataset, wrong: Mismatch) -> bool:
    """Whether it is still so: somebody may have been putting or deleting the file."""
    if wrong.origin is not None:
        counted = texts.find(connection, dataset, wrong.checksum, wrong.origin)
        text = store.head(dataset.layout.text(wrong.checksum, wrong.origin))
        is_known = bool(records.known_checksums(connection, dataset, [wrong.checksum]))
        has = None if text is None or (counted is None and not is_known) else text.size
        return has != (None if counted is None else counted.size)
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
