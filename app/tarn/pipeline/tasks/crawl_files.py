"""What one Spark task does for a crawl: fetch files, several at once, and put them into the archive, many at once.

A file's row in the index and what is said of it in the journal are one transaction: who finds the file there need not
ask whether its Document is.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import Connection

from tarn.access.audit import AuditedAction
from tarn.archive import documents
from tarn.archive import file_index as records
from tarn.archive.files import SMALL, Archive, Reached, Staged
from tarn.archive.sources import ListedFile, Source
from tarn.datasets.registry import Dataset
from tarn.db.engine import TASK, Database
from tarn.errors import BodyTooLarge, QuotaExceeded, TarnError
from tarn.journal import batches
from tarn.journal.batches import Batch, BatchWithEvents
from tarn.journal.event_buffer import Events
from tarn.model.entity import Exploder
from tarn.model.file import ArchiveFile, NewFile
from tarn.model.ids import now
from tarn.model.job import Existing
from tarn.model.names import FilePath
from tarn.model.omissions import Omissions
from tarn.model.statement import EPOCH
from tarn.pipeline.tasks.crawl_tasks import FailedFile, FetchedFiles, FetchFiles
from tarn.storage.store import Store

BUDGET = 10.0
"""Seconds after which a task begins with no more files: flushes wait for the same cores, and sources may be slow."""

FETCHERS = 4
"""Files of a task that are fetched at once."""

TOGETHER, HELD = 250, 16 << 20
"""Files that are put together, and the bytes of them that are in memory at most, or a little more."""

POOL = 2
"""Connections of a task to the database, and as many again while they are all in use."""


def fetch_files(
    task: FetchFiles, store: Store, clock: Callable[[], float] = time.monotonic, reached: Reached = lambda _: None
) -> FetchedFiles:
    """Do a task. Raises what keeps the archive or the journal from taking anything; a file's own trouble is told."""
    # The only SQLite of this process while it lasts: see docs/decisions/022.
    database = Database(task.settings.database_url, POOL, TASK)
    try:
        with ThreadPoolExecutor(FETCHERS, thread_name_prefix="fetch") as pool:
            return _FileFetcher(task, database, Archive(database, store, task.settings, reached), pool).run(clock)
    finally:
        database.close()


class _Unfetched(Exception):
    """A source gave no file, or not all of it."""

    def __init__(self, error: TarnError) -> None:
        super().__init__(error.detail)


