"""Rewriting files of the store: the same rows in other files, or fewer, in a snapshot of its own."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import structlog

from tarn.datasets import registry as datasets
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.errors import SnapshotConflict, TarnError
from tarn.lake import snapshots
from tarn.lake.commit import Build, HeadMoved, Reached, SnapshotPublisher
from tarn.model.dataset import DatasetConfig
from tarn.model.ids import new_id
from tarn.model.job import MadeSnapshot, Progress, Report
from tarn.model.snapshot import Change, File, Head, Snapshot, TableName, Tally
from tarn.pipeline.jobs.flush import Kernels
from tarn.pipeline.jobs.flush_plan import pack_into_slots
from tarn.pipeline.tasks.kernel import AnyTask, Output
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

TRIES = 5
"""How often a rewriting is begun again because the head moved away under it."""

Removed = dict[TableName, tuple[File, ...]]


class RewriteBase(NamedTuple):
    """What a rewriting is built on."""

    dataset: Dataset
    config: DatasetConfig
    head: Head
    snapshot: Snapshot


class RewritePlan(NamedTuple):
    """The tasks of a rewriting, each with its rows, and the files that theirs take the place of."""

    tasks: list[tuple[AnyTask, int]]
    removed: Removed


class RewriteResult(NamedTuple):
    """What came of it. Without a snapshot there was nothing to do."""

    snapshot: Snapshot | None
    removed: int = 0
    added: int = 0
    rows: int = 0
    tally: Tally = Tally()

    def made(self, dataset: Dataset) -> MadeSnapshot | None:
        if self.snapshot is None:
            return None
        return MadeSnapshot(dataset=dataset.name, seq=self.snapshot.seq, id=self.snapshot.id)


class Rewriter:
    """Makes and publishes rewritings."""

    def __init__(
        self,
        database: Database,
        store: Store,
        publisher: SnapshotPublisher,
        kernels: Callable[[], Kernels],
        reached: Reached = lambda _: None,
    ) -> None:
        self._database = database
        self.store = store
        self._publisher = publisher
        self.kernels = kernels
        self._reached = reached

    def run(
        self,
        dataset: Dataset,
        operation: Change,
        plan: Callable[[RewriteBase], RewritePlan | None],
        report: Report,
        finish: Callable[[Build, RewriteBase], Build] = lambda build, _: build,
    ) -> RewriteResult:
        """Plan on the head, build, publish; again on another head where the build does not hold on it.

        Raises SnapshotConflict if the head moves away every time, and whatever storage, database and kernels raise.
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
                log.info("what was rewritten does not hold any more", dataset=dataset.name, operation=operation)
        raise SnapshotConflict(
            f"the head of {dataset.name!r} moved {TRIES} times while it was rewritten",
            expected=None if base is None else base.head.id,
            head=None,
        )

    def base(self, dataset: Dataset) -> RewriteBase | None:
        """The head, if there is one."""
        with self._database.read() as connection:
            head = snapshots.recorded(connection, dataset)
        if head.id is None:
            return None
        config, _ = datasets.read(self.store, dataset)
        return RewriteBase(dataset, config, head, snapshots.read(self.store, dataset, head.seq))

    def publish(self, build: Build) -> RewriteResult:
        """Raises HeadMoved."""
        snapshot = self._publisher.publish(build)
        log.info("rewritten", dataset=build.dataset.name, operation=build.operation, seq=snapshot.seq)
        added = [file for files in build.added.values() for file in files]
        removed = sum(map(len, build.removed.values()))
        return RewriteResult(snapshot, removed, len(added), sum(file.rows for file in added), build.tally)

    def _build(self, base: RewriteBase, operation: Change, plan: RewritePlan, report: Report) -> Build:
        outputs = run_tasks(self.kernels(), plan.tasks, report)
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


def run_tasks(kernels: Kernels, tasks: Sequence[tuple[AnyTask, int]], report: Report) -> list[Output]:
    """What tasks made, in their order. Raises the first error of any."""
    if not tasks:
        return []
    total = sum(rows for _, rows in tasks)
    report(Progress(done=0, total=total, unit="rows"))
    made: list[Output] = []
    for _, output in sorted(kernels.run(pack_into_slots(tasks, kernels.cores)), key=lambda pair: pair[0]):
        if isinstance(output, TarnError):
            raise output
        made.append(output)
    report(Progress(done=total, total=total, unit="rows"))
    return made


def files_of(outputs: Iterable[Output]) -> dict[TableName, tuple[File, ...]]:
    outputs = list(outputs)
    tables: tuple[TableName, TableName] = ("statements", "translog")
    return {table: tuple(file for output in outputs for file in output.files.get(table, ())) for table in tables}


def tally_of(outputs: Iterable[Output]) -> Tally:
    return Tally(*(sum(counts) for counts in zip(*(output.tally for output in outputs), strict=True)))
