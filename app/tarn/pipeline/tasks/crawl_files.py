"""Fetch files, several concurrently, and store them in the archive, many per transaction.

A file's row in the index and its entities in the journal are written in one transaction: if the file is in the index,
its Document is in the journal.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import Connection

from tarn.access.audit import AuditedAction
from tarn.archive import documents, file_index
from tarn.archive.fetching.sources import ListedFile, Source
from tarn.archive.files import SMALL, Archive, Reached, Staged
from tarn.datasets.registry import Dataset
from tarn.db.engine import TASK, Database
from tarn.errors import BodyTooLarge, QuotaExceeded, TarnError
from tarn.journal import batches
from tarn.journal.batches import Batch, BatchWithEvents
from tarn.journal.parsing.event_buffer import Events
from tarn.model.file import ArchiveFile, NewFile
from tarn.model.ftm.entity import Exploder
from tarn.model.ftm.omissions import Omissions
from tarn.model.ids import now
from tarn.model.names import FilePath
from tarn.model.timestamps import since_epoch
from tarn.model.work.job import Existing
from tarn.pipeline.tasks.crawl_tasks import FailedFile, FetchedFiles, FetchFiles
from tarn.storage.store import Store

BUDGET = 10.0
"""Seconds after which a task starts no more files: flushes wait for the same cores, and sources may be slow."""

FETCHERS = 4
"""Files of a task that are fetched concurrently."""

TOGETHER, HELD = 250, 16 << 20
"""Files that are stored in one transaction, and about how many bytes of them are in memory at most."""

POOL = 2
"""Database connections of a task; as many again are opened while all are in use."""


def fetch_files(
    task: FetchFiles, store: Store, clock: Callable[[], float] = time.monotonic, reached: Reached = lambda _: None
) -> FetchedFiles:
    """Fetch and store the files. Errors of single files are in the result; those of the archive or the journal are
    raised."""
    # Nothing else in this process may have a SQLite database open meanwhile: see docs/decisions/022.
    database = Database(task.settings.database_url, POOL, TASK)
    try:
        with ThreadPoolExecutor(FETCHERS, thread_name_prefix="fetch") as pool:
            return _FileFetcher(task, database, Archive(database, store, task.settings, reached), pool).run(clock)
    finally:
        database.close()


class _Unfetched(Exception):
    """A source did not return a file, or not all of it."""

    def __init__(self, error: TarnError) -> None:
        super().__init__(error.detail)


class _FileFetcher:
    """A fetch task in progress."""

    def __init__(self, task: FetchFiles, database: Database, archive: Archive, pool: ThreadPoolExecutor) -> None:
        self._task = task
        self._database = database
        self._dataset = Dataset(task.dataset_id, task.dataset)
        self._archive = archive
        self._act = AuditedAction.of_job(task.tenant, "crawl_dataset", task.job)
        self._exploder = Exploder()
        self._pool = pool
        self._written_folders: set[str] = set()
        """Ids of Folder entities that this task has already written to the journal."""
        self._failed: list[FailedFile] = []
        self._omitted = Omissions()
        self._refused: QuotaExceeded | None = None

    def run(self, clock: Callable[[], float]) -> FetchedFiles:
        until = clock() + BUDGET
        size = started = stored = 0
        for group in _groups(self._task.files):
            if started and clock() >= until:
                break
            started += len(group)
            files = self._put(self._unknown(self._staged(group)))
            stored += len(files)
            size += sum(file.size for file in files)
        skipped = started - stored - len(self._failed)
        return FetchedFiles(stored, size, skipped, self._failed, self._task.files[started:], self._omitted)

    # Fetching

    def _staged(self, files: Sequence[ListedFile]) -> list[Staged]:
        """Fetch files and return those that succeeded. Raises errors of the archive's own store."""
        outcomes = list(self._pool.map(self._try_stage, files))
        staged = [one for one in outcomes if isinstance(one, Staged)]
        for one in outcomes:
            if isinstance(one, TarnError):
                self._archive.drop(staged)
                raise one
        self._failed += [one for one in outcomes if isinstance(one, FailedFile)]
        return staged

    def _try_stage(self, file: ListedFile) -> Staged | FailedFile | TarnError:
        try:
            try:
                return self._stage(file)
            except QuotaExceeded as error:
                if self._task.existing is not Existing.SKIP_CHECKSUM:
                    raise
                # The file may turn out to be known and be skipped: then it needs no quota.
                self._refused = error
                return self._stage(file, keep=False)
        except (_Unfetched, BodyTooLarge) as error:
            return FailedFile(file.path, str(error))
        except TarnError as error:
            return error

    def _stage(self, file: ListedFile, keep: bool = True) -> Staged:
        with _opened(self._task, file) as source:
            new = NewFile(path=FilePath(file.path), origin=self._task.origin)
            reservation = self._archive.reservation(self._dataset, self._task.tenant) if keep else None
            if reservation is not None and source.size is not None and source.size > SMALL:
                reservation.declare(source.size)
            return self._archive.stage(self._dataset, new, _read(source), reservation, keep)

    def _unknown(self, staged: list[Staged]) -> list[Staged]:
        """Return the files to store: all, or, with `skip_checksum`, one of each content that the archive does not
        have. Raises QuotaExceeded if the quota has no room for one of them."""
        if self._task.existing is not Existing.SKIP_CHECKSUM:
            return staged
        with self._database.read() as connection:
            known = file_index.known_checksums(connection, self._dataset, {one.checksum for one in staged})
        new = {one.checksum: one for one in reversed(staged) if one.checksum not in known}
        to_store = [one for one in staged if new.get(one.checksum) is one]
        if self._refused is not None and not all(one.is_kept for one in to_store):
            self._archive.drop(staged)
            raise self._refused
        self._archive.drop(one for one in staged if new.get(one.checksum) is not one)
        return to_store

    # Putting

    def _put(self, staged: Sequence[Staged]) -> list[ArchiveFile]:
        folders: set[str] = set()
        omitted = Omissions()

        def recorded(connection: Connection, files: list[ArchiveFile]) -> None:
            nonlocal omitted
            omitted = Omissions()  # the transaction may be retried
            events = self._events(files, folders, omitted)
            batch = Batch(self._dataset, self._task.tenant, self._act, self._task.origin)
            batches.write_small(connection, self._task.settings, [BatchWithEvents(batch, events)])

        files = self._archive.commit(self._dataset, self._task.tenant, staged, recorded) if staged else []
        self._written_folders |= folders
        self._omitted.merge(omitted)
        return files

    def _events(self, files: Sequence[ArchiveFile], folders: set[str], omitted: Omissions) -> Events:
        """Return events for the Documents of files, and for their Folders if they are not written yet."""
        events, moment = Events(), since_epoch(now())
        for file in files:
            for entity in documents.entities(self._dataset.name, file):
                if entity["schema"] == documents.FOLDER:
                    if entity["id"] in self._written_folders or entity["id"] in folders:
                        continue
                    folders.add(entity["id"])
                exploded = self._exploder.explode(self._dataset.name, entity)
                documents.report_omitted(entity, exploded, file.path, omitted)
                events.add_entity(exploded, self._task.origin, moment)
        return events


def _opened(task: FetchFiles, file: ListedFile) -> Source:
    try:
        return task.fetcher.open(file.uri)
    except TarnError as error:
        raise _Unfetched(error) from error


def _read(source: Source) -> Iterator[bytes]:
    try:
        yield from source
    except TarnError as error:
        raise _Unfetched(error) from error


def _groups(files: Sequence[ListedFile]) -> Iterator[list[ListedFile]]:
    """Yield groups of files, in their order, each as large as memory allows."""
    group: list[ListedFile] = []
    group_bytes = 0
    for file in files:
        # Larger files are streamed to the store.
        size = SMALL if file.size is None else min(file.size, SMALL)
        if group and (len(group) >= TOGETHER or group_bytes + size > HELD):
            yield group
            group, group_bytes = [], 0
        group.append(file)
        group_bytes += size
    if group:
        yield group
