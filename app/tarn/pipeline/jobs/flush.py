"""Flush job: write closed segments of the journal into the tables, one snapshot each. All datasets of a round share one
Spark job."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

import structlog

from tarn.datasets import registry
from tarn.datasets.head import recorded_head
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.errors import Internal, TarnError
from tarn.journal import segments
from tarn.journal.batch_contents import PURGE_ROWS
from tarn.journal.depth import depth
from tarn.lake.commit import Build, HeadMoved, SnapshotPublisher, StepCallback
from tarn.model.datasets.flush import FlushOutcome, FlushProgress
from tarn.model.datasets.snapshot import RejectedEventRef, Snapshot, SnapshotOperation, Tally
from tarn.model.ids import new_id, now
from tarn.model.names import LAKEHOUSE
from tarn.model.timestamps import since_epoch
from tarn.model.work.job import Report
from tarn.pipeline.jobs.flush_plan import PendingSegment, pack_into_partitions, tasks_of
from tarn.pipeline.tasks.flush_segment import FlushSegment
from tarn.pipeline.tasks.task import InvalidEvent, TableFiles, Task
from tarn.storage.store import Store
from tarn.telemetry import Telemetry

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

PUBLISHING = 4
"""Datasets that are published concurrently: most of the time is spent waiting for disk or network."""


class TaskRunner(Protocol):
    """Runs tasks: on Spark, or in tests in the same process."""

    @property
    def cores(self) -> int: ...

    def run(self, partitions: list[list[Task[Result]]]) -> Iterable[tuple[int, Result | TarnError]]: ...


@dataclass(frozen=True, slots=True)
class _Backlog:
    """What a dataset had not flushed when its open segment was closed."""

    last_segment: int
    rows: int
    oldest: datetime | None


class Flush:
    """Flush rounds over several datasets."""

    def __init__(
        self,
        database: Database,
        store: Store,
        publisher: SnapshotPublisher,
        task_runner: Callable[[], TaskRunner],
        reached: StepCallback = lambda _: None,
        watch: Telemetry | None = None,
    ) -> None:
        self._watch = watch or Telemetry()
        self._database = database
        self._store = store
        self._publisher = publisher
        self._task_runner = task_runner
        self._reached = reached

    def run(
        self, requested: Sequence[Dataset], hold: Callable[[], None], moved: FlushProgress = lambda *_: None
    ) -> dict[str, FlushOutcome]:
        """Flush everything that these datasets have acknowledged up to now. Returns the outcomes by dataset id: the
        error of one dataset does not affect the others.

        1. close     the open segment, so that later writes are not waited for
        2. build     the oldest closed segment of every dataset, all in one Spark job
        3-7.         publish each build; if the head has moved meanwhile, the segment is built again

        Raises what `hold` raises, and errors of Spark, which concern all datasets.
        """
        outcomes = {dataset.id: FlushOutcome() for dataset in requested}
        backlogs: dict[str, _Backlog] = {}
        for dataset in requested:
            with _isolated(outcomes[dataset.id]):
                backlogs[dataset.id] = self._close(dataset)
                moved(dataset.id, 0, backlogs[dataset.id].rows)
        self._reached("closed")
        remaining = list(requested)
        while remaining := [dataset for dataset in remaining if outcomes[dataset.id].error is None]:
            hold()
            pending = []
            for dataset in remaining:
                backlog = backlogs[dataset.id]
                with _isolated(outcomes[dataset.id]):
                    segment = self._oldest(dataset, backlog.last_segment)
                    if segment is None:
                        moved(dataset.id, backlog.rows, backlog.rows)
                    else:
                        pending.append(segment)
            if not pending:
                break
            for dataset_id, result in self._round(pending, hold):
                outcome, backlog = outcomes[dataset_id], backlogs[dataset_id]
                if isinstance(result, TarnError):
                    outcome.error = result
                elif result is not None:
                    self._observe(result, None if outcome.snapshots else backlog.oldest)
                    outcome.snapshots.append(result)
                    moved(dataset_id, sum(map(_consumed, outcome.snapshots)), backlog.rows)
            remaining = [segment.dataset for segment in pending]
        return outcomes

    def run_one(self, dataset: Dataset, report: Report) -> None:
        """Flush one dataset. Raises the error that stopped it."""
        outcome = self.run([dataset], lambda: report(None))[dataset.id]
        if outcome.error is not None:
            raise outcome.error

    def tidy(self) -> None:
        """Delete the rows of flushed batches from the journal."""
        segments.purge_done(self._database)

    def _observe(self, snapshot: Snapshot, oldest: datetime | None) -> None:
        """Update the metrics. The first snapshot of a round contains the oldest event, and is passed its time."""
        self._watch.flushed.observe(_consumed(snapshot))
        if oldest is not None:
            self._watch.flush_lag.observe((now() - oldest).total_seconds())

    def _close(self, dataset: Dataset) -> _Backlog:
        """Close the open segment."""
        with self._database.write() as connection:
            segments.close(connection, dataset)
            waiting = depth(connection, dataset)
            return _Backlog(segments.last_closed(connection, dataset), waiting.rows, waiting.oldest)

    def _oldest(self, dataset: Dataset, limit: int) -> PendingSegment | None:
        """Return the oldest closed segment, or None if there is none up to this number."""
        with self._database.read() as connection:
            segment = segments.oldest(connection, dataset)
            head = recorded_head(connection, dataset)
        if segment is None or segment.number > limit:
            return None
        config, _ = registry.read(self._store, dataset)
        return PendingSegment(dataset, config, segment, head)

    def _round(
        self, pending: list[PendingSegment], hold: Callable[[], None]
    ) -> Iterator[tuple[str, Snapshot | TarnError | None]]:
        with self._watch.span("build", datasets=len(pending)):
            builds = self._build(pending)
        self._reached("built")
        hold()
        with ThreadPoolExecutor(min(PUBLISHING, len(pending))) as pool:
            published = False
            for segment, result in zip(pending, pool.map(self._publish, builds), strict=True):
                published |= isinstance(result, Snapshot)
                yield segment.dataset.id, result
        if published:
            self._purge()

    def _purge(self) -> None:
        """Delete some flushed rows from the journal; the rest is left to `tidy`, so that clients do not wait for it."""
        try:
            segments.purge_done(self._database, most=PURGE_ROWS)
        except TarnError as error:
            log.warning("flushed rows stay in the journal for now", problem=error.slug)
        self._reached("purged")

    def _build(self, pending: list[PendingSegment]) -> list[Build | TarnError | None]:
        """Build these segments. Returns for each its build or its error, or None if another worker was faster."""
        task_runner = self._task_runner()
        moment = since_epoch(now())
        tasks: list[FlushSegment] = []
        sized: list[tuple[FlushSegment, int]] = []
        owners: list[int] = []
        for number, segment in enumerate(pending):
            own = tasks_of(segment, len(tasks), task_runner.cores, moment)
            tasks += own
            sized += [(task, segment.rows // len(own)) for task in own]
            owners += [number] * len(own)
        outputs: list[list[TableFiles | TarnError]] = [[] for _ in pending]
        for task, output in sorted(
            task_runner.run(pack_into_partitions(sized, task_runner.cores)), key=lambda pair: pair[0]
        ):
            outputs[owners[task]].append(output)
        return [
            self._check(segment, _assemble(segment, files)) for segment, files in zip(pending, outputs, strict=True)
        ]

    def _check(self, pending: PendingSegment, build: Build | TarnError) -> Build | TarnError | None:
        """Return the build if it contains every row of its segment: the rows are deleted afterwards, and unread rows
        must not be.

        Returns None if another worker flushed the segment before its rows were read, so that they were no longer
        visible.
        """
        if isinstance(build, TarnError):
            return build
        tally = build.tally
        consumed = tally.added + tally.seen + tally.deleted + tally.set_aside
        if consumed == pending.rows:
            return build
        try:
            with self._database.read() as connection:
                if recorded_head(connection, pending.dataset) != pending.head:
                    return None
        except TarnError as error:
            return error
        return Internal(f"only {consumed} of the {pending.rows} rows of segment {pending.segment.number} were read")

    def _publish(self, build: Build | TarnError | None) -> Snapshot | TarnError | None:
        """Publish a build and return the snapshot; None if it must be built again, or another worker has published
        it."""
        if build is None or isinstance(build, TarnError):
            return build
        try:
            snapshot = self._publisher.publish(build)
        except HeadMoved:
            return None
        except TarnError as error:
            return error
        log.info("segment flushed", dataset=build.dataset.name, seq=snapshot.seq, **snapshot.rows.model_dump())
        return snapshot


@contextmanager
def _isolated(outcome: FlushOutcome) -> Iterator[None]:
    """Store an error in the outcome of the dataset that it concerns."""
    try:
        yield
    except TarnError as error:
        outcome.error = error


def _consumed(snapshot: Snapshot) -> int:
    rows = snapshot.rows
    return rows.added + rows.seen + rows.deleted + rows.set_aside


def _assemble(pending: PendingSegment, outputs: list[TableFiles | TarnError]) -> Build | TarnError:
    """Combine the outputs of a segment's tasks into one build, or return their first error."""
    failures = [output for output in outputs if isinstance(output, TarnError)]
    if failures:
        return failures[0]
    completed = [output for output in outputs if not isinstance(output, TarnError)]
    tally = Tally(*(sum(counts) for counts in zip(*(output.tally for output in completed), strict=True)))
    stage = pending.segment.stage
    return Build(
        dataset=pending.dataset,
        operation=SnapshotOperation.FLUSH,
        id=new_id(),
        base=pending.head,
        segment=pending.segment.number,
        added={
            "statements": tuple(file for output in completed for file in output.files["statements"]),
            "translog": tuple(file for output in completed for file in output.files["translog"]),
        },
        tally=tally,
        batches=pending.segment.batches,
        set_aside=tuple(_rejected(pending, event) for output in completed for event in output.rejected),
        checksum=pending.config.checksum,
        author=LAKEHOUSE if stage is None else stage.tenant,
        message=None if stage is None else stage.message,
        metadata={} if stage is None else stage.metadata,
    )


def _rejected(pending: PendingSegment, event: InvalidEvent) -> RejectedEventRef:
    commit, position = event.ord >> 32, event.ord & 0xFFFFFFFF
    batch = next(batch for batch in pending.segment.batches if batch.commit == commit)
    return RejectedEventRef(batch=batch.id, position=position, reason=event.reason)
