"""Crawl job: list the files below a URI and store them in the archive, in rounds of a few Spark tasks.

Every file is durable once its task has recorded it, and all files of a round are durable when the round ends. A crawl
that died starts again at the beginning of its listing: files that it stored before are skipped, or stored once more
with the same outcome.
"""

from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from itertools import islice

import structlog

from tarn.archive import file_index
from tarn.archive.fetching.fetch import Fetcher
from tarn.archive.fetching.sources import ListedFile, ListingFailure
from tarn.archive.fetching.urls import PORTS
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.errors import Backpressure, TarnError
from tarn.journal import head
from tarn.lake.commit import StepCallback
from tarn.model.ftm.omissions import Omissions
from tarn.model.ids import now
from tarn.model.names import LAKEHOUSE, FilePath, TagKey, TenantName
from tarn.model.work.cancellation import checked
from tarn.model.work.job import CrawlOptions, CrawlResult, Existing, Progress, Report, ResumeLater, UncrawledFile
from tarn.pipeline.jobs.flush import TaskRunner
from tarn.pipeline.jobs.flush_plan import PARTITIONS_PER_CORE, pack_into_partitions
from tarn.pipeline.tasks.crawl_tasks import FetchFiles
from tarn.settings import Settings
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

LAST_RUN = TagKey("operations/crawl/last_run")

LISTED_AT_ONCE = 500
"""Files per query of the file index."""

TASK_FILES, TASK_BYTES = 500, 256 << 20
"""Limits of files and bytes per task, unless a single file is larger."""

ROW = 1 << 12
"""Bytes that count as one row when tasks are packed into partitions."""

MOST_LISTED = 100
"""Failures that a result lists; the others are only counted."""

RETRY_DELAY = timedelta(seconds=10)
"""Delay until a crawl that has filled the journal continues."""


