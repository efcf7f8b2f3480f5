"""Tasks of mappings, and what comes of them. Light to import: what does them is not."""

from dataclasses import dataclass
from typing import NamedTuple

from tarn.errors import Fault
from tarn.model.names import DatasetName
from tarn.model.omissions import Omissions


@dataclass(frozen=True, slots=True)
class MapRows:
    """Some whole records of a file, and what to make of them."""

    number: int
    dataset: DatasetName
    path: str
    start: int
    end: int
    encoding: str
    delimiter: str
    header: tuple[str, ...]
    mapping: bytes
    """The mapping's document."""
    origin: str
    moment: int
    """When what it says was seen: microseconds since 1970."""
    stage: int
    """The batch that it is part of."""
    tenant: str
    expiry: float
    """Seconds after which rows that nobody finishes are given up."""
    in_packs: bool
    """Whether everybody who is there reads packs; else what it makes is written in rows."""


class MappedRows(NamedTuple):
    """What came of a task: a batch of the stage, and rows that could not be used."""

    batch: int
    records: int
    """Lines of the file that are one, blank ones with them."""
    rows: int
    entities: int
    statements: int
    bad: int
    faults: list[Fault]
    """The first of them; each one's line is its record, counted from the task's first as 1."""
    omitted: Omissions
    """Values that were left out of the other rows, with lines that are counted likewise."""
