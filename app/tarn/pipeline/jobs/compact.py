"""Compact: fold fresh files and what happened since into sorted runs, range by range, where it is worth it."""

from collections.abc import Sequence

from tarn.datasets.registry import Dataset
from tarn.errors import Internal
from tarn.lake.commit import Build
from tarn.model.job import CompactOptions, CompactResult, Report
from tarn.model.ranges import EVERYTHING, Range, span
from tarn.model.snapshot import Change, File, Snapshot, TableName
from tarn.pipeline.jobs.rewrite import RewriteBase, RewritePlan, Rewriter
from tarn.pipeline.jobs.split_ranges import FINE, split_range
from tarn.pipeline.tasks.kernel import AnyTask
from tarn.pipeline.tasks.key_ranges import have_many_inserts, inserts_of, marks_of, merge_adjacent, range_loads
from tarn.pipeline.tasks.merge_files import Copy, FoldRange, Part
from tarn.storage.store import Store

GAIN = 0.1
"""Rows that folding a range would touch, for each settled one, from which on it is worth it."""


class Compact:
    """Compactions."""

    def __init__(self, rewriting: Rewriter) -> None:
        self._rewriting = rewriting

    def run(self, dataset: Dataset, options: CompactOptions, report: Report) -> CompactResult:
        """Compact what is worth it, or everything. What is visible stays the same."""

        def plan(base: RewriteBase) -> RewritePlan | None:
            chosen = [EVERYTHING] if options.force else ranges_to_fold(base.snapshot, GAIN)
            if not chosen and not have_many_inserts(base.snapshot, GAIN):
                return None
            return plan_folds(self._rewriting.store, base, chosen, self._rewriting.kernels().cores)

        done = self._rewriting.run(
            dataset, Change.COMPACT, plan, report, _require_live_count if options.force else _unchecked
        )
        return CompactResult(
            operation="compact",
            snapshot=done.made(dataset),
            removed=done.removed,
            added=done.added,
            rows=done.rows,
        )


def _unchecked(build: Build, _: RewriteBase) -> Build:
    return build


def _require_live_count(build: Build, base: RewriteBase) -> Build:
    """The build, if it has as many rows as are live. Raises Internal: what it would take the place of stays."""
    rows = sum(file.rows for file in build.added["statements"])
    if rows != base.snapshot.rows.live:
        raise Internal(f"{rows} of {base.snapshot.rows.live} live statements were found")
    return build


def ranges_to_fold(snapshot: Snapshot, gain: float) -> list[Range]:
    """The ranges that folding would gain so much from."""
    return merge_adjacent(load.keys for load in range_loads(snapshot) if load.loose and load.gain >= gain)


def plan_folds(
    store: Store, base: RewriteBase, chosen: Sequence[Range], cores: int, erased: tuple[str, ...] = ()
) -> RewritePlan | None:
    """Fold some ranges, and nothing else: rows of files that lie across their bounds are copied as they are.

    Inserts are dropped, of all ranges: it costs nothing, as no read needs them.
    """
    snapshot = base.snapshot
    statements = _meeting(snapshot.statements.files, chosen)
    marks = _meeting(marks_of(snapshot), chosen)
    inserts = inserts_of(snapshot)
    if not statements and not marks and not inserts:
        return None
    common = base.dataset.name, base.config.target_file_bytes, base.config.checksum is not None
    tasks: list[tuple[AnyTask, int]] = []
    for keys in chosen:
        for part, rows in split_range(
            store, base.dataset, base.config.target_file_bytes, keys, _meeting(statements, [keys]), cores, FINE
        ):
            fold = FoldRange(
                len(tasks),
                *common,
                within=part,
                statements=_parts(_meeting(statements, [part]), "origin"),
                marks=_parts(_meeting(marks, [part]), "kind"),
                erased=erased,
            )
            tasks.append((fold, rows))
    tables: tuple[tuple[TableName, list[File], str], ...] = (
        ("statements", statements, "origin"),
        ("translog", marks, "kind"),
    )
    for table, files, partition in tables:
        across = [file for file in files if not any(span(file).lies_in(keys) for keys in chosen)]
        for value in sorted({file.partition[partition] for file in across}):
            own = [file for file in across if file.partition[partition] == value]
            copy = Copy(
                len(tasks),
                *common,
                table=table,
                partition=value,
                paths=tuple(file.path for file in own),
                outside=tuple(chosen),
            )
            tasks.append((copy, sum(file.rows for file in own)))
    return RewritePlan(tasks, {"statements": tuple(statements), "translog": (*marks, *inserts)})


def _meeting(files: Sequence[File], chosen: Sequence[Range]) -> list[File]:
    return [file for file in files if any(span(file).meets(keys) for keys in chosen)]


def _parts(files: Sequence[File], partition: str) -> tuple[Part, ...]:
    return tuple(Part(file.path, file.partition[partition]) for file in files)
