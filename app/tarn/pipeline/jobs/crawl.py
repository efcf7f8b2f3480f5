"""Crawls: the files below a place, taken into the archive, round after round of a few Spark tasks.

A round is durable when it is over, and so is every file in it before. A crawl that died is begun again from the start
of its listing: what it took before is skipped, or taken once more with the same outcome.
"""

from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from itertools import islice

import structlog

from tarn.archive import file_index as records
from tarn.archive.fetch import Fetcher
from tarn.archive.sources import ListedFile, ListingFailure
from tarn.archive.urls import PORTS
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.errors import Backpressure, TarnError
from tarn.journal import head as heads
from tarn.lake.commit import Reached
from tarn.model.cancellation import checked
from tarn.model.ids import now
from tarn.model.job import CrawlOptions, CrawlResult, Existing, Progress, Report, ResumeLater, UncrawledFile
from tarn.model.names import LAKEHOUSE, FilePath, TagKey, TenantName
from tarn.model.omissions import Omissions
from tarn.pipeline.jobs.flush import Kernels
from tarn.pipeline.jobs.flush_plan import SLOTS_PER_CORE, pack_into_slots
from tarn.pipeline.tasks.crawl_tasks import FetchFiles
from tarn.pipeline.tasks.kernel import AnyTask
from tarn.settings import Settings
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

LAST_RUN = TagKey("operations/crawl/last_run")

LISTED_AT_ONCE = 500
"""Files that one look at the index asks for."""

TASK_FILES, TASK_BYTES = 500, 256 << 20
"""What a task takes at most, unless a single file is larger."""

ROW = 1 << 12
"""Bytes that count for a row where tasks are packed: a file costs as much as about so many."""

MOST_LISTED = 100
"""Failures that a result lists; the rest are counted."""

RETRY_DELAY = timedelta(seconds=10)
"""Until a crawl goes on that has filled the journal."""


