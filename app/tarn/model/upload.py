"""Block uploads: files sent in blocks over several requests."""

from datetime import datetime
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field

from tarn.model.file import ArchiveFile
from tarn.model.metadata import Metadata
from tarn.model.names import Checksum, FilePath, Origin
from tarn.model.tenant import Strict


class NewUpload(Strict):
    """A file to upload in blocks."""

    length: Annotated[
        int, Field(ge=0, le=1 << 50, description="Size of the file in bytes. An empty file needs no block.")
    ]
    path: Annotated[
        str, Field(max_length=FilePath.longest, description="Path of the file at its source, such as `a/b/c.pdf`.")
    ]
    checksum: Annotated[Checksum | None, Field(description="The expected SHA-256.")] = None
    origin: Origin | None = None
    meta: Metadata | None = None


class Span(NamedTuple):
    """Bytes from `start` to `end`, exclusive."""

    start: int
    end: int


class ByteRange(BaseModel):
    """Bytes from `start` inclusive to `end` exclusive."""

    start: int
    end: int


class Upload(BaseModel):
    """The state of an upload."""

    id: str
    path: FilePath
    length: int
    checksum: Checksum | None
    origin: Origin | None
    meta: Metadata | None
    committed: list[ByteRange] = Field(description="Byte ranges that were received.")
    missing: list[ByteRange] = Field(description="Byte ranges that are missing.")
    created: datetime
    expires: datetime = Field(description="When it expires, unless another block arrives before.")
    file: ArchiveFile | None = Field(description="The resulting file; null: the upload is not committed yet.")


def merge_spans(spans: list[Span]) -> list[Span]:
    """Return non-overlapping spans in order, with adjacent spans merged."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and merged[-1].end == span.start:
            merged[-1] = Span(merged[-1].start, span.end)
        else:
            merged.append(span)
    return merged


def missing_spans(spans: list[Span], length: int) -> list[Span]:
    """Return the gaps that non-overlapping spans leave in `length` bytes."""
    edges = [0, *(edge for span in merge_spans(spans) for edge in span), length]
    return [Span(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
