"""Checks of the archive: the SQL index and the record files list the same files, and their contents exist.

The archive is listed once, ordered by checksum, and compared with the index in steps. Files are put and deleted
concurrently; so each mismatch is checked again on its own before it is reported. No content is read.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import NamedTuple

import structlog
from pydantic import ValidationError
from sqlalchemy import Connection

from tarn.archive import file_index, texts
from tarn.archive.reservations import NO_FILE
from tarn.archive.texts import CountedText
from tarn.datasets.config_documents import require_alive
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.integrity.findings import Findings
from tarn.model.datasets.finding import FindingKind
from tarn.model.file import ArchiveFile
from tarn.model.names import Checksum, FileId, Origin, TenantName
from tarn.model.work.cancellation import checked
from tarn.model.work.job import Report
from tarn.storage.store import ObjectMissing, Store

log = structlog.get_logger(__name__)

STEP = 500
"""Contents that are compared between two progress reports."""

FIRST, LAST = Checksum("0" * 64), Checksum("f" * 64)

TEXT = ".txt"

RECORD = re.compile(rf"({FileId.pattern})\.json")


class ContentObjects(NamedTuple):
    """The objects in the archive that belong to one content."""

    checksum: Checksum
    size: int | None
    """Size of the data; None: it is missing."""
    records: frozenset[str]
    texts: dict[str, int]
    """Sizes of the texts, by origin."""


class Mismatch(NamedTuple):
    """A mismatch that concerns a file."""

    kind: FindingKind
    checksum: Checksum
    file_id: FileId
    """The file; `NO_FILE` for a text."""
    detail: str
    origin: Origin | None = None
    """The text's origin; None: it does not concern a text."""


def check(database: Database, store: Store, dataset: Dataset, findings: Findings, report: Report) -> None:
    """Add a finding for every mismatch in the archive."""
    for mismatch in each(database, store, dataset, report):
        missing = mismatch.kind in (FindingKind.BLOB_MISSING, FindingKind.BLOB_SIZE)
        layout = dataset.layout
        path = (
            layout.blob_data(mismatch.checksum) if missing else layout.file_record(mismatch.checksum, mismatch.file_id)
        )
        if mismatch.origin is not None:
            path = layout.text(mismatch.checksum, mismatch.origin)
        findings.add(mismatch.kind, mismatch.detail, path)


def repair(database: Database, store: Store, dataset: Dataset, report: Report) -> None:
    """Repair: index the files that only the archive has, and write the record files that only the index has."""
    for mismatch in each(database, store, dataset, report):
        if mismatch.origin is not None:
            with database.write() as connection:
                _recount(database, connection, store, dataset, mismatch.checksum, mismatch.origin)
            continue
        if mismatch.kind not in (FindingKind.FILE_UNRECORDED, FindingKind.FILE_RECORD_MISSING):
            continue
        path = dataset.layout.file_record(mismatch.checksum, mismatch.file_id)
        with database.write() as connection:
            file_index.hold(database, connection, dataset, [mismatch.checksum])
            file_index.require_active(connection, dataset)
            known = file_index.find(connection, dataset, mismatch.file_id)
            record = written(store, path)
            if known is None and record is not None:
                file_index.add(connection, dataset, record)
                file_index.touch_updated(connection, dataset)
            elif known is not None and record is None:
                require_alive(connection)
                store.put(path, known.to_json())
        log.warning(
            "repaired the index entry or the record of a file",
            dataset=dataset.name,
            file=mismatch.file_id,
            kind=mismatch.kind,
        )


def each(database: Database, store: Store, dataset: Dataset, report: Report) -> Iterator[Mismatch]:
    """Yield every confirmed mismatch between the archive and the index."""
    listing = _listed(store, dataset)
    after, is_last = FIRST, False
    while not is_last:
        report(None)
        some = list(islice(listing, STEP))
        is_last = len(some) < STEP
        last = LAST if is_last else some[-1].checksum
        for mismatch in checked(_compared(database, dataset, some, after, last)):
            if _is_confirmed(database, store, dataset, mismatch):
                yield mismatch
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
            continue  # not written by Tarn


