"""Archive files: File records and requests to add files."""

import hashlib
from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, Field

from tarn.model.entity_tags import etag
from tarn.model.metadata import Metadata
from tarn.model.names import Checksum, DatasetName, FileId, FilePath, Origin
from tarn.model.preconditions import Conditions
from tarn.model.tenant import Strict

LONGEST_URI = 8192

Uri = Annotated[
    str,
    Field(
        min_length=1,
        max_length=LONGEST_URI,
        description="`http:` or `https:`; `s3:`, `gs:`, `az:` and `file:` if the operator allows the location.",
    ),
]


class NewFile(BaseModel):
    """Metadata sent with a file's content. Fields left out keep their value if the file exists."""

    path: FilePath
    origin: Origin | None = None
    meta: Metadata | None = None
    checksum: Checksum | None = None
    """The expected SHA-256."""
    conditions: Conditions = Conditions()
    """Preconditions on the existing files at its path."""


class RemoteFile(Strict):
    """A file for the server to fetch."""

    uri: Uri
    checksum: Annotated[Checksum | None, Field(description="The expected SHA-256.")] = None
    path: Annotated[
        str | None,
        Field(max_length=FilePath.longest, description="Path of the file; by default, the name it has at its source."),
    ] = None
    meta: Metadata | None = None


class ArchiveFile(BaseModel):
    """A source file: one content at one path. Files may share content, and a path may have several files."""

    id: FileId = Field(description="Equal for equal dataset, path and content.")
    checksum: Checksum = Field(description="SHA-256 of the content.")
    sha1: Annotated[str, Field(pattern="^[0-9a-f]{40}$", description="SHA-1 of the content, FtM's `contentHash`.")]
    path: FilePath
    name: str = Field(description="The last segment of the path.")
    size: int = Field(description="Bytes.")
    mime_type: str
    created: datetime
    tenant: str = Field(description="The tenant that added it.")
    origin: Origin
    meta: Metadata

    def to_json(self) -> bytes:
        """Return the record as it is stored in the archive."""
        return self.model_dump_json(indent=2).encode() + b"\n"

    @property
    def content_tag(self) -> str:
        """Return the entity tag of its content."""
        return f'"{self.checksum}"'

    @property
    def record_tag(self) -> str:
        """Return the entity tag of its record."""
        return etag(self.to_json())

    @property
    def tags(self) -> tuple[str, str]:
        """Return the entity tags that a precondition may name."""
        return self.content_tag, self.record_tag


def file_id(dataset: DatasetName, path: FilePath, checksum: Checksum) -> FileId:
    """Return the id of a content at a path of a dataset."""
    return FileId(hashlib.sha1(f"{dataset}/{checksum}/{path}".encode(), usedforsecurity=False).hexdigest())
