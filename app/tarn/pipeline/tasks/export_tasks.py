"""Tasks of exports, and what comes of them. Light to import: what does them is not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tarn.model.export import Kind, OmittedEdges
from tarn.model.names import DatasetName
from tarn.model.ranges import Range

if TYPE_CHECKING:
    from tarn.model.statistics import Statistics
    from tarn.query.incremental_statistics import ChangedStatistics


@dataclass(frozen=True, slots=True)
class ExportRange:
    """A range of a snapshot, and what to make of it."""

    number: int
    dataset: DatasetName
    dataset_id: str
    seq: int | None
    """The number of the manifest; None: there is none yet."""
    base: int | None
    """The number of the one that a delta begins at; None: with nothing."""
    within: Range
    kinds: tuple[Kind, ...]
    folder: str
    compression: str | None


@dataclass(frozen=True, slots=True)
class Recount:
    """What the entities that differ between two snapshots count for in each of them."""

    number: int
    dataset: DatasetName
    dataset_id: str
    former: int
    seq: int


class ExportedRange(NamedTuple):
    """What came of a task."""

    parts: Mapping[Kind, str]
    """Where the range's part of each file lies."""
    statistics: "Statistics | None" = None
    """Of the range, if they were asked for."""
    exchanged: "ChangedStatistics | None" = None
    """Of a recount, unless too much differs for it to be worth it."""
    invalid: Mapping[Kind, int] = {}
    """How many entities each part leaves out because their statements do not assemble."""
    omitted_edges: OmittedEdges | None = None
    """Relationships that are not in the range's part of the graph."""