class Crawl:
    """Crawls into datasets."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        store: Store,
        kernels: Callable[[], Kernels],
        reached: Reached = lambda _: None,
    ) -> None:
        self._settings = settings
        self._database = database
        self._store = store
        self._kernels = kernels
        self._reached = reached
        self._fetcher = Fetcher.from_settings(settings)

    def run(self, dataset: Dataset, options: CrawlOptions, report: Report, tenant: TenantName, job: str) -> CrawlResult:
        """List, and take what is wanted. Run again after a crash it does the rest.

        Raises what `Fetcher.sources` does, QuotaExceeded, DatasetNotFound, and NotYet while the journal is full.
        """
        begun = now()
        crawling = _CrawlState(self._database, self._fetcher, dataset, options, report)
        try:
            for files in crawling.rounds(lambda: SLOTS_PER_CORE * self._kernels().cores):
                self._pressed(dataset)
                self._fetch(crawling, files, tenant, job)
                self._reached("fetched")
        except Backpressure:
            raise ResumeLater(now() + RETRY_DELAY) from None
        report(crawling.progress(over=True))
        self._tell(dataset, begun)
        log.info("crawled", dataset=dataset.name, files=crawling.files, failed=crawling.failed)
        return crawling.result()

    def _fetch(
        self, crawling: "_CrawlState", files: list[tuple[ListedFile, ...]], tenant: TenantName, job: str
    ) -> None:
        options, dataset = crawling.options, crawling.dataset
        tasks: list[tuple[AnyTask, int]] = [
            (
                FetchFiles(
                    number=number,
                    dataset=dataset.name,
                    dataset_id=dataset.id,
                    tenant=tenant,
                    job=job,
                    origin=options.origin,
                    existing=options.existing,
                    files=some,
                    fetcher=self._fetcher,
                    settings=self._settings,
                ),
                sum(1 + (file.size or 0) // ROW for file in some),
            )
            for number, some in enumerate(files)
        ]
        kernels = self._kernels()
        failure: TarnError | None = None
        for _, output in kernels.run(pack_into_slots(tasks, kernels.cores)):
            if isinstance(output, TarnError):
                failure = failure or output
                continue
            assert output.fetched is not None
            made = output.fetched
            crawling.files += made.files
            crawling.size += made.size
            crawling.skipped += made.skipped
            for missed in made.missed:
                crawling.fail(missed.path, missed.reason)
            crawling.left.extend(made.left)
            crawling.omitted.merge(made.omitted)
        if failure is not None:
            raise failure

    def _pressed(self, dataset: Dataset) -> None:
        """Raises Backpressure."""
        with self._database.read() as connection:
            heads.check_pressure(connection, dataset, self._settings)

    def _tell(self, dataset: Dataset, begun: datetime) -> None:
        """Say that all that was there when it began is taken; in the layout too, after the fact."""
        with self._database.write() as connection:
            records.require_active(connection, dataset)
            heads.touch(connection, dataset.id, LAST_RUN, begun)
        try:
            self._store.put_hint(dataset.layout.tag(LAKEHOUSE, LAST_RUN), begun.isoformat().encode())
        except TarnError as error:
            log.warning("a tag is not shown", dataset=dataset.name, problem=error.slug)


class _CrawlState:
    """One crawl: what is listed, and what became of it so far."""

    def __init__(
        self, database: Database, fetcher: Fetcher, dataset: Dataset, options: CrawlOptions, report: Report
    ) -> None:
        self.dataset = dataset
        self.options = options
        self.files = self.size = self.skipped = self.failed = 0
        self.left: deque[ListedFile] = deque()
        """What a round had no time for."""
        self.omitted = Omissions()
        self._failures: list[UncrawledFile] = []
        self._database = database
        self._fetcher = fetcher
        self._report = report

    def rounds(self, tasks: Callable[[], int]) -> Iterator[list[tuple[ListedFile, ...]]]:
        """Files for so many tasks at most, until all that is wanted was given, and what was left of it.

        How many is not asked before there is something to do: Spark may have to be started for it.
        """
        wanted = self._wanted()
        self.left.extend(islice(wanted, 1))
        while self.left and (some := list(islice(self._tasks(wanted), tasks()))):
            yield some
            self._report(self.progress())
            if not self.left:
                self.left.extend(islice(wanted, 1))

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

    def _tasks(self, wanted: Iterator[ListedFile]) -> Iterator[tuple[ListedFile, ...]]:
        """Files of one task after the other, in the order of the listing: those of a folder stay together."""
        some: list[ListedFile] = []
        size = 0
        while (file := self.left.popleft() if self.left else next(wanted, None)) is not None:
            some.append(file)
            size += file.size or 0
            if len(some) == TASK_FILES or size >= TASK_BYTES:
                yield tuple(some)
                some, size = [], 0
        if some:
            yield tuple(some)

    def _wanted(self) -> Iterator[ListedFile]:
        """What is listed and not known yet. Tells of the rest."""
        options = self.options
        listed = self._fetcher.sources(options.uri, options.prefix, options.glob, options.exclude)
        valid = self._valid(listed)
        while some := list(islice(valid, LISTED_AT_ONCE)):
            self._report(self.progress())
            known = self._known(some)
            self.skipped += len(known)
            yield from (file for file in some if file.path not in known)

    def _valid(self, listed: Iterator[ListedFile | ListingFailure]) -> Iterator[ListedFile]:
        # On the web a file may be found on several pages.
        is_web = self.options.uri.partition(":")[0].lower() in PORTS
        seen: set[str] = set()
        for one in checked(listed):
            if isinstance(one, ListingFailure):
                self.fail(one.path, one.error.detail)
            elif one.path not in seen:
                if is_web:
                    seen.add(one.path)
                try:
                    FilePath(one.path)
                except ValueError as error:
                    self.fail(one.path, str(error))
                else:
                    yield one

    def _known(self, some: list[ListedFile]) -> set[str]:
        if self.options.existing is not Existing.SKIP_PATH:
            return set()
        with self._database.read() as connection:
            return records.known_paths(connection, self.dataset, [FilePath(file.path) for file in some])
