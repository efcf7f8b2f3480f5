"""The forms in which entities and statements are sent, read as streams.

A parser pulls a body through `read` and holds a block and a record of it, never more. What is wrong with one record
is yielded as a BadRecord and reading goes on after it; what leaves nothing to be trusted raises InvalidFormat.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

from app.errors import UnsupportedMediaType
from app.journal.formats import arrow, delimited, json, ndjson, statements
from app.journal.formats.record import BadRecord, Record, Row, Source

__all__ = [
    "ENTITY_TYPES",
    "STATEMENT_TYPES",
    "BadRecord",
    "Record",
    "Row",
    "Source",
    "entity_records",
    "statement_rows",
]

T = TypeVar("T")
Parser = Callable[[Source, int], Iterator[T | BadRecord]]

_ENTITIES: dict[str, Parser[Record]] = {
    "application/x-ndjson": ndjson.lines,
    "application/json+ftm": ndjson.lines,
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

ENTITY_TYPES = tuple(_ENTITIES)
STATEMENT_TYPES = tuple(_STATEMENTS)


def entity_records(source: Source, media_type: str, longest: int) -> Iterator[Record | BadRecord]:
    """Each entity of the body as bytes that its reader is yet to parse.

    Raises UnsupportedMediaType at once, and InvalidFormat where the body stops being of its type.
    """
    return _parser(_ENTITIES, media_type)(source, longest)


def statement_rows(source: Source, media_type: str, longest: int) -> Iterator[Row | BadRecord]:
    """Each statement of the body as a dict; names and types of its fields are as they were sent.

    Raises UnsupportedMediaType at once, and InvalidFormat where the body stops being of its type.
    """
    return _parser(_STATEMENTS, media_type)(source, longest)


def _parser(parsers: dict[str, Parser[T]], media_type: str) -> Parser[T]:
    if media_type not in parsers:
        raise UnsupportedMediaType(f"the type {media_type!r} is not supported", supported=list(parsers))
    return parsers[media_type]
