"""Uploads in blocks: files that arrive piece by piece, over many requests."""

from datetime import datetime
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field

from tarn.model.file import ArchiveFile
from tarn.model.metadata import Metadata
from tarn.model.names import Checksum, FilePath, Origin
from tarn.model.tenant import Strict


class NewUpload(Strict):
    """A file that will come in blocks."""

    length: Annotated[int, Field(ge=0, le=1 << 50, description="Bytes of the whole file. A file of 0 needs no block.")]
    path: Annotated[str, Field(max_length=FilePath.longest, description="Where the file came from: `a/b/c.pdf`.")]
    checksum: Annotated[Checksum | None, Field(description="The SHA-256 that it must have.")] = None
    origin: Origin | None = None
    meta: Metadata | None = None


class Span(NamedTuple):
    """Bytes from `start` up to `end`."""

    start: int
    end: int


class ByteRange(BaseModel):
    """Bytes from `start` up to, and without, `end`."""

    start: int
    end: int


class Upload(BaseModel):
    """How far an upload is."""

    id: str
    path: FilePath
    length: int
    checksum: Checksum | None
    origin: Origin | None
    meta: Metadata | None
    committed: list[ByteRange] = Field(description="What has arrived.")
    missing: list[ByteRange] = Field(description="What has not.")
    created: datetime
    expires: datetime = Field(description="When it is given up, unless another block arrives before.")
    file: ArchiveFile | None = Field(description="What it became; null: it is not committed yet.")


def merge_spans(spans: list[Span]) -> list[Span]:
    """Spans that do not overlap, in order, those that touch as one."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and found[-1].end == span.start:
            found[-1] = Span(found[-1].start, span.end)
        else:
            found.append(span)
    return found


def missing(spans: list[Span], length: int) -> list[Span]:
    """What spans that do not overlap leave out of so many bytes."""
    edges = [0, *(edge for span in merge_spans(spans) for edge in span), length]
    return [Span(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
