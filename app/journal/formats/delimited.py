"""Statements as FtM writes them in lines of fields: CSV and pack."""

import csv
import sys
from collections.abc import Callable, Iterator
from typing import Any

from followthemoney.statement.serialize import LEGACY_PACK_COLUMNS

from app.journal.formats.columns import KNOWN, NEEDED, check_columns, truth
from app.journal.formats.csv_lines import Fields, csv_records
from app.journal.formats.record import BadRecord, Row, Source, broken

# One limit for the whole process, which followthemoney lowers when it is imported, above: ours is `longest`.
csv.field_size_limit(sys.maxsize)

_PACK_NEEDED = ("entity_id", "prop", "value")
_PACK_KNOWN = (KNOWN | set(LEGACY_PACK_COLUMNS)) - {"schema", "prop_type", "canonical_id"}


def from_csv(source: Source, longest: int) -> Iterator[Row | BadRecord]:
    """A statement a record, under a header; an empty field is None unless every statement has it.

    Raises InvalidFormat for a header that lacks a needed column or has an unknown one, and as `csv_records` does.
    """
    records = csv_records(source, longest)
    first = _first(records)
    if first is None:
        return
    line, columns = first
    check_columns(columns, line)
    yield from _rows(records, columns, _from_csv)


def from_pack(source: Source, longest: int) -> Iterator[Row | BadRecord]:
    """A statement a record, under a header or, as older packs are, without one.

    A record whose `prop` is not `Schema:prop` is a BadRecord. Raises as `from_csv` does.
    """
    records = csv_records(source, longest)
    first = _first(records)
    if first is None:
        return
    line, columns = first
    if "entity_id" in columns and "prop" in columns:
        check_columns(columns, line, needed=_PACK_NEEDED, known=_PACK_KNOWN)
    else:
        columns = LEGACY_PACK_COLUMNS
        yield from _rows(iter([first]), columns, _from_pack)
    yield from _rows(records, columns, _from_pack)


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
    statement.pop("target", None)
    return line, statement


def _first(records: Iterator[Fields | BadRecord]) -> Fields | None:
    """What may be a header. Without it no later record can be read, so a bad one is InvalidFormat."""
    first = next(records, None)
    if isinstance(first, BadRecord):
        raise broken(f"the first record is {first.reason}", first.line)
    return first


def _rows(
    records: Iterator[Fields | BadRecord],
    columns: list[str],
    finish: Callable[[int, dict[str, Any]], Row | BadRecord],
) -> Iterator[Row | BadRecord]:
    optional = [column for column in columns if column not in NEEDED]
    for record in records:
        if isinstance(record, BadRecord):
            yield record
            continue
        line, fields = record
        if len(fields) != len(columns):
            yield BadRecord(line, f"{len(fields)} fields, not {len(columns)}")
            continue
        statement: dict[str, Any] = dict(zip(columns, fields, strict=False))  # just checked, and strict takes its time
        for column in optional:
            if not statement[column]:
                statement[column] = None
        yield finish(line, statement)