class Crawl:
    """The crawl job."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        store: Store,
        task_runner: Callable[[], TaskRunner],
        reached: StepCallback = lambda _: None,
    ) -> None:
        self._settings = settings
        self._database = database
        self._store = store
        self._task_runner = task_runner
        self._reached = reached
        self._fetcher = Fetcher.from_settings(settings)

    def run(self, dataset: Dataset, options: CrawlOptions, report: Report, tenant: TenantName, job: str) -> CrawlResult:
        """List the files and fetch the selected ones. Run again after a crash, it fetches the rest.

        Raises what `Fetcher.sources` does, QuotaExceeded, DatasetNotFound, and ResumeLater while the journal is full.
        """
        started = now()
        state = _CrawlState(self._database, self._fetcher, dataset, options, report)
        try:
            for files in state.rounds(lambda: PARTITIONS_PER_CORE * self._task_runner().cores):
                self._require_journal_room(dataset)
                self._fetch(state, files, tenant, job)
                self._reached("fetched")
        except Backpressure:
            raise ResumeLater(now() + RETRY_DELAY) from None
        report(state.progress(over=True))
        self._record_completion(dataset, started)
        log.info("crawl finished", dataset=dataset.name, files=state.files, failed=state.failed)
        return state.result()

    def _fetch(self, state: "_CrawlState", files: list[tuple[ListedFile, ...]], tenant: TenantName, job: str) -> None:
        options, dataset = state.options, state.dataset
        tasks: list[tuple[FetchFiles, int]] = [
            (
                FetchFiles(
                    number=number,
                    dataset=dataset.name,
                    dataset_id=dataset.id,
                    tenant=tenant,
                    job=job,
                    origin=options.origin,
                    existing=options.existing,
                    files=batch,
                    fetcher=self._fetcher,
                    settings=self._settings,
                ),
                sum(1 + (file.size or 0) // ROW for file in batch),
            )
            for number, batch in enumerate(files)
        ]
        task_runner = self._task_runner()
        failure: TarnError | None = None
        for _, fetched in task_runner.run(pack_into_partitions(tasks, task_runner.cores)):
            if isinstance(fetched, TarnError):
                failure = failure or fetched
                continue
            state.files += fetched.files
            state.size += fetched.size
            state.skipped += fetched.skipped
            for file in fetched.failed:
                state.fail(file.path, file.reason)
            state.left.extend(fetched.left)
            state.omitted.merge(fetched.omitted)
        if failure is not None:
            raise failure

    def _require_journal_room(self, dataset: Dataset) -> None:
        """Raise Backpressure if the journal is full."""
        with self._database.read() as connection:
            head.check_pressure(connection, dataset, self._settings)

    def _record_completion(self, dataset: Dataset, started: datetime) -> None:
        """Record the start time of the completed crawl as a tag; first in SQL, then in the layout."""
        with self._database.write() as connection:
            file_index.require_active(connection, dataset)
            head.touch(connection, dataset.id, LAST_RUN, started)
        try:
            self._store.put_hint(dataset.layout.tag(LAKEHOUSE, LAST_RUN), started.isoformat().encode())
        except TarnError as error:
            log.warning("a tag could not be written to the layout", dataset=dataset.name, problem=error.slug)


class _CrawlState:
    """State of one crawl: its listing and its counts so far."""

    def __init__(
        self, database: Database, fetcher: Fetcher, dataset: Dataset, options: CrawlOptions, report: Report
    ) -> None:
        self.dataset = dataset
        self.options = options
        self.files = self.size = self.skipped = self.failed = 0
        self.left: deque[ListedFile] = deque()
        """Files that a round had no time for."""
        self.omitted = Omissions()
        self._failures: list[UncrawledFile] = []
        self._database = database
        self._fetcher = fetcher
        self._report = report

    def rounds(self, tasks: Callable[[], int]) -> Iterator[list[tuple[ListedFile, ...]]]:
        """Yield files for at most `tasks()` tasks, until all selected files, and those left over from earlier rounds,
        were yielded.

        `tasks` is called only when there is something to do, as it may have to start Spark.
        """
        selected = self._select_files()
        self.left.extend(islice(selected, 1))
        while self.left and (round_files := list(islice(self._task_files(selected), tasks()))):
            yield round_files
            self._report(self.progress())
            if not self.left:
                self.left.extend(islice(selected, 1))

    def progress(self, over: bool = False) -> Progress:
        done = self.files + self.skipped + self.failed
        return Progress(done=done, total=done if over else None, unit="files")

    def fail(self, path: str, reason: str) -> None:
        self.failed += 1
        if len(self._failures) < MOST_LISTED:
            self._failures.append(UncrawledFile(path=path, reason=reason))

    def result(self) -> CrawlResult:
        return CrawlResult(
            operation="crawl",
            files=self.files,
            size=self.size,
            skipped=self.skipped,
            failed=self.failed,
            first_failures=self._failures,
            omitted=self.omitted,
        )

    def _task_files(self, selected: Iterator[ListedFile]) -> Iterator[tuple[ListedFile, ...]]:
        """Yield the files of one task after the other, in the order of the listing: files of a folder stay together."""
        batch: list[ListedFile] = []
        size = 0
        while (file := self.left.popleft() if self.left else next(selected, None)) is not None:
            batch.append(file)
            size += file.size or 0
            if len(batch) == TASK_FILES or size >= TASK_BYTES:
                yield tuple(batch)
                batch, size = [], 0
        if batch:
            yield tuple(batch)

    def _select_files(self) -> Iterator[ListedFile]:
        """Yield the listed files that are not in the archive yet; count skipped and failed ones."""
        options = self.options
        listed = self._fetcher.sources(options.uri, options.prefix, options.glob, options.exclude)
        valid = self._valid_files(listed)
        while batch := list(islice(valid, LISTED_AT_ONCE)):
            self._report(self.progress())
            known = self._known_paths(batch)
            self.skipped += len(known)
            yield from (file for file in batch if file.path not in known)

    def _valid_files(self, listed: Iterator[ListedFile | ListingFailure]) -> Iterator[ListedFile]:
        # On the web, several pages may link to the same file.
        is_web = self.options.uri.partition(":")[0].lower() in PORTS
        seen: set[str] = set()
        for entry in checked(listed):
            if isinstance(entry, ListingFailure):
                self.fail(entry.path, entry.error.detail)
            elif entry.path not in seen:
                if is_web:
                    seen.add(entry.path)
                try:
                    FilePath(entry.path)
                except ValueError as error:
                    self.fail(entry.path, str(error))
                else:
                    yield entry

    def _known_paths(self, batch: list[ListedFile]) -> set[str]:
        if self.options.existing is not Existing.SKIP_PATH:
            return set()
        with self._database.read() as connection:
            return file_index.known_paths(connection, self.dataset, [FilePath(file.path) for file in batch])
