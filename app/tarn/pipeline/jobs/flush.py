"""Flush: closed segments into the tables, one snapshot each, all dirty datasets of a round in one Spark job."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import NamedTuple, Protocol

import structlog

from tarn.datasets import registry as datasets
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.errors import Internal, TarnError
from tarn.journal import segments
from tarn.journal.batch_contents import PURGE_ROWS
from tarn.journal.depth import depth
from tarn.lake import snapshots
from tarn.lake.commit import Build, HeadMoved, Reached, SnapshotPublisher
from tarn.model.flush import Moved
from tarn.model.ids import new_id, now
from tarn.model.journal import Depth
from tarn.model.names import LAKEHOUSE
from tarn.model.snapshot import Change, SetAside, Snapshot, Tally
from tarn.model.statement import EPOCH
from tarn.pipeline.jobs.flush_plan import PendingSegment, pack_into_slots, tasks_of
from tarn.pipeline.tasks.kernel import AnyTask, Fault, Output, Task
from tarn.storage.store import Store
from tarn.telemetry import Telemetry

log = structlog.get_logger(__name__)

PUBLISHING = 4
"""Datasets that are published at once: most of it is waiting for disk or network."""


class Kernels(Protocol):
    """What runs tasks: Spark, or in tests this very process."""

    @property
    def cores(self) -> int: ...

    def run(self, slots: list[list[AnyTask]]) -> Iterable[tuple[int, Output | TarnError]]: ...

    def run_here(self, task: AnyTask) -> Output | TarnError:
        """Do one task without Spark, where to ask for it would take longer than the task. Not one on the journal."""
        ...


class Flushed(NamedTuple):
    """What became of one dataset in a round: its new snapshots, or why it got no further."""

    snapshots: list[Snapshot]
    error: TarnError | None = None


class Flush:
    """Rounds of flushing."""

    def __init__(
        self,
        database: Database,
        store: Store,
        publisher: SnapshotPublisher,
        kernels: Callable[[], Kernels],
        reached: Reached = lambda _: None,
        watch: Telemetry | None = None,
    ) -> None:
        self._watch = watch or Telemetry()
        self._database = database
        self._store = store
        self._publisher = publisher
        self._kernels = kernels
        self._reached = reached

    def run(
        self, wanted: Sequence[Dataset], hold: Callable[[], None], moved: Moved = lambda *_: None
    ) -> dict[str, Flushed]:
        """Flush what these datasets hold now, whatever is written meanwhile. What became of each, by its id.

        1. close     the open segment, so that it has an end
        2. build     the oldest closed segment of every dataset, all in one job; what is closed later waits
        3-7.         publish each; a build that the head has moved away from is made again
        """
        done: dict[str, list[Snapshot]] = {dataset.id: [] for dataset in wanted}
        failed: dict[str, TarnError] = {}
        limits: dict[str, int] = {}
        waiting: dict[str, int] = {}
        since: dict[str, datetime] = {}
        left = list(wanted)
        for dataset in wanted:
            try:
                limits[dataset.id], found = self._close(dataset)
                waiting[dataset.id] = found.rows
                if found.oldest is not None:
                    since[dataset.id] = found.oldest
                moved(dataset.id, 0, waiting[dataset.id])
            except TarnError as error:
                failed[dataset.id] = error
        self._reached("closed")
        while left := [dataset for dataset in left if dataset.id not in failed]:
            hold()
            jobs = []
            for dataset in left:
                try:
                    job = self._job(dataset, limits[dataset.id])
                except TarnError as error:
                    failed[dataset.id] = error
                    continue
                if job is None:
                    moved(dataset.id, waiting[dataset.id], waiting[dataset.id])
                else:
                    jobs.append(job)
            if not jobs:
                break
            for dataset_id, outcome in self._round(jobs, hold):
                if isinstance(outcome, TarnError):
                    failed[dataset_id] = outcome
                elif outcome is not None:
                    done[dataset_id].append(outcome)
                    self._tell(outcome, since.pop(dataset_id, None))
                    moved(dataset_id, sum(map(_consumed, done[dataset_id])), waiting[dataset_id])
            left = [job.dataset for job in jobs]
        for dataset_id, why in failed.items():
            log.warning("a dataset is not flushed", dataset=dataset_id, problem=why.slug, detail=why.detail)
        return {dataset.id: Flushed(done[dataset.id], failed.get(dataset.id)) for dataset in wanted}

    def tidy(self) -> None:
        """Delete what is left of flushed batches in the journal."""
        segments.purge_done(self._database)

    def _tell(self, snapshot: Snapshot, since: datetime | None) -> None:
        self._watch.flushed.observe(_consumed(snapshot))
        if since is not None:  # the first of a round has the oldest event
            self._watch.flush_lag.observe((now() - since).total_seconds())

    def _close(self, dataset: Dataset) -> tuple[int, Depth]:
        """Close the open segment; the number of the last one that is closed now, and what waits up to it."""
        with self._database.write() as connection:
            segments.close(connection, dataset)
            return segments.last_closed(connection, dataset), depth(connection, dataset)

    def _job(self, dataset: Dataset, limit: int) -> PendingSegment | None:
        with self._database.read() as connection:
            segment = segments.oldest(connection, dataset)
            head = snapshots.recorded(connection, dataset)
        if segment is None or segment.number > limit:
            return None
        config, _ = datasets.read(self._store, dataset)
        return PendingSegment(dataset, config, segment, head)

    def _round(
        self, jobs: list[PendingSegment], hold: Callable[[], None]
    ) -> Iterator[tuple[str, Snapshot | TarnError | None]]:
        with self._watch.span("build", datasets=len(jobs)):
            builds = self._build(jobs)
        self._reached("built")
        hold()
        with ThreadPoolExecutor(min(PUBLISHING, len(jobs))) as pool:
            outcomes = pool.map(self._publish, builds)
            published = False
            for job, outcome in zip(jobs, outcomes, strict=True):
                published |= isinstance(outcome, Snapshot)
                yield job.dataset.id, outcome
        if published:
            self._purge()

    def _purge(self) -> None:
        """Delete a few rows of what is flushed; many are left to `tidy`, as whoever waits for the flush need not wait
        for that."""
        try:
            segments.purge_done(self._database, most=PURGE_ROWS)
        except TarnError as error:
            log.warning("flushed rows stay in the journal for now", problem=error.slug)
        self._reached("purged")

    def _build(self, jobs: list[PendingSegment]) -> list[Build | TarnError | None]:
        """Builds in the order of their jobs, or why there is none; None where another worker was faster."""
        kernels = self._kernels()
        moment = int((now() - EPOCH).total_seconds() * 1_000_000)
        tasks: list[Task] = []
        sized: list[tuple[Task, int]] = []
        owners: list[int] = []
        for number, job in enumerate(jobs):
            own = tasks_of(job, len(tasks), kernels.cores, moment)
            tasks += own
            sized += [(task, job.segment.rows // len(own)) for task in own]
            owners += [number] * len(own)
        outputs: list[list[Output | TarnError]] = [[] for _ in jobs]
        for task, output in sorted(kernels.run(pack_into_slots(sized, kernels.cores)), key=lambda pair: pair[0]):
            outputs[owners[task]].append(output)
        return [self._checked(job, _assemble(job, made)) for job, made in zip(jobs, outputs, strict=True)]

    def _checked(self, job: PendingSegment, build: Build | TarnError) -> Build | TarnError | None:
        """The build, if every row of its segment is in it: what is done is deleted, and unread rows must not be.

        None if another worker flushed the segment before its rows were read, so that they were not to be seen any more.
        """
        if isinstance(build, TarnError):
            return build
        tally = build.tally
        consumed = tally.added + tally.seen + tally.deleted + tally.set_aside
        if consumed == job.segment.rows:
            return build
        try:
            with self._database.read() as connection:
                if snapshots.recorded(connection, job.dataset) != job.head:
                    return None
        except TarnError as error:
            return error
        return Internal(f"{consumed} of the {job.segment.rows} rows of segment {job.segment.number} were read")

    def _publish(self, build: Build | TarnError | None) -> Snapshot | TarnError | None:
        """The snapshot; None if it must be built again, or another worker has done it."""
        if build is None or isinstance(build, TarnError):
            return build
        try:
            snapshot = self._publisher.publish(build)
        except HeadMoved:
            return None
        except TarnError as error:
            return error
        log.info("flushed", dataset=build.dataset.name, seq=snapshot.seq, **snapshot.rows.model_dump())
        return snapshot


def _consumed(snapshot: Snapshot) -> int:
    rows = snapshot.rows
    return rows.added + rows.seen + rows.deleted + rows.set_aside


def _assemble(job: PendingSegment, outputs: list[Output | TarnError]) -> Build | TarnError:
    """One build from what its tasks made."""
    failures = [output for output in outputs if isinstance(output, TarnError)]
    if failures:
        return failures[0]
    made = [output for output in outputs if not isinstance(output, TarnError)]
    tally = Tally(*(sum(counts) for counts in zip(*(output.tally for output in made), strict=True)))
    stage = job.segment.stage
    return Build(
        dataset=job.dataset,
        operation=Change.FLUSH,
        id=new_id(),
        base=job.head,
        segment=job.segment.number,
        added={
            "statements": tuple(file for output in made for file in output.files["statements"]),
            "translog": tuple(file for output in made for file in output.files["translog"]),
        },
        tally=tally,
        batches=job.segment.batches,
        set_aside=tuple(_rejected(job, fault) for output in made for fault in output.faults),
        checksum=job.config.checksum,
        author=LAKEHOUSE if stage is None else stage.tenant,
        message=None if stage is None else stage.message,
        metadata={} if stage is None else stage.metadata,
    )


def _rejected(job: PendingSegment, fault: Fault) -> SetAside:
    commit, position = fault.ord >> 32, fault.ord & 0xFFFFFFFF
    batch = next(batch for batch in job.segment.batches if batch.commit == commit)
    return SetAside(batch=batch.id, position=position, reason=fault.reason)
