"""A snapshot's manifest: everything there is to know of a dataset's state at one moment, in one immutable document."""

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
"""What a bound of a column is, as JSON has it; moments are ISO 8601."""


def _in_utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC)


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]


class Change(StrEnum):
    """What made a snapshot."""

    FLUSH = "flush"
    COMPACT = "compact"
    OPTIMIZE = "optimize"
    REVERT = "revert"
    VACUUM = "vacuum"
    PURGE = "purge"


def _required_fields(model: type[BaseModel]) -> list[str]:
    """The fields that every manifest has: all but those that None stands for when there is nothing to say."""
    return [name for name, field in model.model_fields.items() if field.default is not None]


def _require(schema: dict[str, Any], model: type[BaseModel]) -> None:
    if said := _required_fields(model):
        schema["required"] = said


class Part(BaseModel):
    """A part of a manifest: fields of a later version are kept out of it, not guessed at."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, json_schema_extra=_require)


class Column(Part):
    """What the writer saw of one column of a file. What it did not look at is absent."""

    min: Scalar | None = None
    max: Scalar | None = None
    nulls: int | None = None
    truncated: bool | None = Field(None, description="The bounds are cut off: `min` is below, `max` above all values.")


class File(Part):
    """A data file: its place below the table's folder, and what is in it."""

    path: str
    size: int
    partition: dict[str, str]
    rows: int
    columns: dict[str, Column] = {}
    checksum: str | None = Field(None, description="Of the file's bytes, where the dataset asks for it.")


class Table(Part):
    """One Delta table as the snapshot has it: the version to open, and the files that are in it."""

    version: int
    files: tuple[File, ...]
    added: tuple[str, ...] = Field(description="Paths of files that the parent does not have.")
    removed: tuple[str, ...] = Field(description="Paths of files that only the parent has.")


class Counts(Part):
    """Rows. `added`, `seen`, `deleted` and `set_aside` count the events consumed, each of them once."""

    live: int = Field(description="Statements that are live in this snapshot.")
    added: int = Field(description="Statements that were not live before.")
    seen: int = Field(description="Further adds: said before, said twice, or ended before the segment was.")
    deleted: int = Field(description="Deletes and erases.")
    set_aside: int = Field(description="Events that could not be written, kept for an operator.")
    ended: int = Field(description="Statements that were live before and are not now.")


class Tally(NamedTuple):
    """What a build does to the counts; see `Counts`. Tallies of the parts of a build add up."""

    added: int = 0
    seen: int = 0
    deleted: int = 0
    set_aside: int = 0
    ended: int = 0


class HeldBatch(Part):
    """A batch of the journal that is in this snapshot: one request."""

    id: str
    tenant: str
    commit: int
    message: str | None = None
    metadata: Metadata
    entities: int
    rows: int


class SetAside(Part):
    """An event that could not be written: which one, and why. Its row is kept in SQL."""

    batch: str
    position: int
    reason: str


class Components(Part):
    """What shaped the data files."""

    files: str = "parquet"
    compression: str = "zstd"
    partitioning: dict[TableName, tuple[str, ...]] = {"statements": ("origin",), "translog": ("kind",)}
    order: tuple[str, ...] = ("bucket", "canonical_id", "id")
    checksum: Literal["sha256"] | None = None


class Snapshot(Part):
    """A manifest. Its presence at `snapshots/{seq}.json` is the commit."""

    format: Literal["tarn-snapshot"] = FORMAT
    version: Literal[1] = VERSION
    components: Components
    dataset: DatasetName
    dataset_id: str
    id: str
    seq: int = Field(ge=1)
    content: int = Field(description="The `seq` of the last snapshot that changed what is visible.")
    parent: str | None = None
    created: Moment
    operation: Change
    author: str
    message: str | None = None
    metadata: Metadata
    batches: tuple[HeldBatch, ...]
    set_aside: tuple[SetAside, ...] = ()
    segment: int = Field(description="The last segment of the journal that is in it.")
    retained_from: int | None = Field(
        None, description="The number of the oldest snapshot that was to be kept then; absent: the first."
    )
    statements: Table
    translog: Table
    rows: Counts
    first_seen: Moment | None = Field(None, description="The earliest first seen in the files; absent without rows.")
    last_seen: Moment | None = Field(None, description="The latest last seen in the files; absent without rows.")
    rebuilt: tuple[str, ...] | None = Field(
        None,
        description="The manifest was lost, and made again from what is known elsewhere: the fields that nobody knows "
        "any more, which are empty and mean nothing. Absent: it is as it was written.",
    )

    def to_json(self) -> bytes:
        return orjson.dumps(self.model_dump(mode="json", exclude_none=True, exclude_unset=False))

    @classmethod
    def from_json(cls, path: str, data: bytes) -> "Snapshot":
        """Raises ManifestInvalid with the name of a field that is missing or wrong, or `document` for all of it."""
        try:
            found = cls.model_validate_json(data, strict=True)
        except ValidationError as error:
            if (version := _newer(data)) is not None:
                raise ManifestInvalid(
                    f"{path}: version: it is of version {version}, which a newer version of Tarn wrote, and this one "
                    f"reads version {VERSION}",
                    field="version",
                ) from None
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"])) or "document"
            raise ManifestInvalid(f"{path}: {field}: {first['msg']}", field=field) from None
        # Defaults are for those who write manifests. A stored one says of itself what it is.
        for part, prefix in ((found, ""), (found.components, "components.")):
            if unsaid := [name for name in _required_fields(type(part)) if name not in part.model_fields_set]:
                raise ManifestInvalid(f"{path}: {prefix}{unsaid[0]}: Field required", field=prefix + unsaid[0])
        return found

    def table(self, name: TableName) -> Table:
        return self.statements if name == "statements" else self.translog


def _newer(data: bytes) -> int | None:
    """The version of a manifest that is later than ours; None: it is not, or says nothing that can be read."""
    try:
        document = orjson.loads(data)
    except ValueError:
        return None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return None
    version = document.get("version")
    return version if type(version) is int and version > VERSION else None


Seq = Annotated[int, Field(ge=0)]


class Head(Part):
    """The recorded head: the snapshot that readers see, by number and id.

    `seq` may be above 0 without a snapshot: the numbers of an earlier dataset of the same name go on.
    """

    seq: Seq
    id: str | None
    content: Seq
    segment: Seq
