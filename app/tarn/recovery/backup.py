"""Backup: database and lake as they are at one moment, while everybody works on them.

    1. pin    say that every snapshot is being read, as a reader does: no vacuum deletes what is needed
    2. dump   every table in one transaction: this is the moment whose state the backup has
    3. copy   what that state names, and documents; what the place of backups has in this state already is not read
    4. check  that nothing of it went away meanwhile: a dataset, or a content of the archive. If so, all of it again
              from 1; what was copied is there
    5. finish put `backup.json`: until then there was no backup

What the lake itself lacks, twice in a row, is no reason to have no backup at all: it is told, and noted in it.
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
from tarn.model.ids import now
from tarn.model.recovery import BackupManifest, DumpedHead, DumpedTable, Lacking
from tarn.recovery.backup_contents import ArchivedFiles, DatasetContents, DumpedDataset, dumped_datasets
from tarn.storage.backup_store import BackupObject, BackupStore, object_of
from tarn.storage.layout import Layout
from tarn.storage.store import Entry, Missing, Store

log = structlog.get_logger(__name__)

Pin = Callable[[Iterable[str]], None]
"""Holds every snapshot of datasets, by their ids, from before it returns."""

TRIES = 5

COPIERS = 8
"""Objects that are copied at once."""

BATCH = 512
"""Objects after which the copies are made durable."""

SMALL = 4 << 20
"""Bytes up to which an object is held in memory."""


@dataclass(slots=True)
class CopyCounts:
    """What was copied, and what is there in all."""

    objects: int = 0
    size: int = 0
    copied: int = 0
    copied_size: int = 0


@dataclass(slots=True)
class DumpedState:
    """What the dump says, as far as the copy needs it."""

    at: datetime
    revision: str
    datasets: list[DumpedDataset]
    tables: list[DumpedTable] = field(default_factory=list)


class Backup:
    """Makes backups of one lake."""

    def __init__(
        self,
        database: Database,
        store: Store,
        vault: BackupStore,
        lake: str,
        pin: Pin,
        reached: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._database = database
        self._store = store
        self._vault = vault
        self._lake = lake
        self._pin = pin
        self._reached = reached

    def run(self) -> BackupManifest:
        """Make one. Run again after a crash, it copies only what is not there yet.

        Raises Unavailable if datasets are deleted faster than they can be copied, and what database and stores raise.
        """
        lacked: list[Lacking] = []
        for _ in range(TRIES):
            backup = self._vault.new()
            tally = CopyCounts()
            with self._database.read() as connection:
                ids = [one.dataset.id for one in dumped_datasets(connection)]
            self._pin(ids)
            self._reached("pinned")
            state = self._dumped(backup)
            self._reached("dumped")
            lacking: list[Lacking] = []
            index = self._vault.put_index(backup, self._copied(backup, state, tally, lacking))
            self._reached("copied")
            if not lacking or lacking == lacked:
                manifest = self._manifest(backup, state, index, tally, lacking)
                self._vault.finish(manifest)
                self._reached("finished")
                return manifest
            log.info("something was deleted while it was copied, and the backup begins again", lacking=len(lacking))
            lacked = lacking
            self._vault.remove(backup)
        raise Unavailable(f"{TRIES} backups were overtaken by what was deleted meanwhile: {lacked[0].path}")

    def keep(self, most: int) -> int:
        """Remove all backups but the newest so many, and the objects that none of them needs; how many those were.

        Nobody may be making a backup at this place meanwhile.
        """
        found = self._vault.finished()
        for backup in found[:-most]:
            self._vault.remove(backup)
        kept = [self._vault.read(backup) for backup in found[-most:]]
        return self._vault.sweep(lambda: (held for one in kept for held in self._vault.index(one)))

    def _dumped(self, backup: str) -> DumpedState:
        with self._database.read() as connection:
            state = DumpedState(now(), migrate.revision(connection) or "", dumped_datasets(connection))
            for table in dump.dumped():
                state.tables.append(self._vault.put_table(backup, table.name, dump.lines(connection, table)))
        return state

    # Step 3

    def _copied(
        self, backup: str, state: DumpedState, tally: CopyCounts, lacking: list[Lacking]
    ) -> Iterator[BackupObject]:
        """Copy what is needed, and tell of it. At the end `lacking` is complete."""
        top = (self._store.head(path) for path in (Layout.lake, Layout.index, Layout.config))
        yield from self._kept("", (entry for entry in top if entry is not None), tally, lambda _: None)
        former = Layout.versions.folder
        yield from self._kept(former, self._store.list(former), tally, lambda _: None)
        archived = self._archived(backup, state)
        found = next(archived, None)
        for one in sorted(state.datasets, key=lambda one: one.dataset.id):
            while found is not None and found[0] < one.dataset.id:
                found = next(archived, None)
            of_one = found[1] if found is not None and found[0] == one.dataset.id else ArchivedFiles(set(), set())
            contents = DatasetContents(self._store, one, of_one)
            yield from self._kept(one.dataset.layout.root, contents.entries(), tally, contents.went_away)
            lacking += contents.lacking
            self._reached(f"{one.dataset.name} copied")

    def _archived(self, backup: str, state: DumpedState) -> Iterator[tuple[str, ArchivedFiles]]:
        """By dataset, in the order of their ids, the files that the dump has."""
        (files,) = (table for table in state.tables if table.table == "files")
        rows = self._vault.table(backup, files)
        columns = [*orjson.loads(next(rows))["columns"]]
        dataset, file, checksum = (columns.index(name) for name in ("dataset_id", "id", "checksum"))
        for of, group in groupby(map(orjson.loads, rows), lambda row: row[dataset]):
            known = ArchivedFiles(set(), set())
            for row in group:
                known.ids.add(row[file])
                known.checksums.add(row[checksum])
            yield of, known

    def _kept(
        self, folder: str, entries: Iterable[Entry], tally: CopyCounts, went_away: Callable[[Entry], None]
    ) -> Iterator[BackupObject]:
        known = self._vault.known(folder) if folder else {}

        def copy(entry: Entry) -> tuple[BackupObject, bool] | Entry:
            there = known if folder else self._vault.known(entry.path)
            if there.get(object_of(entry)) == entry.size:
                return BackupObject(entry.path, object_of(entry), entry.size), False
            try:
                return self._copy(entry), True
            except Missing:
                return entry

        found = iter(entries)
        with ThreadPoolExecutor(COPIERS) as pool:
            while some := list(islice(found, BATCH)):
                made = list(pool.map(copy, some))
                self._vault.store.sync(one[0].object for one in made if isinstance(one, tuple) and one[1])
                for one in made:
                    if isinstance(one, Entry):
                        went_away(one)
                        continue
                    held, is_new = one
                    tally.objects += 1
                    tally.size += held.size
                    tally.copied += is_new
                    tally.copied_size += held.size * is_new
                    yield held

    def _copy(self, entry: Entry) -> BackupObject:
        """Copy an object, in the state in which it is now. Raises Missing."""
        if entry.size > SMALL and entry.path.endswith((".parquet", "/data")):
            # Nobody ever writes these again, so what is read is what was listed.
            size = self._vault.store.put_stream(object_of(entry), self._store.stream(entry.path), durable=False)
            return BackupObject(entry.path, object_of(entry), size)
        opened, chunks = self._store.open(entry.path)
        if opened.size > SMALL:
            self._vault.store.put_stream(object_of(opened), chunks, durable=False)
        else:
            self._vault.store.put_hint(object_of(opened), b"".join(chunks))
        return BackupObject(entry.path, object_of(opened), opened.size)

    def _manifest(
        self, backup: str, state: DumpedState, index: DumpedTable, tally: CopyCounts, lacking: list[Lacking]
    ) -> BackupManifest:
        return BackupManifest(
            id=backup,
            at=state.at,
            finished=now(),
            tarn=version("tarn"),
            revision=state.revision,
            lake=self._lake,
            tables=state.tables,
            objects=tally.objects,
            size=tally.size,
            copied=tally.copied,
            copied_size=tally.copied_size,
            index=index,
            heads=[
                DumpedHead(dataset=one.dataset.name, id=one.dataset.id, seq=one.head.seq, snapshot=one.head.id)
                for one in state.datasets
            ],
            lacking=lacking,
        )
