"""A dataset's configuration: FtM metadata, and how Tarn keeps it."""

import hashlib
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from followthemoney.dataset.coverage import DataCoverage
from followthemoney.dataset.dataset import DatasetModel
from followthemoney.dataset.util import CountryCode, Url
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from tarn.model import document
from tarn.model.names import DatasetName
from tarn.model.tenant import Strict


class Plain(BaseModel):
    """Fields that are text hold what a document can: no control characters but newline and tab."""

    @field_validator("*")
    @classmethod
    def plain_text(cls, value: Any) -> Any:
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                document.plain(text)
        return value


class Publisher(Plain, Strict):
    """Who publishes the source: FtM's fields and types, without the label that FtM computes."""

    name: Annotated[str, Field(min_length=1, max_length=1000)]
    url: Url | None = None
    name_en: str | None = None
    acronym: str | None = None
    description: str | None = None
    country: CountryCode | None = None
    official: bool = False
    logo_url: Url | None = None


class Coverage(Plain, DataCoverage):
    """Which times and places the source covers, as FtM describes it."""

    model_config = ConfigDict(extra="forbid")


class Retention(Strict):
    """Which snapshots are kept: the newest `count`, and all younger than `days`."""

    count: Annotated[int, Field(ge=1)] = 100
    days: Annotated[float, Field(ge=0)] = 7


class Policy(Strict):
    """What the worker does for a dataset by itself."""

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


class FtmMetadata(Plain, Strict):
    """What a dataset is about, in FtM's own terms and types."""

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
    """What a caller may set: what the dataset is about, and how Tarn keeps it."""

    checksum: Literal["sha256"] | None = None
    compression: Literal["gzip", "zstd"] | None = None
    target_file_bytes: FileBytes = 128 << 20
    policy: Policy = Policy()


class DatasetChange(DatasetMetadata):
    """Fields to replace; null goes back to the default."""

    tags: Tags | None = None  # type: ignore[assignment]  # what is stored is never null, what is asked for may be
    children: Children | None = None  # type: ignore[assignment]
    deprecated: bool | None = None  # type: ignore[assignment]
    target_file_bytes: FileBytes | None = None  # type: ignore[assignment]
    policy: Policy | None = None  # type: ignore[assignment]

    def applied_to(self, current: DatasetMetadata) -> dict[str, Any]:
        """All fields as they are to be, those that go back to their default left out."""
        given = self.model_dump(exclude_unset=True)
        merged = current.model_dump() | given
        return {field: value for field, value in merged.items() if field not in given or value is not None}


class NewDataset(DatasetMetadata):
    """A dataset to be made."""

    name: DatasetName


class DatasetConfig(DatasetMetadata):
    """`config.yml`: all there is to know of a dataset besides its data."""

    name: DatasetName
    id: str
    created: datetime

    @model_validator(mode="after")
    def is_ftm_dataset(self) -> Self:
        self.ftm()
        return self

    def ftm(self, **more: Any) -> DatasetModel:
        """The dataset as FtM knows it. Raises ValueError where FtM's own model refuses it."""
        data = self.model_dump(include=set(DatasetModel.model_fields), exclude_none=True)
        return DatasetModel.model_validate(data | more)

    def to_yaml(self) -> bytes:
        return document.dump(self.model_dump(mode="json", exclude_defaults=True))

    @classmethod
    def from_yaml(cls, data: bytes) -> Self:
        return cls.model_validate(document.load(data, document.STORED))


class CatalogMetadata(Plain, Strict):
    """What the lake says of itself: `config.yml` at its root."""

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
    """A file that can be fetched, as FtM describes it."""

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
        None, description="Of its exported entities; of its newest export, if entities were not exported."
    )
    updated_at: datetime | None = None
    last_export: datetime | None = None
    entity_count: int | None = None
    thing_count: int | None = None
    resources: list[Resource] = Field(default_factory=list)
    resource_name: str | None = Field(
        None,
        description="The resource that loaders such as yente take entities from; without it they skip the dataset.",
    )
    delta_url: str | None = Field(None, description="Where the deltas up to `version` are listed.")
    load: bool | None = Field(None, description="True: load it, although it has children.")


class Catalog(CatalogMetadata):
    """An FtM catalog: the lake's own metadata, and the datasets the caller may read."""

    datasets: list[CatalogEntry]


class Version(BaseModel):
    """A former version of a document: when it was replaced, its name, its size in bytes."""

    timestamp: str
    name: str
    size: int


def etag(text: bytes) -> str:
    """A strong entity tag: the same bytes have the same tag, whatever came between."""
    return f'"{hashlib.sha256(text).hexdigest()[:32]}"'


def matches(if_match: str, tag: str) -> bool:
    """Whether an `If-Match` header names this entity tag. It compares strongly: a weak tag (`W/`) never matches."""
    return if_match.strip() == "*" or tag in _listed(if_match)


def matches_none_match(if_none_match: str, tag: str) -> bool:
    """Whether an `If-None-Match` header names this entity tag, weakly or not."""
    return if_none_match.strip() == "*" or tag in [listed.removeprefix("W/") for listed in _listed(if_none_match)]


def _listed(header: str) -> list[str]:
    return [part.strip() for part in header.split(",")]
