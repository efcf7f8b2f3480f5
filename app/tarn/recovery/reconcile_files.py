"""Reconcile files, exports and uploads of a dataset after database and lake were restored to different moments.

What the database has and the lake lacks is removed from the database, and reported as lost; files that only the lake
has are indexed again.
"""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from sqlalchemy import delete, select

from tarn.archive import file_index
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import upload_blocks, uploads
from tarn.integrity import archive_checks
from tarn.lake import export_records
from tarn.model.datasets.export import ExportRecord
from tarn.model.datasets.finding import FindingKind
from tarn.model.datasets.recovery import Reconciled, RecordedFile
from tarn.model.file import ArchiveFile
from tarn.storage.store import ObjectMissing, Store

LOST = (FindingKind.BLOB_MISSING, FindingKind.BLOB_SIZE)


class LostBlock(NamedTuple):
    """A block of an upload whose object is missing or has another size."""

    upload: str
    start: int


def plan(database: Database, store: Store, dataset: Dataset, report: Reconciled) -> None:
    """Add the differences to the report. Changes nothing else."""
    for problem in archive_checks.each(database, store, dataset, lambda _: None):
        if problem.kind in LOST:
            with database.read() as connection:
                file = file_index.find(connection, dataset, problem.file_id)
            if file is not None:
                report.lost.files.append(_known(file))
        elif problem.kind is FindingKind.FILE_UNRECORDED and store.head(dataset.layout.blob_data(problem.checksum)):
            stored = archive_checks.written(store, dataset.layout.file_record(problem.checksum, problem.file_id))
            if stored is not None:
                report.returned.append(_known(stored))
    report.lost.exports = [export.name for export in _lost_exports(database, store, dataset, report)]
    report.lost.uploads = sorted({block.upload for block in _lost_blocks(database, store, dataset)})


def apply(database: Database, store: Store, dataset: Dataset, report: Reconciled) -> None:
    """Resolve the differences. Safe to repeat."""
    archive_checks.repair(database, store, dataset, lambda _: None)
    for problem in archive_checks.each(database, store, dataset, lambda _: None):
        if problem.kind in LOST:
            with database.write() as connection:
                file = file_index.find(connection, dataset, problem.file_id)
                if file is not None:
                    file_index.forget(connection, dataset, file)
            store.delete([dataset.layout.file_record(problem.checksum, problem.file_id)])
    lost_kinds = [export.kind for export in _lost_exports(database, store, dataset, report)]
    blocks = [*_lost_blocks(database, store, dataset)]
    with database.write() as connection:
        if lost_kinds:
            export_records.delete_records(connection, dataset, lost_kinds)
        for block in blocks:
            own = upload_blocks.c.upload == block.upload, upload_blocks.c.start == block.start
            connection.execute(delete(upload_blocks).where(*own))


def _lost_exports(database: Database, store: Store, dataset: Dataset, report: Reconciled) -> Iterator[ExportRecord]:
    """Yield the exports that are missing, differ from their record, or were made from a lost snapshot."""
    with database.read() as connection:
        exports = export_records.records_of(connection, dataset)
    lost_ids = {one.id for one in report.lost.snapshots}
    for made in exports.values():
        if made.snapshot in lost_ids or _sha1(store, dataset.layout.export(made.kind, made.name)) != made.sha1:
            yield made


def _lost_blocks(database: Database, store: Store, dataset: Dataset) -> Iterator[LostBlock]:
    with database.read() as connection:
        rows = connection.execute(
            select(upload_blocks)
            .join(uploads, uploads.c.id == upload_blocks.c.upload)
            .where(uploads.c.dataset_id == dataset.id)
        ).all()
    if not rows:
        return
    sizes = {entry.path: entry.size for entry in store.list(dataset.layout.uploads)}
    for row in rows:
        if sizes.get(dataset.layout.upload_part(row.upload, row.part)) != row.end - row.start:
            yield LostBlock(row.upload, row.start)


def _sha1(store: Store, path: str) -> str | None:
    digest = hashlib.sha1(usedforsecurity=False)
    try:
        for chunk in store.stream(path):
            digest.update(chunk)
    except ObjectMissing:
        return None
    return digest.hexdigest()


def _known(file: ArchiveFile) -> RecordedFile:
    return RecordedFile(id=file.id, path=file.path, checksum=file.checksum, size=file.size, tenant=file.tenant)
