"""Spreadsheets (XLSX): one sheet as the delimited text that it would be saved as.

A workbook is a zip of XML, and whoever sends one may mean harm by either. So before openpyxl sees it, all of it must be
small enough unpacked (`zipfile` gives no more of a part than its entry says), parts that are held in memory must be
small, and none may define entities. Rows are read one after the other, and what they come to is counted.
"""

import csv
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from tempfile import TemporaryFile
from typing import IO, Any
from zipfile import BadZipFile, ZipFile, ZipInfo

from openpyxl import load_workbook

from app.errors import BodyTooLarge, Fault, InvalidFormat, SchemaViolation, TarnError

ZIP = b"PK\x03\x04"

MOST_PARTS = 10_000
"""Entries of a workbook: sheets, pictures and the like."""

LARGEST_HELD = 256 << 20
"""Bytes of all parts but the sheets, which are held in memory: texts, styles, names."""

SHEETS = "xl/worksheets/"

STEP = 1 << 20
"""Bytes that are looked at, or written, at once."""

DOCTYPE = b"<!DOCTYPE"


def as_text(blocks: Iterable[bytes], sheet: str | None, most: int) -> Iterator[bytes]:
    """A sheet of a workbook, or its first, as CSV in UTF-8. A row without values is a blank line.

    Raises InvalidFormat for what is no workbook, SchemaViolation if it has no such sheet, and BodyTooLarge past so many
    bytes, packed or unpacked.
    """
    with TemporaryFile() as file:
        size = 0
        for block in blocks:
            size += len(block)
            _require_within(size, most)
            file.write(block)
        with _reading():
            _check(file, most)
            workbook = load_workbook(file, read_only=True, data_only=True, keep_links=False)
            try:
                yield from _lines(_chosen(workbook, sheet), most)
            finally:
                workbook.close()


def _check(file: IO[bytes], most: int) -> None:
    with ZipFile(file) as archive:
        parts = archive.infolist()
        if len(parts) > MOST_PARTS:
            raise _broken(f"it has more than {MOST_PARTS} parts")
        _require_within(sum(part.file_size for part in parts), most)
        _require_within(sum(part.file_size for part in parts if not part.filename.startswith(SHEETS)), LARGEST_HELD)
        for part in parts:
            if part.filename.endswith((".xml", ".rels")) and _defines(archive, part):
                raise _broken(f"{part.filename} defines entities, or is not in UTF-8")


def _defines(archive: ZipFile, part: ZipInfo) -> bool:
    """Whether a part has a document type, or hides by its encoding whether it has one."""
    last = b""
    with archive.open(part) as opened:
        while block := opened.read(STEP):
            if b"\0" in block or DOCTYPE in last + block:
                return True
            last = block[-len(DOCTYPE) :]
    return False


def _chosen(workbook: Any, name: str | None) -> Any:
    sheets = {sheet.title: sheet for sheet in workbook.worksheets}
    if name is None and sheets:
        return next(iter(sheets.values()))
    if name is None or name not in sheets:
        reason = f"the workbook has the sheets {', '.join(map(repr, [*sheets][:10]))}"[:500]
        raise SchemaViolation(f"there is no such sheet: {reason}", errors=[Fault(field="sheet", reason=reason)])
    return sheets[name]


def _lines(sheet: Any, most: int) -> Iterator[bytes]:
    # What a workbook says of its own size is not to be trusted, and would be filled up with empty cells.
    sheet.reset_dimensions()
    written, size = io.StringIO(), 0
    writer = csv.writer(written, lineterminator="\n")
    for row in sheet.iter_rows(values_only=True):
        texts = [_text(value) for value in row]
        while texts and not texts[-1]:
            texts.pop()
        writer.writerow(texts)
        if written.tell() >= STEP:
            block = written.getvalue().encode("utf-8", "replace")
            size += len(block)
            _require_within(size, most)
            yield block
            written.seek(0)
            written.truncate()
    yield written.getvalue().encode("utf-8", "replace")


def _text(value: object) -> str:
    """A cell as it is meant: days without a time, whole numbers without a point."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return value.date().isoformat() if value.time() == time() else value.isoformat(sep=" ")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return str(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except TarnError:
        raise
    except BadZipFile as error:
        raise _broken(str(error)) from None
    except Exception as error:  # a workbook that was tampered with may bring openpyxl to nearly any error
        raise _broken(f"{type(error).__name__}: {error}"[:200]) from error


def _require_within(size: int, most: int) -> None:
    if size > most:
        raise BodyTooLarge(f"the workbook is larger than {most} bytes, unpacked", limit=most)


def _broken(reason: str) -> InvalidFormat:
    return InvalidFormat(f"the file is no spreadsheet that can be read: {reason}", errors=[Fault(reason=reason)])
