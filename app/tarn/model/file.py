"""Files of the archive: what a File record says."""

import hashlib
from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, Field

from tarn.model.dataset import etag
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
        description="`http:` or `https:`; `s3:`, `gs:`, `az:` and `file:` where the operator opened them.",
    ),
]


class NewFile(BaseModel):
    """What a sender says of a file, besides its bytes. What it does not say of a file that is there stays as it is."""

    path: FilePath
    origin: Origin | None = None
    meta: Metadata | None = None
    checksum: Checksum | None = None
    """The SHA-256 that it must have."""
    conditions: Conditions = Conditions()
    """What must hold of the files at its path."""


class RemoteFile(Strict):
    """A file that the server is to fetch."""

    uri: Uri
    checksum: Annotated[Checksum | None, Field(description="The SHA-256 that it must have.")] = None
    path: Annotated[
        str | None,
        Field(max_length=FilePath.longest, description="Where it came from, if not what its source calls it."),
    ] = None
    meta: Metadata | None = None


class ArchiveFile(BaseModel):
    """A source file: one content at one path. Several may share their content, and a path may have several."""

    id: FileId = Field(description="The same for the same dataset, path and content.")
    checksum: Checksum = Field(description="SHA-256 of the content.")
    sha1: Annotated[str, Field(pattern="^[0-9a-f]{40}$", description="SHA-1 of the content, FtM's `contentHash`.")]
    path: FilePath
    name: str = Field(description="The last name in the path.")
    size: int = Field(description="Bytes.")
    mime_type: str
    created: datetime
    tenant: str = Field(description="Who put it there.")
    origin: Origin
    meta: Metadata

    def to_json(self) -> bytes:
        """The record as it lies in the archive."""
        return self.model_dump_json(indent=2).encode() + b"\n"

    @property
    def content_tag(self) -> str:
        """The entity tag of its bytes."""
        return f'"{self.checksum}"'

    @property
    def record_tag(self) -> str:
        """The entity tag of what is said of it."""
        return etag(self.to_json())

    @property
    def tags(self) -> tuple[str, str]:
        """What a caller may know it by."""
        return self.content_tag, self.record_tag


def file_id(dataset: DatasetName, path: FilePath, checksum: Checksum) -> FileId:
    """The id of a content at a path of a dataset."""
    return FileId(hashlib.sha1(f"{dataset}/{checksum}/{path}".encode(), usedforsecurity=False).hexdigest())
