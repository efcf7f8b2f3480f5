"""Compact job: fold fresh files and translog marks into sorted files, for the key ranges where it is worth it."""

from collections.abc import Sequence

from tarn.datasets.registry import Dataset
from tarn.errors import Internal
from tarn.lake.commit import Build
from tarn.lake.scans import partition_files, prune, select_marks
from tarn.model.datasets.ranges import EVERYTHING, Range, span
from tarn.model.datasets.snapshot import File, Snapshot, SnapshotOperation, TableName
from tarn.model.work.job import CompactOptions, CompactResult, Report
from tarn.pipeline.jobs.rewrite import RewriteBase, RewritePlan, Rewriter
from tarn.pipeline.jobs.split_ranges import FINE, split_range
from tarn.pipeline.tasks.key_ranges import have_many_inserts, inserts_of, merge_adjacent, range_loads
from tarn.pipeline.tasks.merge_files import CopyRows, FoldRange
from tarn.pipeline.tasks.task import TableTask
from tarn.storage.store import Store

MIN_UNMERGED_SHARE = 0.1
"""Minimum number of unmerged rows per base row of a range that is folded."""


class Compact:
    """The compact job."""

    def __init__(self, rewriter: Rewriter) -> None:
        self._rewriter = rewriter

    def run(self, dataset: Dataset, options: CompactOptions, report: Report) -> CompactResult:
        """Compact the ranges that are worth it, or everything with `force`. The visible content stays the same."""

        def plan(base: RewriteBase) -> RewritePlan | None:
            ranges = [EVERYTHING] if options.force else ranges_to_fold(base.snapshot, MIN_UNMERGED_SHARE)
            if not ranges and not have_many_inserts(base.snapshot, MIN_UNMERGED_SHARE):
                return None
            return plan_folds(self._rewriter.store, base, ranges, self._rewriter.task_runner().cores)

        rewritten = self._rewriter.run(
            dataset, SnapshotOperation.COMPACT, plan, report, _require_live_count if options.force else _unchecked
        )
        return CompactResult(
            operation="compact",
            snapshot=rewritten.made,
            removed=rewritten.removed,
            added=rewritten.added,
            rows=rewritten.rows,
        )


def _unchecked(build: Build, _: RewriteBase) -> Build:
    return build


def _require_live_count(build: Build, base: RewriteBase) -> Build:
    """Return the build if it has as many rows as the snapshot has live statements. Raises Internal otherwise: then
    nothing is published, and the old files stay."""
    rows = sum(file.rows for file in build.added["statements"])
    if rows != base.snapshot.rows.live:
        raise Internal(
            f"compaction produced {rows} rows, but the snapshot has {base.snapshot.rows.live} live statements"
        )
    return build


def ranges_to_fold(snapshot: Snapshot, min_unmerged_share: float) -> list[Range]:
    """Return the ranges whose share of unmerged rows is at least `min_unmerged_share`."""
    return merge_adjacent(
        load.keys for load in range_loads(snapshot) if load.unmerged_rows and load.unmerged_share >= min_unmerged_share
    )


def plan_folds(
    store: Store, base: RewriteBase, ranges: Sequence[Range], cores: int, erased: tuple[str, ...] = ()
) -> RewritePlan | None:
    """Plan to fold only these ranges: rows outside of them, in files that cross their bounds, are copied unchanged.

    Inserts of the translog are dropped for all ranges: it costs nothing, as no read needs them.
    """
    snapshot = base.snapshot
    statements = prune(snapshot.statements.files, keys=ranges)
    marks = prune(select_marks(snapshot.translog.files), keys=ranges)
    inserts = inserts_of(snapshot)
    if not statements and not marks and not inserts:
        return None
    common = base.dataset.name, base.config.target_file_bytes, base.config.checksum is not None
    tasks: list[tuple[TableTask, int]] = []
    for keys in ranges:
        for part, rows in split_range(
            store, base.dataset, base.config.target_file_bytes, keys, prune(statements, keys=[keys]), cores, FINE
        ):
            fold = FoldRange(
                len(tasks),
                *common,
                within=part,
                statements=partition_files("statements", prune(statements, keys=[part])),
                marks=partition_files("translog", prune(marks, keys=[part])),
                erased=erased,
            )
            tasks.append((fold, rows))
    tables: tuple[tuple[TableName, list[File], str], ...] = (
        ("statements", statements, "origin"),
        ("translog", marks, "kind"),
    )
    for table, files, partition in tables:
        across = [file for file in files if not any(span(file).lies_in(keys) for keys in ranges)]
        for value in sorted({file.partition[partition] for file in across}):
            own = [file for file in across if file.partition[partition] == value]
            copy = CopyRows(
                len(tasks),
                *common,
                table=table,
                partition=value,
                paths=tuple(file.path for file in own),
                outside=tuple(ranges),
            )
            tasks.append((copy, sum(file.rows for file in own)))
    return RewritePlan(tasks, {"statements": tuple(statements), "translog": (*marks, *inserts)})
