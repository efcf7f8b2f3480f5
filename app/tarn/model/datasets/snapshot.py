"""Snapshot manifests: one immutable document with the complete state of a dataset at one moment."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from tarn.errors import ManifestInvalid
from tarn.model.metadata import Metadata
from tarn.model.names import DatasetName

FORMAT: Literal["tarn-snapshot"] = "tarn-snapshot"
VERSION: Literal[1] = 1

TableName = Literal["statements", "translog"]

Scalar = str | int | float | bool
"""The JSON type of a column's bounds; moments are ISO 8601."""


def _in_utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC)


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]


class SnapshotOperation(StrEnum):
    """The operation that published a snapshot."""

    FLUSH = "flush"
    COMPACT = "compact"
    OPTIMIZE = "optimize"
    REVERT = "revert"
    VACUUM = "vacuum"
    PURGE = "purge"


def _required_fields(model: type[BaseModel]) -> list[str]:
    """Return the fields that every manifest has: all but those that default to None."""
    return [name for name, field in model.model_fields.items() if field.default is not None]


def _require(schema: dict[str, Any], model: type[BaseModel]) -> None:
    if required := _required_fields(model):
        schema["required"] = required


class ManifestModel(BaseModel):
    """A part of a manifest: unknown fields, such as those of a later version, are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, json_schema_extra=_require)


class Column(ManifestModel):
    """Statistics of one column of a file. Values that the writer did not compute are absent."""

    min: Scalar | None = None
    max: Scalar | None = None
    nulls: int | None = None
    truncated: bool | None = Field(
        None, description="The bounds are truncated: `min` is below, `max` above all values."
    )


class File(ManifestModel):
    """A data file: its path in the table's folder, and statistics of its content."""

    path: str
    size: int
    partition: dict[str, str]
    rows: int
    columns: dict[str, Column] = {}
    checksum: str | None = Field(None, description="Of the file's bytes, if the dataset is configured so.")


class Table(ManifestModel):
    """One Delta table in the snapshot: its version and its files."""

    version: int
    files: tuple[File, ...]
    added: tuple[str, ...] = Field(description="Paths of files that the parent does not have.")
    removed: tuple[str, ...] = Field(description="Paths of files that only the parent has.")


class Counts(ManifestModel):
    """Row counts. `added`, `seen`, `deleted` and `set_aside` count the flushed events, each of them once."""

    live: int = Field(description="Statements that are live in this snapshot.")
    added: int = Field(description="Statements that were not live before.")
    seen: int = Field(
        description="Other adds: statements that were live before, duplicates, or statements ended within the segment."
    )
    deleted: int = Field(description="Deletes and erases.")
    set_aside: int = Field(description="Rejected events, stored for an operator.")
    ended: int = Field(description="Statements that were live before and are no longer.")


class Tally(NamedTuple):
    """Changes of the counts by a build; see `Counts`. The tallies of the parts of a build can be added."""

    added: int = 0
    seen: int = 0
    deleted: int = 0
    set_aside: int = 0
    ended: int = 0


class IncludedBatch(ManifestModel):
    """A batch of the journal (one request) that is in this snapshot."""

    id: str
    tenant: str
    commit: int
    message: str | None = None
    metadata: Metadata
    entities: int
    rows: int


class RejectedEventRef(ManifestModel):
    """A rejected event: its batch, position and reason. Its row is stored in SQL."""

    batch: str
    position: int
    reason: str


class Components(ManifestModel):
    """Format, layout and order of the data files."""

    files: str = "parquet"
    compression: str = "zstd"
    partitioning: dict[TableName, tuple[str, ...]] = {"statements": ("origin",), "translog": ("kind",)}
    order: tuple[str, ...] = ("bucket", "canonical_id", "id")
    checksum: Literal["sha256"] | None = None


class Snapshot(ManifestModel):
    """A manifest. Its existence at `snapshots/{seq}.json` is the commit."""

    format: Literal["tarn-snapshot"] = FORMAT
    version: Literal[1] = VERSION
    components: Components
    dataset: DatasetName
    dataset_id: str
    id: str
    seq: int = Field(ge=1)
    content: int = Field(description="The `seq` of the last snapshot that changed visible content.")
    parent: str | None = None
    created: Moment
    operation: SnapshotOperation
    author: str
    message: str | None = None
    metadata: Metadata
    batches: tuple[IncludedBatch, ...]
    set_aside: tuple[RejectedEventRef, ...] = ()
    segment: int = Field(description="The last segment of the journal that it includes.")
    retained_from: int | None = Field(
        None, description="The number of the oldest snapshot retained at that time; absent: the first."
    )
    statements: Table
    translog: Table
    rows: Counts
    first_seen: Moment | None = Field(None, description="The earliest `first_seen` in the files; absent without rows.")
    last_seen: Moment | None = Field(None, description="The latest `last_seen` in the files; absent without rows.")
    rebuilt: tuple[str, ...] | None = Field(
        None,
        description="The manifest was lost and rebuilt from other data: lists the fields that could not be recovered, "
        "which are empty and have no meaning. Absent: it is the original.",
    )

    def to_json(self) -> bytes:
        return orjson.dumps(self.model_dump(mode="json", exclude_none=True, exclude_unset=False))

    @classmethod
    def from_json(cls, path: str, data: bytes) -> "Snapshot":
        """Parse a manifest. Raises ManifestInvalid with the missing or invalid field, or `document` for all of it."""
        try:
            snapshot = cls.model_validate_json(data, strict=True)
        except ValidationError as error:
            if (version := _newer(data)) is not None:
                raise ManifestInvalid(
                    f"{path}: version: it has version {version}, written by a newer version of Tarn; this one reads "
                    f"version {VERSION}",
                    field="version",
                ) from None
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"])) or "document"
            raise ManifestInvalid(f"{path}: {field}: {first['msg']}", field=field) from None
        # Defaults are only for writers of manifests. A stored manifest must have all fields explicitly.
        for part, prefix in ((snapshot, ""), (snapshot.components, "components.")):
            if absent := [name for name in _required_fields(type(part)) if name not in part.model_fields_set]:
                raise ManifestInvalid(f"{path}: {prefix}{absent[0]}: Field required", field=prefix + absent[0])
        return snapshot

    def table(self, name: TableName) -> Table:
        return self.statements if name == "statements" else self.translog


def _newer(data: bytes) -> int | None:
    """Return the version of a manifest if it is newer than `VERSION`; None if not, or if it is unreadable."""
    try:
        document = orjson.loads(data)
    except ValueError:
        return None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return None
    version = document.get("version")
    return version if type(version) is int and version > VERSION else None


Seq = Annotated[int, Field(ge=0)]


class Head(ManifestModel):
    """The recorded head: the snapshot that readers see, by number and id.

    `seq` may be above 0 without a snapshot: it continues the numbers of an earlier dataset of the same name.
    """

    seq: Seq
    id: str | None
    content: Seq
    segment: Seq