class _FileFetcher:
    def __init__(self, task: FetchFiles, database: Database, archive: Archive, pool: ThreadPoolExecutor) -> None:
        self._task = task
        self._database = database
        self._dataset = Dataset(task.dataset_id, task.dataset)
        self._archive = archive
        self._act = AuditedAction.of_job(task.tenant, "crawl_dataset", task.job)
        self._exploder = Exploder()
        self._pool = pool
        self._told: set[str] = set()
        """Folders that the journal has from this task already."""
        self._missed: list[FailedFile] = []
        self._omitted = Omissions()
        self._refused: QuotaExceeded | None = None

    def run(self, clock: Callable[[], float]) -> FetchedFiles:
        until = clock() + BUDGET
        size = begun = put = 0
        for some in _groups(self._task.files):
            if begun and clock() >= until:
                break
            begun += len(some)
            files = self._put(self._unknown(self._staged(some)))
            put += len(files)
            size += sum(file.size for file in files)
        skipped = begun - put - len(self._missed)
        return FetchedFiles(put, size, skipped, self._missed, self._task.files[begun:], self._omitted)

    # Fetching

    def _staged(self, some: Sequence[ListedFile]) -> list[Staged]:
        """Those of some files that could be had. Raises what the archive's own store does."""
        found = list(self._pool.map(self._tried, some))
        staged = [one for one in found if isinstance(one, Staged)]
        for one in found:
            if isinstance(one, TarnError):
                self._archive.drop(staged)
                raise one
        self._missed += [one for one in found if isinstance(one, FailedFile)]
        return staged

    def _tried(self, found: ListedFile) -> Staged | FailedFile | TarnError:
        try:
            try:
                return self._stage(found)
            except QuotaExceeded as error:
                if self._task.existing is not Existing.SKIP_CHECKSUM:
                    raise
                # It may be skipped, and then needs no room.
                self._refused = error
                return self._stage(found, keep=False)
        except (_Unfetched, BodyTooLarge) as error:
            return FailedFile(found.path, str(error))
        except TarnError as error:
            return error

    def _stage(self, found: ListedFile, keep: bool = True) -> Staged:
        with _opened(self._task, found) as source:
            said = NewFile(path=FilePath(found.path), origin=self._task.origin)
            reservation = self._archive.reservation(self._dataset, self._task.tenant) if keep else None
            if reservation is not None and source.size is not None and source.size > SMALL:
                reservation.declare(source.size)
            return self._archive.stage(self._dataset, said, _read(source), reservation, keep)

    def _unknown(self, staged: list[Staged]) -> list[Staged]:
        """What is to be put: all of it, or each content that the archive does not have, once. Raises QuotaExceeded if
        there was no room for one of them."""
        if self._task.existing is not Existing.SKIP_CHECKSUM:
            return staged
        with self._database.read() as connection:
            known = records.known_checksums(connection, self._dataset, {one.checksum for one in staged})
        new = {one.checksum: one for one in reversed(staged) if one.checksum not in known}
        kept = [one for one in staged if new.get(one.checksum) is one]
        if self._refused is not None and not all(one.is_kept for one in kept):
            self._archive.drop(staged)
            raise self._refused
        self._archive.drop(one for one in staged if new.get(one.checksum) is not one)
        return kept

    # Putting

    def _put(self, staged: Sequence[Staged]) -> list[ArchiveFile]:
        told: set[str] = set()
        omitted = Omissions()

        def recorded(connection: Connection, files: list[ArchiveFile]) -> None:
            nonlocal omitted
            omitted = Omissions()  # what was done may be done again
            events = self._events(files, told, omitted)
            batch = Batch(self._dataset, self._task.tenant, self._act, self._task.origin)
            batches.write_small(connection, self._task.settings, [BatchWithEvents(batch, events)])

        files = self._archive.commit(self._dataset, self._task.tenant, staged, recorded) if staged else []
        self._told |= told
        self._omitted.merge(omitted)
        return files

    def _events(self, files: Sequence[ArchiveFile], told: set[str], omitted: Omissions) -> Events:
        """The Documents of files, and their folders as far as nobody was told of them."""
        events, moment = Events(), int((now() - EPOCH).total_seconds() * 1_000_000)
        for file in files:
            for entity in documents.entities(self._dataset.name, file):
                if entity["schema"] == documents.FOLDER:
                    if entity["id"] in self._told or entity["id"] in told:
                        continue
                    told.add(entity["id"])
                exploded = self._exploder.explode(self._dataset.name, entity)
                documents.report_omitted(entity, exploded, file.path, omitted)
                events.add_entity(exploded, self._task.origin, moment)
        return events


def _opened(task: FetchFiles, found: ListedFile) -> Source:
    try:
        return task.fetcher.open(found.uri)
    except TarnError as error:
        raise _Unfetched(error) from error


def _read(source: Source) -> Iterator[bytes]:
    try:
        yield from source
    except TarnError as error:
        raise _Unfetched(error) from error


def _groups(files: Sequence[ListedFile]) -> Iterator[list[ListedFile]]:
    """Files in their order, as many together as may be in memory at once."""
    some: list[ListedFile] = []
    held = 0
    for file in files:
        # What is larger passes through the store.
        size = SMALL if file.size is None else min(file.size, SMALL)
        if some and (len(some) >= TOGETHER or held + size > HELD):
            yield some
            some, held = [], 0
        some.append(file)
        held += size
    if some:
        yield some
