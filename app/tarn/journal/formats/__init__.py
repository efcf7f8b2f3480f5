"""The forms in which entities and statements are sent, read as streams.

A parser pulls a body through `read` and holds a block and a record of it, never more. What is wrong with one record
is yielded as a BadRecord and reading goes on after it; what leaves nothing to be trusted raises InvalidFormat.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

from tarn.errors import CodecConfigured, CodecNotStreamable, UnsupportedMediaType
from tarn.journal.formats import arrow, delimited, json, ndjson, statements
from tarn.journal.formats.record import BadRecord, ByteSource, IgnoredColumns, Record, Row

__all__ = [
    "COLUMNAR",
    "ENTITY_TYPES",
    "FTM_ENTITIES",
    "STATEMENT_TYPES",
    "BadRecord",
    "IgnoredColumns",
    "Record",
    "Row",
    "Source",
    "entity_records",
    "statement_rows",
]

FTM_ENTITIES = "application/json+ftm"
"""Entities as FtM's own tools write them: their values are clean."""

T = TypeVar("T")
Parser = Callable[[ByteSource, int], Iterator[T | BadRecord | IgnoredColumns]]

_ENTITIES: dict[str, Parser[Record]] = {
    "application/x-ndjson": ndjson.lines,
    FTM_ENTITIES: ndjson.lines,
    "application/json": json.elements,
}
_STATEMENTS: dict[str, Parser[Row]] = {
    "application/x-ndjson": statements.from_ndjson,
    "application/json": statements.from_json,
    "text/csv": delimited.from_csv,
    "application/x-ftm-pack": delimited.from_pack,
    "application/vnd.apache.parquet": arrow.from_parquet,
    "application/vnd.apache.arrow.stream": arrow.from_arrow,
}

COLUMNAR = frozenset({"application/vnd.apache.parquet", "application/vnd.apache.arrow.stream"})
"""Types of which a few bytes may be very much: they are parsed in a process of their own, whatever their size."""

BYTES = frozenset({"", "application/octet-stream", "binary/octet-stream"})
"""What says no more than that there are bytes."""

_AT_THE_END = "says at its end what is in it"
_ARCHIVE = "is an archive, with its contents at its end"
WHOLE = {
    "application/vnd.apache.arrow.file": _AT_THE_END,
    "application/vnd.apache.orc": _AT_THE_END,
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": _ARCHIVE,
    "application/zip": _ARCHIVE,
    "application/yaml": "is a document that is read whole",
    "application/xml": "is a document that is read whole",
}
"""Records that can only be had by reading all of a body, and why."""

ENTITY_TYPES = tuple(_ENTITIES)
STATEMENT_TYPES = tuple(_STATEMENTS)


def entity_records(source: ByteSource, media_type: str, longest: int) -> Iterator[Record | BadRecord | IgnoredColumns]:
    """Each entity of the body as bytes that its reader is yet to parse.

    Raises UnsupportedMediaType, CodecConfigured or CodecNotStreamable at once, and InvalidFormat where the body stops
    being of its type.
    """
    return _parser(_ENTITIES, media_type)(source, longest)


def statement_rows(source: ByteSource, media_type: str, longest: int) -> Iterator[Row | BadRecord | IgnoredColumns]:
    """Each statement of the body as a dict; names and types of its fields are as they were sent.

    Raises UnsupportedMediaType, CodecConfigured or CodecNotStreamable at once, and InvalidFormat where the body stops
    being of its type.
    """
    return _parser(_STATEMENTS, media_type)(source, longest)


def _parser(parsers: dict[str, Parser[T]], media_type: str) -> Parser[T]:
    if media_type in parsers:
        return parsers[media_type]
    if media_type in BYTES:
        raise CodecConfigured(f"this route takes records, not bytes: send {', '.join(parsers)}")
    if media_type in WHOLE:
        raise CodecNotStreamable(f"{media_type} {WHOLE[media_type]}: send {', '.join(parsers)}")
    raise UnsupportedMediaType(f"the type {media_type!r} is not supported", supported=list(parsers))
