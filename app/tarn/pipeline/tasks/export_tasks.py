"""Export tasks: make a key range's part of each export file, or count how statistics changed between two snapshots.

Cheap to import: the code that does the work (`export_parts`) imports FtM, which takes a second that executors that only
flush are spared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tarn.model.datasets.export import ExportKind, OmittedEdges
from tarn.model.datasets.ranges import Range
from tarn.pipeline.tasks.task import Task, TaskContext

if TYPE_CHECKING:
    from tarn.model.ftm.statistics import Statistics
    from tarn.query.incremental_statistics import ChangedStatistics


class ExportedRange(NamedTuple):
    """The exports of one key range."""

    parts: Mapping[ExportKind, str]
    """Path of the range's part of each file."""
    statistics: "Statistics | None"
    """Statistics of the range, if requested."""
    invalid: Mapping[ExportKind, int]
    """Number of entities that each part leaves out because their statements do not assemble."""
    omitted_edges: OmittedEdges
    """Relationships that are not in the range's part of the graph."""


@dataclass(frozen=True, slots=True)
class ExportRange(Task[ExportedRange]):
    """Export a key range of a snapshot."""

    dataset_id: str
    seq: int | None
    """Number of the manifest; None if there is none yet."""
    base: int | None
    """Number of the manifest that the delta starts at; None if it lists everything."""
    within: Range
    kinds: tuple[ExportKind, ...]
    folder: str
    compression: str | None

    def run(self, context: TaskContext) -> Callable[[], ExportedRange]:
        from tarn.pipeline.tasks.export_parts import export_range

        exported = export_range(self, context)
        return lambda: exported


@dataclass(frozen=True, slots=True)
class CountDifferences(Task["ChangedStatistics | None"]):
    """Count the entities that differ between two snapshots, as they are in each. The result is None if so much differs
    that it is faster to count everything."""

    dataset_id: str
    former: int
    seq: int

    def run(self, context: TaskContext) -> "Callable[[], ChangedStatistics | None]":
        from tarn.pipeline.tasks.export_parts import count_differences

        exchanged = count_differences(self, context)
        return lambda: exchanged
