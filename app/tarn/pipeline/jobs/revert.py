"""Revert job: restore an older state as a new snapshot, or undo the changes of one snapshot. History is only appended
to."""

from collections.abc import Sequence

import structlog

from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.errors import NoSnapshots, SnapshotConflict
from tarn.journal import head
from tarn.lake import snapshots
from tarn.lake.commit import TABLES, Build, HeadMoved
from tarn.lake.snapshots import SnapshotKey
from tarn.model.datasets.snapshot import File, Snapshot, SnapshotOperation, TableName, Tally
from tarn.model.ids import new_id, now
from tarn.model.timestamps import since_epoch
from tarn.model.work.job import Report, RevertOptions, RevertResult
from tarn.pipeline.jobs.flush import Flush
from tarn.pipeline.jobs.rewrite import TRIES, RewriteBase, Rewriter, files_of, run_tasks, tally_of
from tarn.pipeline.tasks.compare_snapshots import SnapshotFiles, UndoChanges, compare

log = structlog.get_logger(__name__)


class Revert:
    """The revert job."""

    def __init__(self, database: Database, rewriter: Rewriter, flush: Flush) -> None:
        self._database = database
        self._rewriter = rewriter
        self._flush = flush

    def run(self, dataset: Dataset, options: RevertOptions, report: Report) -> RevertResult:
        """Publish the reverting snapshot, if there is anything to revert.

        Writes that were acknowledged before are flushed first, and so are reverted, too; writes that are acknowledged
        meanwhile come after the revert, in some later snapshot. If the head moves meanwhile, it starts again. Raises
        SnapshotConflict if the head moves every time; SnapshotNotFound, SnapshotGone, RefNotFound, NoSnapshots.
        """
        for _ in range(TRIES):
            named = self._named(dataset, options)
            commit = self._flush_all(dataset, report)
            base = self._rewriter.base(dataset)
            if base is None:
                raise NoSnapshots(f"{dataset.name!r} has no snapshots yet")
            build = (
                self._to(base, named, options, report)
                if options.to
                else self._undo(base, named, commit, options, report)
            )
            if build is None:
                return RevertResult(operation="revert", snapshot=None, added=0, ended=0)
            report(None)
            try:
                done = self._rewriter.publish(build)
            except HeadMoved:
                log.info("the head moved during a revert, which is retried", dataset=dataset.name)
                continue
            tally = build.tally
            return RevertResult(operation="revert", snapshot=done.made, added=tally.added, ended=tally.ended)
        raise SnapshotConflict(
            f"the head of {dataset.name!r} moved {TRIES} times during the revert; try again", expected=None, head=None
        )

    def _named(self, dataset: Dataset, options: RevertOptions) -> SnapshotKey:
        with self._database.read() as connection:
            return snapshots.find_state(connection, dataset, options.to or options.undo or "")

    def _flush_all(self, dataset: Dataset, report: Report) -> int:
        """Flush what is acknowledged by now. Returns a commit number between all of that and everything later."""
        with self._database.write() as connection:
            commit = head.rotate_and_take(connection, dataset)
        self._flush.run_one(dataset, report)
        return commit

    def _to(self, base: RewriteBase, named: SnapshotKey, options: RevertOptions, report: Report) -> Build | None:
        target = snapshots.read_named(self._rewriter.store, base.dataset, named)
        if target.content == base.snapshot.content:
            return None
        (output,) = run_tasks(
            self._rewriter.task_runner(),
            [(compare(base.dataset.name, target, base.snapshot), base.snapshot.rows.live)],
            report,
        )
        added: dict[TableName, tuple[File, ...]] = {}
        removed: dict[TableName, tuple[File, ...]] = {}
        for table in TABLES:
            added[table] = _without(target.table(table).files, base.snapshot.table(table).files)
            removed[table] = _without(base.snapshot.table(table).files, target.table(table).files)
        if not any(added.values()) and not any(removed.values()):
            return None
        return self._build(base, options, added, removed, output.tally)

    def _undo(
        self, base: RewriteBase, named: SnapshotKey, commit: int, options: RevertOptions, report: Report
    ) -> Build | None:
        store, dataset = self._rewriter.store, base.dataset
        done = snapshots.read_named(store, dataset, named)
        before: Snapshot | None = None
        if done.parent is not None:
            with self._database.read() as connection:
                parent = snapshots.find(connection, dataset, done.parent)
            before = snapshots.read_named(store, dataset, parent)
        task = UndoChanges(
            0,
            dataset.name,
            base.config.target_file_bytes,
            base.config.checksum is not None,
            before=SnapshotFiles.of(before),
            done=SnapshotFiles.of(done),
            present=SnapshotFiles.of(base.snapshot),
            ord=commit << 32,
            moment=since_epoch(now()),
        )
        outputs = run_tasks(self._rewriter.task_runner(), [(task, done.rows.added + done.rows.ended)], report)
        added = files_of(outputs)
        if not any(added.values()):
            return None
        return self._build(base, options, added, {}, tally_of(outputs))

    def _build(
        self,
        base: RewriteBase,
        options: RevertOptions,
        added: dict[TableName, tuple[File, ...]],
        removed: dict[TableName, tuple[File, ...]],
        tally: Tally,
    ) -> Build:
        return Build(
            dataset=base.dataset,
            operation=SnapshotOperation.REVERT,
            id=new_id(),
            base=base.head,
            segment=None,
            added=added,
            removed=removed,
            tally=tally,
            checksum=base.config.checksum,
            message=options.message,
        )


def _without(files: Sequence[File], others: Sequence[File]) -> tuple[File, ...]:
    known = {file.path for file in others}
    return tuple(file for file in files if file.path not in known)
