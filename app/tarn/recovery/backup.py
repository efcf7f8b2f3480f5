"""Back up the database and the lake at one moment, while both are in use.

    1. pin    report every snapshot as being read, as a reader does: no vacuum deletes what is needed
    2. dump   every table in one transaction: the backup has the state of this moment
    3. copy   what that state names, and documents; objects that the backup store already has are not read
    4. check  that nothing of it was deleted meanwhile (a dataset, or a content of the archive); if so, start again
              from 1, without copying again what was copied
    5. finish put `backup.json`: only then the backup exists

An object that the lake lacks twice in a row does not prevent a backup: it is reported, and listed in the backup.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from itertools import groupby, islice

import orjson
import structlog

from tarn.db import dump, migrate
from tarn.db.engine import Database
from tarn.errors import Unavailable
from tarn.model.datasets.recovery import BackupManifest, DumpedHead, DumpedTable, MissingFile
from tarn.model.ids import now
from tarn.recovery.backup_contents import ArchivedFiles, DatasetContents, DumpedDataset, dumped_datasets
from tarn.storage.backup_store import BackupObject, BackupStore, object_of
from tarn.storage.layout import Layout
from tarn.storage.store import Entry, ObjectMissing, Store

log = structlog.get_logger(__name__)

PinCallback = Callable[[Iterable[str]], None]
"""Callback that pins every snapshot of the datasets with these ids. They are pinned when it returns."""

TRIES = 5

COPIERS = 8
"""Objects that are copied concurrently."""

BATCH = 512
"""Objects per batch, after which the copies are synced."""

SMALL = 4 << 20
"""Bytes up to which an object is read into memory."""


@dataclass(slots=True)
class CopyCounts:
    """Counts and sizes of the copied objects, and of all objects of the backup."""

    objects: int = 0
    size: int = 0
    copied: int = 0
    copied_size: int = 0


@dataclass(slots=True)
class DumpedState:
    """The part of the dump's state that the copy needs."""

    at: datetime
    revision: str
    datasets: list[DumpedDataset]
    tables: list[DumpedTable] = field(default_factory=list)