def _compared(
    database: Database, dataset: Dataset, listed: Iterable[ContentObjects], after: Checksum, last: Checksum
) -> list[Mismatch]:
    """Return the mismatches between a part of the listing and the index, which is read after it."""
    by_checksum = {one.checksum: one for one in listed}
    mismatches: list[Mismatch] = []
    known: set[str] = set()
    contents: set[str] = set()
    """Contents that a file refers to: texts of other contents are left to a vacuum."""
    with database.read() as connection:
        counted = {(text.checksum, text.origin): text.size for text in texts.between(connection, dataset, after, last)}
        for file in file_index.between(connection, dataset, after, last):
            known.add(file.id)
            contents.add(file.checksum)
            stored = by_checksum.get(file.checksum)
            if stored is None or stored.size is None:
                detail = f"the content of {file.path!r} is missing"
                mismatches.append(Mismatch(FindingKind.BLOB_MISSING, file.checksum, file.id, detail))
            elif stored.size != file.size:
                detail = f"it has {stored.size} bytes instead of {file.size}"
                mismatches.append(Mismatch(FindingKind.BLOB_SIZE, file.checksum, file.id, detail))
            if stored is None or file.id not in stored.records:
                detail = f"the index has {file.path!r}, but its record file is missing"
                mismatches.append(Mismatch(FindingKind.FILE_RECORD_MISSING, file.checksum, file.id, detail))
    for one in by_checksum.values():
        if one.checksum in contents:
            mismatches += _miscounted(one, counted)
        for name in sorted(one.records - known):
            detail = "the index does not have the file of this record"
            mismatches.append(Mismatch(FindingKind.FILE_UNRECORDED, one.checksum, FileId(name), detail))
    for (checksum, origin), size in counted.items():
        stored = by_checksum.get(checksum)
        if stored is None or origin not in stored.texts:
            detail = f"{size} bytes are counted for it, but it is missing"
            mismatches.append(Mismatch(FindingKind.TEXT_MISCOUNTED, checksum, NO_FILE, detail, origin))
    return mismatches


def _miscounted(one: ContentObjects, counted: dict[tuple[Checksum, Origin], int]) -> Iterator[Mismatch]:
    """Yield the texts of a content that are not counted, or with a wrong size."""
    for name, size in one.texts.items():
        try:
            origin = Origin(name)
        except ValueError:
            continue  # not written by Tarn
        known = counted.get((one.checksum, origin))
        if known != size:
            detail = f"it has {size} bytes, but {known or 0} are counted against a quota"
            yield Mismatch(FindingKind.TEXT_MISCOUNTED, one.checksum, NO_FILE, detail, origin)


def _recount(
    database: Database, connection: Connection, store: Store, dataset: Dataset, checksum: Checksum, origin: Origin
) -> None:
    """Count a text with its size in the archive: for the tenant that put it, or else one that put a file with it."""
    file_index.hold(database, connection, dataset, [checksum])
    file_index.require_active(connection, dataset)
    entry = store.head(dataset.layout.text(checksum, origin))
    if entry is None:
        texts.forget(connection, dataset, [checksum], origin)
        return
    known = texts.find(connection, dataset, checksum, origin)
    files = file_index.page(connection, dataset, 1, checksum=checksum)
    if known is not None or files:
        tenant = TenantName(files[0].tenant) if known is None else known.tenant
        texts.recount(connection, dataset, CountedText(checksum, origin, tenant, entry.size))
    log.warning("corrected the counted size of a text", dataset=dataset.name, checksum=checksum, origin=origin)


def _is_confirmed(database: Database, store: Store, dataset: Dataset, mismatch: Mismatch) -> bool:
    """Return whether the mismatch still exists, in a transaction of its own."""
    if mismatch.origin is None:
        with database.read() as connection:
            return _holds(connection, store, dataset, mismatch)
    with database.write() as connection:
        # Replacing a text holds the lock of its content from before the write until it is counted.
        file_index.hold(database, connection, dataset, [mismatch.checksum])
        return _holds(connection, store, dataset, mismatch)


def _holds(connection: Connection, store: Store, dataset: Dataset, mismatch: Mismatch) -> bool:
    """Return whether the mismatch still exists: the file may have been put or deleted concurrently."""
    if mismatch.origin is not None:
        counted = texts.find(connection, dataset, mismatch.checksum, mismatch.origin)
        text = store.head(dataset.layout.text(mismatch.checksum, mismatch.origin))
        is_known = bool(file_index.known_checksums(connection, dataset, [mismatch.checksum]))
        has = None if text is None or (counted is None and not is_known) else text.size
        return has != (None if counted is None else counted.size)
    known = file_index.find(connection, dataset, mismatch.file_id)
    record = dataset.layout.file_record(mismatch.checksum, mismatch.file_id)
    if mismatch.kind is FindingKind.FILE_UNRECORDED:
        # A file that is announced will be recorded by the put in progress.
        is_known = file_index.is_recorded_or_announced(connection, dataset, mismatch.file_id)
        return not is_known and store.head(record) is not None
    if known is None:
        return False
    if mismatch.kind is FindingKind.FILE_RECORD_MISSING:
        return store.head(record) is None
    entry = store.head(dataset.layout.blob_data(mismatch.checksum))
    return entry is None or entry.size != known.size


def written(store: Store, path: str) -> ArchiveFile | None:
    """Read a record file. Return None if it is missing or invalid."""
    try:
        return ArchiveFile.model_validate_json(store.get(path))
    except (ObjectMissing, ValidationError):
        return None
