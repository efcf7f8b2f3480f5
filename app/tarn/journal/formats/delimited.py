"""Parsers of FtM's delimited statement formats: CSV and FtM pack."""

import csv
import sys
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import Any

from tarn.journal.formats.columns import KNOWN, NEEDED, check_columns, truth
from tarn.journal.formats.csv_lines import Fields, csv_records
from tarn.journal.formats.record import BadRecord, ByteSource, IgnoredColumns, Row, invalid_format

# The limit is global, and followthemoney lowers it when it is imported above. The parsers here enforce `longest`.
csv.field_size_limit(sys.maxsize)

PACK_COLUMNS = [
    "entity_id", "prop", "value", "dataset", "lang", "original_value", "origin", "external", "first_seen", "last_seen",
    "id",
]  # fmt: skip
"""The columns of a pack in the order of FtM's current version, which also writes them as a header."""

_TARGET = frozenset({"", "t", "f"})
"""Values of the seventh field of a pack without header if it is the target flag; any other value is an origin."""
_PACK_NEEDED = ("entity_id", "prop", "value")
_PACK_KNOWN = KNOWN - {"schema", "prop_type", "canonical_id"}


def from_csv(source: ByteSource, longest: int) -> Iterator[Row | BadRecord | IgnoredColumns]:
    """Yield one statement per record after the header; an empty field is None unless the field is required.

    Raises InvalidFormat for a header that lacks a required column or repeats one, and as `csv_records` does.
    """
    records = csv_records(source, longest)
    first = _first(records)
    if first is None:
        return
    line, columns = first
    if ignored := check_columns(columns, line):
        yield IgnoredColumns(ignored)
    yield from _rows(records, columns, ignored, _from_csv)


def from_pack(source: ByteSource, longest: int) -> Iterator[Row | BadRecord | IgnoredColumns]:
    """Yield one statement per record. Older packs have no header; their columns depend on the number of fields.

    A record whose `prop` is not `Schema:prop` is a BadRecord. Raises as `from_csv` does.
    """
    records = csv_records(source, longest)
    first = _first(records)
    if first is None:
        return
    line, columns = first
    if "entity_id" in columns and "prop" in columns:
        ignored = check_columns(columns, line, needed=_PACK_NEEDED, known=_PACK_KNOWN)
    else:
        # Older versions write ten fields, of which the seventh is the target flag, in later ones the origin.
        columns = PACK_COLUMNS if len(columns) == len(PACK_COLUMNS) else PACK_COLUMNS[:-1]
        if len(first[1]) == len(columns) and (first[1][6] or "f") in ("t", "f"):
            yield IgnoredColumns(("target",))
        yield from _rows(chain([first], records), columns, (), _from_old_pack)
        return
    if ignored:
        yield IgnoredColumns(ignored)
    yield from _rows(records, columns, ignored, _from_pack)


def _from_csv(line: int, statement: dict[str, Any]) -> Row | BadRecord:
    external = truth(statement.get("external") or "")
    if external is None:
        return BadRecord(line, "neither true nor false", "external")
    statement["external"] = external
    return line, statement


def _from_pack(line: int, statement: dict[str, Any]) -> Row | BadRecord:
    schema, _, prop = statement["prop"].partition(":")
    if not schema or not prop:
        return BadRecord(line, "not of the form Schema:prop", "prop")
    statement["schema"] = schema
    statement["prop"] = prop
    statement["canonical_id"] = statement["entity_id"]
    statement["external"] = statement.get("external") == "t"
    return line, statement


def _from_old_pack(line: int, statement: dict[str, Any]) -> Row | BadRecord:
    if (statement["origin"] or "") in _TARGET:
        statement["origin"] = None
    return _from_pack(line, statement)


def _first(records: Iterator[Fields | BadRecord]) -> Fields | None:
    """Return the first record, which may be the header. Raises InvalidFormat if it cannot be read, as no later one can
    be interpreted without it."""
    first = next(records, None)
    if isinstance(first, BadRecord):
        raise invalid_format(f"the first record is {first.reason}", first.line)
    return first


def _rows(
    records: Iterator[Fields | BadRecord],
    columns: list[str],
    ignored: Collection[str],
    finish: Callable[[int, dict[str, Any]], Row | BadRecord],
) -> Iterator[Row | BadRecord]:
    optional = [column for column in columns if column not in NEEDED and column not in ignored]
    for record in records:
        if isinstance(record, BadRecord):
            yield record
            continue
        line, fields = record
        if len(fields) != len(columns):
            yield BadRecord(line, f"{len(fields)} fields, not {len(columns)}")
            continue
        # Lengths were checked, and strict is slower.
        statement: dict[str, Any] = dict(zip(columns, fields, strict=False))
        for column in optional:
            if not statement[column]:
                statement[column] = None
        for column in ignored:
            del statement[column]
        yield finish(line, statement)
