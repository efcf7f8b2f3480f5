"""A dataset's files, exports and uploads, where the database is of another moment than the lake.

What the database knows and the lake does not have is forgotten, and told as lost; what only the lake has comes back.
"""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from sqlalchemy import delete, select

from tarn.archive import file_index as records
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import upload_blocks, uploads
from tarn.integrity import archive_checks as checks
from tarn.lake import export_records as exports
from tarn.model.export import ExportRecord
from tarn.model.file import ArchiveFile
from tarn.model.finding import FindingKind
from tarn.model.recovery import KnownFile, Reconciled
from tarn.storage.store import Missing, Store

LOST = (FindingKind.BLOB_MISSING, FindingKind.BLOB_SIZE)


class LostBlock(NamedTuple):
    """A part of an upload that is not where it should be."""

    upload: str
    start: int


def plan(database: Database, store: Store, dataset: Dataset, said: Reconciled) -> None:
    """Find what differs. Changes nothing."""
    for wrong in checks.each(database, store, dataset, lambda _: None):
        if wrong.kind in LOST:
            with database.read() as connection:
                file = records.find(connection, dataset, wrong.file_id)
            if file is not None:
                said.lost.files.append(_known(file))
        elif wrong.kind is FindingKind.FILE_UNRECORDED and store.head(dataset.layout.blob_data(wrong.checksum)):
            written = checks.written(store, dataset.layout.file_record(wrong.checksum, wrong.file_id))
            if written is not None:
                said.returned.append(_known(written))
    said.lost.exports = [made.name for made in _lost_exports(database, store, dataset, said)]
    said.lost.uploads = sorted({block.upload for block in _lost_blocks(database, store, dataset)})


def apply(database: Database, store: Store, dataset: Dataset, said: Reconciled) -> None:
    """Do it. Running it again is the same as once."""
    checks.repair(database, store, dataset, lambda _: None)
    for wrong in checks.each(database, store, dataset, lambda _: None):
        if wrong.kind in LOST:
            with database.write() as connection:
                file = records.find(connection, dataset, wrong.file_id)
                if file is not None:
                    records.forget(connection, dataset, file)
            store.delete([dataset.layout.file_record(wrong.checksum, wrong.file_id)])
    gone = [made.kind for made in _lost_exports(database, store, dataset, said)]
    blocks = [*_lost_blocks(database, store, dataset)]
    with database.write() as connection:
        if gone:
            exports.delete_records(connection, dataset, gone)
        for block in blocks:
            own = upload_blocks.c.upload == block.upload, upload_blocks.c.start == block.start
            connection.execute(delete(upload_blocks).where(*own))


def _lost_exports(database: Database, store: Store, dataset: Dataset, said: Reconciled) -> Iterator[ExportRecord]:
    """Exports that are not there as they are recorded, or were made of a snapshot that is lost."""
    with database.read() as connection:
        found = exports.records_of(connection, dataset)
    lost = {one.id for one in said.lost.snapshots}
    for made in found.values():
        if made.snapshot in lost or _sha1(store, dataset.layout.export(made.kind, made.name)) != made.sha1:
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
    there = {entry.path: entry.size for entry in store.list(dataset.layout.uploads)}
    for row in rows:
        if there.get(dataset.layout.upload_part(row.upload, row.part)) != row.end - row.start:
            yield LostBlock(row.upload, row.start)


def _sha1(store: Store, path: str) -> str | None:
    digest = hashlib.sha1(usedforsecurity=False)
    try:
        for chunk in store.stream(path):
            digest.update(chunk)
    except Missing:
        return None
    return digest.hexdigest()


def _known(file: ArchiveFile) -> KnownFile:
    return KnownFile(id=file.id, path=file.path, checksum=file.checksum, size=file.size, tenant=file.tenant)
