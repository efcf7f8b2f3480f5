"""Garbage collection of an archive: unreferenced contents, incomplete puts and abandoned uploads.

A content is deleted while its lock is held, after checking again that nothing refers to it: a put of the same content
has announced it before, or waits for the lock and then stores it again. If a process died during a put after writing
the file's record, the put counts as committed: the file is recorded in the index, not deleted.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import groupby, islice
from typing import TypeVar

import structlog
from pydantic import ValidationError
from sqlalchemy import select

from tarn.archive import file_index, texts, uploads
from tarn.archive.file_index import Announced
from tarn.datasets.config_documents import require_alive
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import uploads as uploads_table
from tarn.model.file import ArchiveFile
from tarn.model.ids import now
from tarn.model.names import Checksum
from tarn.model.work.cancellation import checked
from tarn.settings import Settings
from tarn.storage.store import Entry, ObjectMissing, Store
from tarn.storage.store_clock import store_time

log = structlog.get_logger(__name__)

QUERY_CHUNK = 500
"""Contents per query of the index."""

AT_ONCE = 50
"""Contents that are deleted in one transaction."""

Item = TypeVar("Item")

Blob = tuple[Checksum, list[Entry]]


class Collector:
    """Garbage collector of archives, one dataset at a time."""

    def __init__(
        self, database: Database, store: Store, settings: Settings, reached: Callable[[str], None] = lambda _: None
    ) -> None:
        self._database = database
        self._store = store
        self._settings = settings
        self._reached = reached

    def run(self, dataset: Dataset, past: datetime, dry_run: bool = False) -> Iterator[list[Entry]]:
        """Delete what is not needed and was not written after `past`. Yields the deleted objects in batches.

        1. finish   puts that were announced long ago: record the file if its record exists, else withdraw it
        2. uploads  that received nothing for longer than their expiry
        3. blobs    to which no file refers

        With `dry_run`, yield what would be deleted. Safe to repeat after a crash. Raises DatasetNotFound, Unavailable.
        """
        if not dry_run:
            self._finish(dataset)
            self._expire(dataset)
        abandoned = store_time(self._store) - timedelta(seconds=self._settings.upload_expiry)
        yield from self._uploads(dataset, abandoned, dry_run)
        for some in _some(self._blobs(dataset, past), QUERY_CHUNK):
            with self._database.read() as connection:
                unreferenced = file_index.unreferenced(connection, dataset, [checksum for checksum, _ in some])
            for few in _some(iter([blob for blob in some if blob[0] in unreferenced]), AT_ONCE):
                yield self._delete(dataset, few, dry_run)
        if not dry_run:
            for folder in (dataset.layout.uploads, dataset.layout.archive):
                self._store.sweep_unfinished(folder, abandoned)
            with self._database.write() as connection:
                file_index.require_active(connection, dataset)
                file_index.touch_collected(connection, dataset, past)

    def _finish(self, dataset: Dataset) -> None:
        left = True
        while left:
            with self._database.read() as connection:
                left = bool(dead := file_index.expired(connection, dataset, now()))
            for announced in checked(dead):
                self._finish_one(dataset, announced)

    def _finish_one(self, dataset: Dataset, announced: Announced) -> None:
        with self._database.write() as connection:
            file_index.hold(self._database, connection, dataset, [announced.checksum])
            file = self._record(dataset, announced)
            if file is None:
                file_index.withdraw(connection, [announced.id])
            elif file_index.record(connection, dataset, announced.id, file):
                file_index.touch_updated(connection, dataset)
                log.warning("recorded a file whose put did not finish", dataset=dataset.name, file=file.id)

    def _record(self, dataset: Dataset, announced: Announced) -> ArchiveFile | None:
        try:
            text = self._store.get(dataset.layout.file_record(announced.checksum, announced.file_id))
            return ArchiveFile.model_validate_json(text)
        except (ObjectMissing, ValidationError):
            return None

    def _expire(self, dataset: Dataset) -> None:
        """Delete the rows of expired uploads; their objects are old enough by now to be collected."""
        past = uploads_table.c.dataset_id == dataset.id, uploads_table.c.expires < now()
        with self._database.write() as connection:
            uploads.forget(connection, list(connection.execute(select(uploads_table.c.id).where(*past)).scalars()))

    def _uploads(self, dataset: Dataset, abandoned: datetime, dry_run: bool) -> Iterator[list[Entry]]:
        """Delete objects below `uploads/` that are old enough and belong to no upload in progress. Yields them."""
        old = (entry for entry in checked(self._store.list(dataset.layout.uploads)) if entry.modified <= abandoned)
        for some in _some(old, QUERY_CHUNK):
            ids = {entry.path.split("/")[-2] for entry in some}
            with self._database.read() as connection:
                in_progress = select(uploads_table.c.id).where(
                    uploads_table.c.id.in_(ids), uploads_table.c.file.is_(None)
                )
                kept = set(connection.execute(in_progress).scalars())
            deleted = [entry for entry in some if entry.path.split("/")[-2] not in kept]
            if not dry_run:
                self._store.delete([entry.path for entry in deleted])
            yield deleted

    def _blobs(self, dataset: Dataset, past: datetime) -> Iterator[Blob]:
        """Yield each content with its objects, if none of them was written after `past` and it has no record."""
        listing = checked(self._store.list(dataset.layout.archive))
        for folder, listed in groupby(listing, lambda entry: entry.path.rsplit("/", 1)[0]):
            entries = list(listed)
            name = folder.rsplit("/", 1)[-1]
            try:
                checksum = Checksum(name)
            except ValueError:
                log.warning("unexpected folder in the archive; it is ignored", dataset=dataset.name, folder=folder)
                continue
            # A record that the index lacks is left to a verification, which may add it to the index.
            has_record = any(entry.path.endswith(".json") for entry in entries)
            if not has_record and all(entry.modified <= past for entry in entries):
                yield checksum, entries

    def _delete(self, dataset: Dataset, blobs: Sequence[Blob], dry_run: bool) -> list[Entry]:
        """Delete the contents to which still no file refers, and return the deleted objects."""
        if dry_run:
            return [entry for _, entries in blobs for entry in entries]
        checksums = [checksum for checksum, _ in blobs]
        with self._database.write() as connection:
            file_index.hold(self._database, connection, dataset, checksums)
            file_index.require_active(connection, dataset)
            unreferenced = file_index.unreferenced(connection, dataset, checksums)
            deleted = [entry for checksum, entries in blobs if checksum in unreferenced for entry in entries]
            texts.forget(connection, dataset, unreferenced)
            self._reached("collecting")
            require_alive(connection)
            self._store.delete([entry.path for entry in deleted])
        return deleted


def _some(items: Iterator[Item], most: int) -> Iterator[list[Item]]:
    while some := list(islice(items, most)):
        yield some
