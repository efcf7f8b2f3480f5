"""Optimize: many small files into fewer, with the same rows."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from tarn.datasets.registry import Dataset
from tarn.lake.commit import TABLES
from tarn.lake.table_schemas import PARTITIONED
from tarn.model.job import OptimizeOptions, OptimizeResult, Report
from tarn.model.ranges import span
from tarn.model.snapshot import Change, File, TableName
from tarn.pipeline.jobs.rewrite import RewriteBase, RewritePlan, Rewriter
from tarn.pipeline.tasks.kernel import AnyTask
from tarn.pipeline.tasks.merge_files import Copy

SMALL = 0.5
"""Of the target size: files below this share of it are packed."""

TASK_ROWS = 2_000_000
"""Rows that are packed into one file at most: they are sorted again."""


class Optimize:
    """Packings."""

    def __init__(self, rewriting: Rewriter) -> None:
        self._rewriting = rewriting

    def run(self, dataset: Dataset, _: OptimizeOptions, report: Report) -> OptimizeResult:
        """Pack what is small. What is visible stays the same, and so does every row."""
        done = self._rewriting.run(dataset, Change.OPTIMIZE, _plan, report)
        return OptimizeResult(
            operation="optimize",
            snapshot=done.made(dataset),
            removed=done.removed,
            added=done.added,
            rows=done.rows,
        )


def _plan(base: RewriteBase) -> RewritePlan | None:
    tasks: list[tuple[AnyTask, int]] = []
    removed: dict[TableName, tuple[File, ...]] = {}
    for table in TABLES:
        for value, files in bins(base.snapshot.table(table).files, table, base.config.target_file_bytes):
            copy = Copy(
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
    """Small files of a partition that make a large one together, neighbours first."""

    def partition(file: File) -> str:
        return file.partition[PARTITIONED[table]]

    small = [file for file in files if file.size < target * SMALL]
    for value, group in groupby(sorted(small, key=partition), partition):
        held: list[File] = []
        for file in sorted(group, key=lambda file: (span(file).first, file.path)):
            rows, size = sum(each.rows for each in held), sum(each.size for each in held)
            if held and (size + file.size > target or rows + file.rows > TASK_ROWS):
                if len(held) > 1:
                    yield value, held
                held = []
            held.append(file)
        if len(held) > 1:
            yield value, held
