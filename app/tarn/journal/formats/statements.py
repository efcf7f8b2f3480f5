"""Parsers of statements as JSON objects, in lines (NDJSON) or in an array."""

from collections.abc import Iterator

import orjson

from tarn.journal.formats import json, ndjson
from tarn.journal.formats.record import BadRecord, ByteSource, Record, Row, require_memory


def from_ndjson(source: ByteSource, longest: int) -> Iterator[Row | BadRecord]:
    """Yield one statement per line. A line that is not a JSON object is a BadRecord."""
    return _objects(ndjson.lines(source, longest))


def from_json(source: ByteSource, longest: int) -> Iterator[Row | BadRecord]:
    """Yield one statement per element. An element that is not an object is a BadRecord. Raises as `json.elements`."""
    return _objects(json.elements(source, longest))


def _objects(records: Iterator[Record | BadRecord]) -> Iterator[Row | BadRecord]:
    for record in records:
        if isinstance(record, BadRecord):
            yield record
            continue
        line, text = record
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            require_memory(error)
            yield BadRecord(line, f"not valid JSON: {error}")
            continue
        yield (line, value) if isinstance(value, dict) else BadRecord(line, "not a JSON object")
