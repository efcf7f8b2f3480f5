"""Exports of a dataset: kinds, file names, media types, tags and freshness."""

import hashlib
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field

from tarn.model.names import TagKey


class ExportKind(StrEnum):
    """The kind of an export, in the order in which exports are made: the index lists all the others."""

    STATEMENTS = "statements"
    ENTITIES = "entities"
    STATISTICS = "statistics"
    DOCUMENTS = "documents"
    GRAPH = "graph"
    DELTA = "delta"
    INDEX = "index"

    @property
    def form(self) -> "ExportFormat":
        return EXPORT_FORMATS[self]

    @property
    def assembles(self) -> bool:
        """Whether it contains assembled entities, and so omits invalid ones."""
        return self not in (ExportKind.STATEMENTS, ExportKind.INDEX)


class ExportFormat(NamedTuple):
    """File name, tag, media type and title of a kind of export."""

    name: str
    tag: TagKey
    media_type: str
    title: str
    is_long: bool = True
    """Whether its size grows with the dataset, so that it is compressed if the dataset is configured so."""

    def named(self, compression: str | None) -> str:
        return self.name + (SUFFIXES[compression] if compression is not None and self.is_long else "")

    @property
    def names(self) -> set[str]:
        """Return all file names it may have, one per compression."""
        return {self.named(compression) for compression in (None, *SUFFIXES)}


SUFFIXES = {"gzip": ".gz", "zstd": ".zst"}
PACKED = {"gz": "application/gzip", "zst": "application/zstd"}

FTM_JSON = "application/json+ftm"

EXPORT_FORMATS = {
    ExportKind.STATEMENTS: ExportFormat("statements.csv", TagKey("exports/statements"), "text/csv", "Statements"),
    ExportKind.ENTITIES: ExportFormat(
        "entities.ftm.json", TagKey("exports/entities_json"), FTM_JSON, "FollowTheMoney entities"
    ),
    ExportKind.STATISTICS: ExportFormat(
        "statistics.json", TagKey("exports/statistics"), "application/json", "Statistics", is_long=False
    ),
    ExportKind.DOCUMENTS: ExportFormat("documents.csv", TagKey("exports/documents"), "text/csv", "Documents"),
    ExportKind.GRAPH: ExportFormat("graph.cypher", TagKey("exports/graph"), "text/plain", "Graph, as Cypher"),
    ExportKind.DELTA: ExportFormat(
        "entities.delta.json", TagKey("exports/delta"), "application/x-ndjson", "Changed entities"
    ),
    ExportKind.INDEX: ExportFormat("index.json", TagKey("exports/index"), "application/json", "Index", is_long=False),
}


def media_type(kind: ExportKind, name: str) -> str:
    """Return the media type of an export's file, by its suffix."""
    return PACKED.get(name.rsplit(".", 1)[-1], kind.form.media_type)


INVALID_DESCRIPTION = (
    "Number of invalid entities that it omits because their statements do not assemble (`GET …/entities/invalid`). "
    "Null: it does not contain entities, or a version that did not count them made it."
)

DELTA_INDEX = "delta.json"
"""List of the deltas that are kept; rewritten with each delta."""


def _by_any_name(value: Any) -> Any:
    """Return the kind for its name, its file name or its tag name."""
    names = {form.name: kind for kind, form in EXPORT_FORMATS.items()}
    names |= {form.tag.partition("/")[2]: kind for kind, form in EXPORT_FORMATS.items()}
    return names.get(value, value) if isinstance(value, str) else value


AnyKind = Annotated[ExportKind, BeforeValidator(_by_any_name)]


MAX_LISTED_ENTITIES = 10
"""Maximum entities with omitted relationships that are listed by id."""


class OmittedEdges(BaseModel):
    """Relationships omitted from a graph, of entities that are edges between too many others."""

    count: int = Field(0, description="Total number of omitted relationships.")
    entities: int = Field(0, description="Number of entities with omitted relationships.")
    first: list[str] = Field(default=[], description="The ids of the first ten of these entities.")

    def add(self, entity_id: str, count: int) -> None:
        self.merge(OmittedEdges(count=count, entities=1, first=[entity_id]))

    def merge(self, other: "OmittedEdges") -> None:
        """Add the omissions of the next part of the same graph."""
        self.count += other.count
        self.entities += other.entities
        self.first = [*self.first, *other.first][:MAX_LISTED_ENTITIES]


class ExportRecord(NamedTuple):
    """An export that was made, and the snapshot it was made from."""

    kind: ExportKind
    name: str
    snapshot: str | None
    """None: the dataset had no snapshot yet."""
    seq: int
    content: int
    resolved: datetime
    """When its snapshot was resolved as the head: everything acknowledged before is in it."""
    made: datetime
    size: int
    sha1: str
    version: str
    detail: dict[str, Any]

    @property
    def invalid(self) -> int | None:
        """Return how many invalid entities it omits; None if it contains no entities, or they were not counted then."""
        count = self.detail.get("invalid") if self.kind.assembles else None
        return count if isinstance(count, int) else None

    def of(self, content: bytes) -> "ExportRecord":
        """Return a copy with size and checksum of other content."""
        return self._replace(size=len(content), sha1=hashlib.sha1(content, usedforsecurity=False).hexdigest())


class Export(BaseModel):
    """An export that can be downloaded."""

    kind: ExportKind
    name: str
    media_type: str
    snapshot: str | None
    seq: int
    made: datetime
    size: int
    checksum: str = Field(description="SHA-1, as in FtM's resources.")
    version: str = Field(description="FtM version of the run that made it; versions of a dataset only increase.")
    invalid: int | None = Field(description=INVALID_DESCRIPTION)
    fresh: bool
    reason: str | None = Field(description="Why it is not fresh.")


class Freshness(BaseModel):
    """Whether an export of one kind is up to date with the data it is made from."""

    kind: ExportKind
    tag: str
    at: datetime | None = Field(description="When its snapshot was resolved; null: it was never made.")
    fresh: bool
    reason: str | None = Field(description="Why it is not fresh.")
