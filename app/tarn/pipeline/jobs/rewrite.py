"""Rewrite files of the tables into other files, with the same rows or fewer, and publish them as a snapshot. Base of
compact, optimize, purge and revert."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import structlog

from tarn.datasets import registry
from tarn.datasets.head import recorded_head
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.errors import SnapshotConflict, TarnError
from tarn.lake import snapshots
from tarn.lake.commit import Build, HeadMoved, SnapshotPublisher, StepCallback
from tarn.model.datasets.dataset import DatasetConfig
from tarn.model.datasets.snapshot import File, Head, Snapshot, SnapshotOperation, TableName, Tally
from tarn.model.ids import new_id
from tarn.model.work.job import MadeSnapshot, Progress, Report
from tarn.pipeline.jobs.flush import TaskRunner
from tarn.pipeline.jobs.flush_plan import pack_into_partitions
from tarn.pipeline.tasks.task import TableFiles, TableTask, Task
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

TRIES = 5
"""Attempts of a rewrite; a new one starts when the head has moved."""

Removed = dict[TableName, tuple[File, ...]]


class RewriteBase(NamedTuple):
    """The head that a rewrite is built on."""

    dataset: Dataset
    config: DatasetConfig
    head: Head
    snapshot: Snapshot


class RewritePlan(NamedTuple):
    """The tasks of a rewrite, each with its rows, and the files that their outputs replace."""

    tasks: Sequence[tuple[TableTask, int]]
    removed: Removed


class RewriteResult(NamedTuple):
    """Outcome of a rewrite. Without a snapshot there was nothing to do."""

    snapshot: Snapshot | None
    removed: int = 0
    added: int = 0
    rows: int = 0
    tally: Tally = Tally()

    @property
    def made(self) -> MadeSnapshot | None:
        return None if self.snapshot is None else MadeSnapshot.of(self.snapshot)


class Rewriter:
    """Builds and publishes rewrites."""

    def __init__(
        self,
        database: Database,
        store: Store,
        publisher: SnapshotPublisher,
        task_runner: Callable[[], TaskRunner],
        reached: StepCallback = lambda _: None,
    ) -> None:
        self._database = database
        self.store = store
        self._publisher = publisher
        self.task_runner = task_runner
        self._reached = reached

    def run(
        self,
        dataset: Dataset,
        operation: SnapshotOperation,
        plan: Callable[[RewriteBase], RewritePlan | None],
        report: Report,
        finish: Callable[[Build, RewriteBase], Build] = lambda build, _: build,
    ) -> RewriteResult:
        """Plan on the head, build, publish; start again on the new head if the build does not apply to it.

        Raises SnapshotConflict if the head moves every time, and errors of storage, database and tasks.
        """
        for _ in range(TRIES):
            base = self.base(dataset)
            planned = None if base is None else plan(base)
            if base is None or planned is None:
                return RewriteResult(None)
            build = finish(self._build(base, operation, planned, report), base)
            self._reached("built")
            report(None)
            try:
                return self.publish(build)
            except HeadMoved:
                log.info("the head moved during a rewrite, which is retried", dataset=dataset.name, operation=operation)
        raise SnapshotConflict(
            f"the head of {dataset.name!r} moved {TRIES} times while it was rewritten",
            expected=None if base is None else base.head.id,
            head=None,
        )

    def base(self, dataset: Dataset) -> RewriteBase | None:
        """Return the head, or None if there is no snapshot."""
        with self._database.read() as connection:
            head = recorded_head(connection, dataset)
        if head.id is None:
            return None
        config, _ = registry.read(self.store, dataset)
        return RewriteBase(dataset, config, head, snapshots.read(self.store, dataset, head.seq))

    def publish(self, build: Build) -> RewriteResult:
        """Publish a build. Raises HeadMoved."""
        snapshot = self._publisher.publish(build)
        log.info("files rewritten", dataset=build.dataset.name, operation=build.operation, seq=snapshot.seq)
        added = [file for files in build.added.values() for file in files]
        removed = sum(map(len, build.removed.values()))
        return RewriteResult(snapshot, removed, len(added), sum(file.rows for file in added), build.tally)

    def _build(self, base: RewriteBase, operation: SnapshotOperation, plan: RewritePlan, report: Report) -> Build:
        outputs = run_tasks(self.task_runner(), plan.tasks, report)
        return Build(
            dataset=base.dataset,
            operation=operation,
            id=new_id(),
            base=base.head,
            segment=None,
            added=files_of(outputs),
            removed=plan.removed,
            tally=tally_of(outputs),
            checksum=base.config.checksum,
        )


def run_tasks(task_runner: TaskRunner, tasks: Sequence[tuple[Task[Result], int]], report: Report) -> list[Result]:
    """Run tasks, given with their rows, and return their results in order. Raises the first error."""
    if not tasks:
        return []
    total = sum(rows for _, rows in tasks)
    report(Progress(done=0, total=total, unit="rows"))
    results: list[Result] = []
    for _, result in sorted(task_runner.run(pack_into_partitions(tasks, task_runner.cores)), key=lambda pair: pair[0]):
        if isinstance(result, TarnError):
            raise result
        results.append(result)
    report(Progress(done=total, total=total, unit="rows"))
    return results


def files_of(outputs: Iterable[TableFiles]) -> dict[TableName, tuple[File, ...]]:
    outputs = list(outputs)
    tables: tuple[TableName, TableName] = ("statements", "translog")
    return {table: tuple(file for output in outputs for file in output.files.get(table, ())) for table in tables}


def tally_of(outputs: Iterable[TableFiles]) -> Tally:
    return Tally(*(sum(counts) for counts in zip(*(output.tally for output in outputs), strict=True)))
