"""Revert: an older state made the present one, or what one snapshot did taken back. History goes on; nothing is undone
in it."""

from collections.abc import Sequence

import structlog

from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.errors import NoSnapshots, SnapshotConflict
from tarn.journal import head as heads
from tarn.lake import snapshots
from tarn.lake.commit import TABLES, Build, HeadMoved
from tarn.lake.snapshots import Named
from tarn.model.ids import new_id, now
from tarn.model.job import Report, RevertOptions, RevertResult
from tarn.model.snapshot import Change, File, Snapshot, TableName, Tally
from tarn.model.statement import EPOCH
from tarn.pipeline.jobs.flush import Flush
from tarn.pipeline.jobs.rewrite import TRIES, RewriteBase, Rewriter, files_of, run_tasks, tally_of
from tarn.pipeline.tasks.compare_snapshots import SnapshotFiles, TakeBack, compare

log = structlog.get_logger(__name__)


class Revert:
    """Reverts."""

    def __init__(self, database: Database, rewriting: Rewriter, flush: Flush) -> None:
        self._database = database
        self._rewriting = rewriting
        self._flush = flush

    def run(self, dataset: Dataset, options: RevertOptions, report: Report) -> RevertResult:
        """Make the snapshot, if there is anything to revert.

        What was acknowledged before is flushed first, and so is behind it; what is acknowledged meanwhile comes after
        it, in whichever snapshot. Where the head moves in between, it is begun again. Raises SnapshotConflict if it
        always does; SnapshotNotFound, SnapshotGone, RefNotFound, NoSnapshots.
        """
        for _ in range(TRIES):
            named = self._named(dataset, options)
            place = self._flushed(dataset, report)
            base = self._rewriting.base(dataset)
            if base is None:
                raise NoSnapshots(f"{dataset.name!r} has no snapshots yet")
            build = (
                self._to(base, named, options, report)
                if options.to
                else self._undo(base, named, place, options, report)
            )
            if build is None:
                return RevertResult(operation="revert", snapshot=None, added=0, ended=0)
            report(None)
            try:
                done = self._rewriting.publish(build)
            except HeadMoved:
                log.info("the head moved away under a revert", dataset=dataset.name)
                continue
            tally = build.tally
            return RevertResult(operation="revert", snapshot=done.made(dataset), added=tally.added, ended=tally.ended)
        raise SnapshotConflict(f"the head of {dataset.name!r} moved {TRIES} times meanwhile", expected=None, head=None)

    def _named(self, dataset: Dataset, options: RevertOptions) -> Named:
        with self._database.read() as connection:
            return snapshots.find_state(connection, dataset, options.to or options.undo or "")

    def _flushed(self, dataset: Dataset, report: Report) -> int:
        """Flush what is acknowledged by now. Returns a commit number between all of that and whatever comes later."""
        with self._database.write() as connection:
            place = heads.rotate_and_take(connection, dataset)
        flushed = self._flush.run([dataset], lambda: report(None))[dataset.id]
        if flushed.error is not None:
            raise flushed.error
        return place

    def _to(self, base: RewriteBase, named: Named, options: RevertOptions, report: Report) -> Build | None:
        wanted = snapshots.read_named(self._rewriting.store, base.dataset, named)
        if wanted.content == base.snapshot.content:
            return None
        (output,) = run_tasks(
            self._rewriting.kernels(),
            [(compare(base.dataset.name, wanted, base.snapshot), base.snapshot.rows.live)],
            report,
        )
        added: dict[TableName, tuple[File, ...]] = {}
        removed: dict[TableName, tuple[File, ...]] = {}
        for table in TABLES:
            added[table] = _without(wanted.table(table).files, base.snapshot.table(table).files)
            removed[table] = _without(base.snapshot.table(table).files, wanted.table(table).files)
        if not any(added.values()) and not any(removed.values()):
            return None
        return self._build(base, options, added, removed, output.tally)

    def _undo(
        self, base: RewriteBase, named: Named, place: int, options: RevertOptions, report: Report
    ) -> Build | None:
        store, dataset = self._rewriting.store, base.dataset
        done = snapshots.read_named(store, dataset, named)
        before: Snapshot | None = None
        if done.parent is not None:
            with self._database.read() as connection:
                parent = snapshots.find(connection, dataset, done.parent)
            before = snapshots.read_named(store, dataset, parent)
        task = TakeBack(
            0,
            dataset.name,
            base.config.target_file_bytes,
            base.config.checksum is not None,
            before=SnapshotFiles.of(before),
            done=SnapshotFiles.of(done),
            present=SnapshotFiles.of(base.snapshot),
            ord=place << 32,
            moment=int((now() - EPOCH).total_seconds() * 1_000_000),
        )
        outputs = run_tasks(self._rewriting.kernels(), [(task, done.rows.added + done.rows.ended)], report)
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
            operation=Change.REVERT,
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
