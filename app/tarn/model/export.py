"""Exports: the files that others take from a dataset, and what is known of each."""

import hashlib
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field

from tarn.model.names import TagKey


class Kind(StrEnum):
    """What can be exported, in the order in which it is made: an index tells of all the others."""

    STATEMENTS = "statements"
    ENTITIES = "entities"
    STATISTICS = "statistics"
    DOCUMENTS = "documents"
    GRAPH = "graph"
    DELTA = "delta"
    INDEX = "index"

    @property
    def form(self) -> "ExportFormat":
        return FORMS[self]

    @property
    def assembles(self) -> bool:
        """Whether it is made of assembled entities, so that it leaves out those that do not assemble."""
        return self not in (Kind.STATEMENTS, Kind.INDEX)


class ExportFormat(NamedTuple):
    """What a kind of export is like."""

    name: str
    tag: TagKey
    media_type: str
    title: str
    is_long: bool = True
    """Whether it grows with the dataset, and is compressed where the dataset asks for it."""

    def named(self, compression: str | None) -> str:
        return self.name + (SUFFIXES[compression] if compression is not None and self.is_long else "")

    @property
    def names(self) -> set[str]:
        """Every name that it may have."""
        return {self.named(compression) for compression in (None, *SUFFIXES)}


SUFFIXES = {"gzip": ".gz", "zstd": ".zst"}
PACKED = {"gz": "application/gzip", "zst": "application/zstd"}

FTM_JSON = "application/json+ftm"

FORMS = {
    Kind.STATEMENTS: ExportFormat("statements.csv", TagKey("exports/statements"), "text/csv", "Statements"),
    Kind.ENTITIES: ExportFormat(
        "entities.ftm.json", TagKey("exports/entities_json"), FTM_JSON, "FollowTheMoney entities"
    ),
    Kind.STATISTICS: ExportFormat(
        "statistics.json", TagKey("exports/statistics"), "application/json", "Statistics", is_long=False
    ),
    Kind.DOCUMENTS: ExportFormat("documents.csv", TagKey("exports/documents"), "text/csv", "Documents"),
    Kind.GRAPH: ExportFormat("graph.cypher", TagKey("exports/graph"), "text/plain", "Graph, as Cypher"),
    Kind.DELTA: ExportFormat(
        "entities.delta.json", TagKey("exports/delta"), "application/x-ndjson", "Changed entities"
    ),
    Kind.INDEX: ExportFormat("index.json", TagKey("exports/index"), "application/json", "Index", is_long=False),
}


def media_type(kind: Kind, name: str) -> str:
    """Of a file of a kind, by how its name ends."""
    return PACKED.get(name.rsplit(".", 1)[-1], kind.form.media_type)


LEFT_OUT = (
    "How many entities it leaves out because their statements do not assemble (`GET …/entities/invalid`). Null: it is "
    "not made of entities, or was made by a version that did not count them."
)

DELTA_INDEX = "delta.json"
"""Tells of the deltas that are kept; made with each of them."""


def _by_any_name(value: Any) -> Any:
    """A kind by its own name, by its file's or by its tag's."""
    names = {form.name: kind for kind, form in FORMS.items()}
    names |= {form.tag.partition("/")[2]: kind for kind, form in FORMS.items()}
    return names.get(value, value) if isinstance(value, str) else value


AnyKind = Annotated[Kind, BeforeValidator(_by_any_name)]


MAX_LISTED_ENTITIES = 10
"""Entities that are named of those whose relationships are not all in a graph."""


class OmittedEdges(BaseModel):
    """Relationships that were left out of a graph: entities that are edges between very many others."""

    count: int = Field(0, description="All relationships that were left out.")
    entities: int = Field(0, description="Of how many entities.")
    first: list[str] = Field(default=[], description="The ids of the first ten of these entities.")

    def add(self, entity_id: str, count: int) -> None:
        self.merge(OmittedEdges(count=count, entities=1, first=[entity_id]))

    def merge(self, other: "OmittedEdges") -> None:
        """Add what was left out of the next part of the same graph."""
        self.count += other.count
        self.entities += other.entities
        self.first = [*self.first, *other.first][:MAX_LISTED_ENTITIES]


class ExportRecord(NamedTuple):
    """An export that was made, and of what."""

    kind: Kind
    name: str
    snapshot: str | None
    """None: of a dataset that had none yet."""
    seq: int
    content: int
    resolved: datetime
    """When its snapshot was found to be the head: whatever was acknowledged before is in it."""
    made: datetime
    size: int
    sha1: str
    version: str
    detail: dict[str, Any]

    @property
    def invalid(self) -> int | None:
        """How many entities it leaves out; None if it assembles none, or was made before they were counted."""
        count = self.detail.get("invalid") if self.kind.assembles else None
        return count if isinstance(count, int) else None

    def of(self, content: bytes) -> "ExportRecord":
        """The same with another content."""
        return self._replace(size=len(content), sha1=hashlib.sha1(content, usedforsecurity=False).hexdigest())


class Export(BaseModel):
    """An export as it can be fetched."""

    kind: Kind
    name: str
    media_type: str
    snapshot: str | None
    seq: int
    made: datetime
    size: int
    checksum: str = Field(description="SHA-1, as FtM's resources have it.")
    version: str = Field(description="FtM's version of the run that made it; versions of a dataset only rise.")
    invalid: int | None = Field(description=LEFT_OUT)
    fresh: bool
    reason: str | None = Field(description="Why it is not fresh.")


class Freshness(BaseModel):
    """Whether one kind of export is as new as what it is made of."""

    kind: Kind
    tag: str
    at: datetime | None = Field(description="When its snapshot was resolved; null: it was never made.")
    fresh: bool
    reason: str | None = Field(description="Why it is not fresh.")
