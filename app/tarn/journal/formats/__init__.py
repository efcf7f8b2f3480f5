"""Streaming parsers for the media types of entities and statements.

A parser pulls a body through `read` and holds at most a block and a record of it. An invalid record is yielded as a
BadRecord and parsing continues after it; damage that makes the rest of the body unreadable raises InvalidFormat.
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
    "ByteSource",
    "IgnoredColumns",
    "Record",
    "Row",
    "entity_records",
    "statement_rows",
]

FTM_ENTITIES = "application/json+ftm"
"""Media type of entities written by FtM's own tools: their values are already cleaned."""

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
"""Columnar types, where a few bytes can expand to very many rows: always parsed in a child process, at any size."""

BYTES = frozenset({"", "application/octet-stream", "binary/octet-stream"})
"""Media types that do not identify a format."""

_AT_THE_END = "has its index at its end, so it cannot be read as a stream"
_ARCHIVE = "is an archive with its index at its end, so it cannot be read as a stream"
_DOCUMENT = "is one document, so it cannot be read as a stream of records"
NOT_STREAMABLE = {
    "application/vnd.apache.arrow.file": _AT_THE_END,
    "application/vnd.apache.orc": _AT_THE_END,
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": _ARCHIVE,
    "application/zip": _ARCHIVE,
    "application/yaml": _DOCUMENT,
    "application/xml": _DOCUMENT,
}
"""Media types that cannot be parsed as a stream, and why."""

ENTITY_TYPES = tuple(_ENTITIES)
STATEMENT_TYPES = tuple(_STATEMENTS)


def entity_records(source: ByteSource, media_type: str, longest: int) -> Iterator[Record | BadRecord | IgnoredColumns]:
    """Return an iterator of the body's entities, each as unparsed JSON bytes.

    Raises UnsupportedMediaType, CodecConfigured or CodecNotStreamable at once, and InvalidFormat during iteration where
    the body is not valid for its type.
    """
    return _parser(_ENTITIES, media_type)(source, longest)


def statement_rows(source: ByteSource, media_type: str, longest: int) -> Iterator[Row | BadRecord | IgnoredColumns]:
    """Return an iterator of the body's statements, each as a dict with field names and types as sent.

    Raises UnsupportedMediaType, CodecConfigured or CodecNotStreamable at once, and InvalidFormat during iteration where
    the body is not valid for its type.
    """
    return _parser(_STATEMENTS, media_type)(source, longest)


def _parser(parsers: dict[str, Parser[T]], media_type: str) -> Parser[T]:
    if media_type in parsers:
        return parsers[media_type]
    if media_type in BYTES:
        raise CodecConfigured(f"this route accepts records, not bytes: send {', '.join(parsers)}")
    if media_type in NOT_STREAMABLE:
        raise CodecNotStreamable(f"{media_type} {NOT_STREAMABLE[media_type]}: send {', '.join(parsers)}")
    raise UnsupportedMediaType(f"the type {media_type!r} is not supported", supported=list(parsers))
