"""Dataset configuration (`config.yml`) and catalog models."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from followthemoney.dataset.coverage import DataCoverage
from followthemoney.dataset.dataset import DatasetModel
from followthemoney.dataset.util import CountryCode, Url
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from tarn.model import document
from tarn.model.names import DatasetName
from tarn.model.tenant import Strict


class PlainTextModel(BaseModel):
    """A model whose text fields must not contain control characters other than newline and tab."""

    @field_validator("*")
    @classmethod
    def plain_text(cls, value: Any) -> Any:
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                document.plain(text)
        return value


class Publisher(PlainTextModel, Strict):
    """The publisher of the source: FtM's fields and types, without the label that FtM computes."""

    name: Annotated[str, Field(min_length=1, max_length=1000)]
    url: Url | None = None
    name_en: str | None = None
    acronym: str | None = None
    description: str | None = None
    country: CountryCode | None = None
    official: bool = False
    logo_url: Url | None = None


class Coverage(PlainTextModel, DataCoverage):
    """Temporal and geographic coverage of the source, in FtM's model."""

    model_config = ConfigDict(extra="forbid")


class Retention(Strict):
    """Retention of snapshots: the newest `count` are kept, and all younger than `days`."""

    count: Annotated[int, Field(ge=1)] = 100
    days: Annotated[float, Field(ge=0)] = 7


class Policy(Strict):
    """Automatic maintenance of a dataset by the worker."""

    retention: Retention = Retention()
    exports: (
        Literal["off", "after_flush"] | Annotated[int, Field(ge=1, strict=True, description="at most every n minutes")]
    ) = "off"
    maintain: bool = True


def _once_each(names: list[DatasetName]) -> list[DatasetName]:
    return sorted(set(names))


Text = Annotated[str, Field(max_length=100_000)]
Tags = Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=1000)]
Children = Annotated[list[DatasetName], Field(max_length=10_000), AfterValidator(_once_each)]
FileBytes = Annotated[int, Field(ge=1 << 20, le=1 << 32)]


class FtmMetadata(PlainTextModel, Strict):
    """Descriptive metadata of a dataset, with FtM's fields and types."""

    title: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    license: Url | None = None
    summary: Text | None = None
    description: Text | None = None
    url: Url | None = None
    category: Annotated[str, Field(max_length=200)] | None = None
    tags: Annotated[Tags, Field(default_factory=list)]
    publisher: Publisher | None = None
    coverage: Coverage | None = None
    children: Annotated[Children, Field(default_factory=list)]
    deprecated: bool = False
    deprecation: Text | None = None


class DatasetMetadata(FtmMetadata):
    """The fields that a caller may set: descriptive metadata, and how Tarn stores the dataset."""

    checksum: Literal["sha256"] | None = None
    compression: Literal["gzip", "zstd"] | None = None
    target_file_bytes: FileBytes = 128 << 20
    policy: Policy = Policy()


class DatasetChange(DatasetMetadata):
    """Fields to replace; null resets a field to its default."""

    tags: Tags | None = None  # type: ignore[assignment]  # null in a request, never in storage
    children: Children | None = None  # type: ignore[assignment]
    deprecated: bool | None = None  # type: ignore[assignment]
    target_file_bytes: FileBytes | None = None  # type: ignore[assignment]
    policy: Policy | None = None  # type: ignore[assignment]

    def applied_to(self, current: DatasetMetadata) -> dict[str, Any]:
        """Return the fields after the change, without those that are reset to their default."""
        changes = self.model_dump(exclude_unset=True)
        merged = current.model_dump() | changes
        return {field: value for field, value in merged.items() if field not in changes or value is not None}


class NewDataset(DatasetMetadata):
    """A dataset to create."""

    name: DatasetName


class DatasetConfig(DatasetMetadata):
    """`config.yml`: the configuration and metadata of a dataset."""

    name: DatasetName
    id: str
    created: datetime

    @model_validator(mode="after")
    def is_ftm_dataset(self) -> Self:
        self.ftm()
        return self

    def ftm(self, **more: Any) -> DatasetModel:
        """Return the dataset as FtM's model. Raises ValueError if it is not valid there."""
        data = self.model_dump(include=set(DatasetModel.model_fields), exclude_none=True)
        return DatasetModel.model_validate(data | more)

    def to_yaml(self) -> bytes:
        return document.dump(self.model_dump(mode="json", exclude_defaults=True))

    @classmethod
    def from_yaml(cls, data: bytes) -> Self:
        return cls.model_validate(document.load(data, document.STORED))


class CatalogMetadata(PlainTextModel, Strict):
    """Metadata of the lake: `config.yml` at its root."""

    title: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    summary: Text | None = None
    description: Text | None = None
    url: Url | None = None
    publisher: Publisher | None = None

    def changed(self, change: "CatalogMetadata") -> "CatalogMetadata":
        return CatalogMetadata.model_validate(self.model_dump() | change.model_dump(exclude_unset=True))

    def to_yaml(self) -> bytes:
        return document.dump(self.model_dump(mode="json", exclude_defaults=True))

    @classmethod
    def from_yaml(cls, data: bytes) -> "CatalogMetadata":
        return cls.model_validate(document.load(data, document.STORED) or {})


class Resource(BaseModel):
    """A downloadable file, in FtM's model."""

    name: str
    url: str | None = None
    checksum: str = Field(description="SHA-1.")
    timestamp: datetime
    mime_type: str
    title: str
    size: int


class CatalogEntry(FtmMetadata):
    """A dataset in the catalog, as FtM tools load it."""

    name: DatasetName
    title: str
    version: str | None = Field(
        None, description="Version of its exported entities; without such an export, of its newest export."
    )
    updated_at: datetime | None = None
    last_export: datetime | None = None
    entity_count: int | None = None
    thing_count: int | None = None
    resources: list[Resource] = Field(default_factory=list)
    resource_name: str | None = Field(
        None,
        description="The resource from which loaders such as yente read entities; without it they skip the dataset.",
    )
    delta_url: str | None = Field(None, description="URL of the list of deltas up to `version`.")
    load: bool | None = Field(None, description="True: load the dataset although it has children.")


class Catalog(CatalogMetadata):
    """An FtM catalog: the lake's metadata, and the datasets that the caller may read."""

    datasets: list[CatalogEntry]


class Version(BaseModel):
    """A former version of a document: when it was replaced, its name, its size in bytes."""

    timestamp: str
    name: str
    size: int
