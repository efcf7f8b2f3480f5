"""Optimize job: merge many small files into fewer, with the same rows."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from tarn.datasets.registry import Dataset
from tarn.lake.commit import TABLES
from tarn.lake.table_schemas import PARTITIONED
from tarn.model.datasets.ranges import span
from tarn.model.datasets.snapshot import File, SnapshotOperation, TableName
from tarn.model.work.job import OptimizeOptions, OptimizeResult, Report
from tarn.pipeline.jobs.rewrite import RewriteBase, RewritePlan, Rewriter
from tarn.pipeline.tasks.merge_files import CopyRows
from tarn.pipeline.tasks.task import TableTask

SMALL = 0.5
"""Share of the target size below which a file is small and is merged."""

TASK_ROWS = 2_000_000
"""Rows that are merged into one file at most, because they are sorted again."""


class Optimize:
    """The optimize job."""

    def __init__(self, rewriter: Rewriter) -> None:
        self._rewriter = rewriter

    def run(self, dataset: Dataset, _: OptimizeOptions, report: Report) -> OptimizeResult:
        """Merge the small files. Every row, and so the visible content, stays the same."""
        rewritten = self._rewriter.run(dataset, SnapshotOperation.OPTIMIZE, _plan, report)
        return OptimizeResult(
            operation="optimize",
            snapshot=rewritten.made,
            removed=rewritten.removed,
            added=rewritten.added,
            rows=rewritten.rows,
        )


def _plan(base: RewriteBase) -> RewritePlan | None:
    tasks: list[tuple[TableTask, int]] = []
    removed: dict[TableName, tuple[File, ...]] = {}
    for table in TABLES:
        for value, files in bins(base.snapshot.table(table).files, table, base.config.target_file_bytes):
            copy = CopyRows(
                len(tasks),
                base.dataset.name,
                base.config.target_file_bytes,
                base.config.checksum is not None,
                table=table,
                partition=value,
                paths=tuple(file.path for file in files),
            )
            tasks.append((copy, sum(file.rows for file in files)))
            removed[table] = (*removed.get(table, ()), *files)
    return RewritePlan(tasks, removed) if tasks else None


def bins(files: Sequence[File], table: TableName, target: int) -> Iterator[tuple[str, list[File]]]:
    """Yield groups of small files of a partition that make a large one together, neighbours by key first."""

    def partition(file: File) -> str:
        return file.partition[PARTITIONED[table]]

    small = [file for file in files if file.size < target * SMALL]
    for value, partition_files in groupby(sorted(small, key=partition), partition):
        group: list[File] = []
        for file in sorted(partition_files, key=lambda file: (span(file).first, file.path)):
            rows, size = sum(each.rows for each in group), sum(each.size for each in group)
            if group and (size + file.size > target or rows + file.rows > TASK_ROWS):
                if len(group) > 1:
                    yield value, group
                group = []
            group.append(file)
        if len(group) > 1:
            yield value, group
