"""Mapping task: map some rows of a file into a part of a stage.

Cheap to import: the code that does the work (`mapping_rows`) imports FtM, which takes a second that executors that only
flush are spared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tarn.errors import FieldError
from tarn.model.ftm.omissions import Omissions
from tarn.pipeline.tasks.task import Task, TaskContext


class MappedRows(NamedTuple):
    """The statements of some rows, as a part of the stage, and the rows and values that could not be used."""

    batch: int
    records: int
    """Number of records, including blank lines."""
    rows: int
    entities: int
    statements: int
    bad: int
    faults: list[FieldError]
    """The first of them. `line` is the number of the record within the task, from 1."""
    omitted: Omissions
    """Values that were left out of the other rows, with lines counted in the same way."""


@dataclass(frozen=True, slots=True)
class MapRows(Task[MappedRows]):
    """Map a range of a file that consists of whole records."""

    path: str
    start: int
    end: int
    encoding: str
    delimiter: str
    header: tuple[str, ...]
    mapping: bytes
    """The mapping document."""
    origin: str
    moment: int
    """When the statements were seen: microseconds since 1970."""
    stage: int
    """The batch of the stage that the part belongs to."""
    tenant: str
    expiry: float
    """Seconds after which an unfinished part expires."""
    in_packs: bool
    """Whether to write packs. Rows are written if there are processes of a version that cannot read packs."""

    def run(self, context: TaskContext) -> Callable[[], MappedRows]:
        from tarn.pipeline.tasks.mapping_rows import map_rows

        mapped = map_rows(self, context.store, context.stage_parts)
        return lambda: mapped