class Backup:
    """Makes and removes backups of one lake."""

    def __init__(
        self,
        database: Database,
        store: Store,
        backup_store: BackupStore,
        lake: str,
        pin: PinCallback,
        reached: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._database = database
        self._store = store
        self._backup_store = backup_store
        self._lake = lake
        self._pin = pin
        self._reached = reached

    def run(self) -> BackupManifest:
        """Make a backup. After a crash, run it again: it copies only what was not copied yet.

        Raises Unavailable if datasets are deleted faster than they can be copied, and what database and stores raise.
        """
        missing_before: list[MissingFile] = []
        for _ in range(TRIES):
            backup = self._backup_store.new()
            counts = CopyCounts()
            with self._database.read() as connection:
                ids = [one.dataset.id for one in dumped_datasets(connection)]
            self._pin(ids)
            self._reached("pinned")
            state = self._dump(backup)
            self._reached("dumped")
            missing: list[MissingFile] = []
            index = self._backup_store.put_index(backup, self._copy_datasets(backup, state, counts, missing))
            self._reached("copied")
            if not missing or missing == missing_before:
                manifest = self._manifest(backup, state, index, counts, missing)
                self._backup_store.finish(manifest)
                self._reached("finished")
                return manifest
            log.info("objects were deleted while they were copied; starting the backup again", missing=len(missing))
            missing_before = missing
            self._backup_store.remove(backup)
        raise Unavailable(
            f"all {TRIES} attempts to back up failed, as objects were deleted meanwhile: {missing_before[0].path}"
        )

    def keep(self, most: int) -> int:
        """Remove all but the newest `most` backups, and the objects that none of them needs. Return how many objects.

        No backup may be in progress in this backup store.
        """
        backups = self._backup_store.finished()
        for backup in backups[:-most]:
            self._backup_store.remove(backup)
        backups_kept = [self._backup_store.read(backup) for backup in backups[-most:]]
        return self._backup_store.sweep(
            lambda: (item for one in backups_kept for item in self._backup_store.index(one))
        )

    def _dump(self, backup: str) -> DumpedState:
        with self._database.read() as connection:
            state = DumpedState(now(), migrate.revision(connection) or "", dumped_datasets(connection))
            for table in dump.dumped():
                state.tables.append(self._backup_store.put_table(backup, table.name, dump.lines(connection, table)))
        return state

    # Step 3

    def _copy_datasets(
        self, backup: str, state: DumpedState, counts: CopyCounts, missing: list[MissingFile]
    ) -> Iterator[BackupObject]:
        """Copy what is needed, and yield the copied objects. At the end `missing` is complete."""
        top = (self._store.head(path) for path in (Layout.lake, Layout.index, Layout.config))
        yield from self._copy_entries("", (entry for entry in top if entry is not None), counts, lambda _: None)
        former = Layout.versions.folder
        yield from self._copy_entries(former, self._store.list(former), counts, lambda _: None)
        archived = self._archived_files(backup, state)
        next_archived = next(archived, None)
        for one in sorted(state.datasets, key=lambda one: one.dataset.id):
            while next_archived is not None and next_archived[0] < one.dataset.id:
                next_archived = next(archived, None)
            archived_files = (
                next_archived[1]
                if next_archived is not None and next_archived[0] == one.dataset.id
                else ArchivedFiles(set(), set())
            )
            contents = DatasetContents(self._store, one, archived_files)
            yield from self._copy_entries(one.dataset.layout.root, contents.entries(), counts, contents.record_deleted)
            missing += contents.missing
            self._reached(f"{one.dataset.name} copied")

    def _archived_files(self, backup: str, state: DumpedState) -> Iterator[tuple[str, ArchivedFiles]]:
        """Yield the files that the dump has, by dataset in the order of ids."""
        (files,) = (table for table in state.tables if table.table == "files")
        rows = self._backup_store.table(backup, files)
        columns = [*orjson.loads(next(rows))["columns"]]
        dataset, file, checksum = (columns.index(name) for name in ("dataset_id", "id", "checksum"))
        for of, group in groupby(map(orjson.loads, rows), lambda row: row[dataset]):
            known = ArchivedFiles(set(), set())
            for row in group:
                known.ids.add(row[file])
                known.checksums.add(row[checksum])
            yield of, known

    def _copy_entries(
        self, folder: str, entries: Iterable[Entry], counts: CopyCounts, on_deleted: Callable[[Entry], None]
    ) -> Iterator[BackupObject]:
        known = self._backup_store.known(folder) if folder else {}

        def copy(entry: Entry) -> tuple[BackupObject, bool] | Entry:
            stored = known if folder else self._backup_store.known(entry.path)
            if stored.get(object_of(entry)) == entry.size:
                return BackupObject(entry.path, object_of(entry), entry.size), False
            try:
                return self._copy(entry), True
            except ObjectMissing:
                return entry

        remaining = iter(entries)
        with ThreadPoolExecutor(COPIERS) as pool:
            while batch := list(islice(remaining, BATCH)):
                copies = list(pool.map(copy, batch))
                self._backup_store.store.sync(one[0].object for one in copies if isinstance(one, tuple) and one[1])
                for one in copies:
                    if isinstance(one, Entry):
                        on_deleted(one)
                        continue
                    held, is_new = one
                    counts.objects += 1
                    counts.size += held.size
                    counts.copied += is_new
                    counts.copied_size += held.size * is_new
                    yield held

    def _copy(self, entry: Entry) -> BackupObject:
        """Copy an object in its current state. Raises ObjectMissing."""
        if entry.size > SMALL and entry.path.endswith((".parquet", "/data")):
            # These are never overwritten, so what is read is what was listed.
            size = self._backup_store.store.put_stream(object_of(entry), self._store.stream(entry.path), durable=False)
            return BackupObject(entry.path, object_of(entry), size)
        opened, chunks = self._store.open(entry.path)
        if opened.size > SMALL:
            self._backup_store.store.put_stream(object_of(opened), chunks, durable=False)
        else:
            self._backup_store.store.put_hint(object_of(opened), b"".join(chunks))
        return BackupObject(entry.path, object_of(opened), opened.size)

    def _manifest(
        self, backup: str, state: DumpedState, index: DumpedTable, counts: CopyCounts, missing: list[MissingFile]
    ) -> BackupManifest:
        return BackupManifest(
            id=backup,
            at=state.at,
            finished=now(),
            tarn=version("tarn"),
            revision=state.revision,
            lake=self._lake,
            tables=state.tables,
            objects=counts.objects,
            size=counts.size,
            copied=counts.copied,
            copied_size=counts.copied_size,
            index=index,
            heads=[
                DumpedHead(dataset=one.dataset.name, id=one.dataset.id, seq=one.head.seq, snapshot=one.head.id)
                for one in state.datasets
            ],
            lacking=missing,
        )
