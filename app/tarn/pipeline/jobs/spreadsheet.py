"""Spreadsheets (XLSX): one sheet as the delimited text that it would be saved as.

A workbook is a zip of XML, and whoever sends one may mean harm by either. So all of it must be small enough unpacked
(`zipfile` gives no more of a part than its entry says), and each part is checked before openpyxl sees it
(`workbook_parts`). Rows are read one after the other, and what they come to is counted. The text comes in blocks of
bounded size and effort, some of them empty, so that whoever reads them can stop.
"""

import csv
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from tempfile import TemporaryFile
from typing import IO, Any
from zipfile import BadZipFile

from openpyxl.packaging.manifest import Manifest
from openpyxl.reader.excel import ExcelReader
from openpyxl.styles.stylesheet import apply_stylesheet
from openpyxl.worksheet._read_only import ReadOnlyWorksheet
from openpyxl.xml.constants import SHARED_STRINGS

from tarn.errors import BodyTooLarge, Fault, SchemaViolation, TarnError
from tarn.model.cancellation import checked
from tarn.pipeline.jobs.workbook_parts import RowCheck, StringCheck, WorkbookParts, invalid_workbook, scan

ZIP = b"PK\x03\x04"

LARGEST_STRINGS = 256 << 20
"""Bytes of the part with texts that cells share, which are held in memory."""

LARGEST_TEXT = 2 << 30
"""Bytes of a sheet as text: a few bytes of a workbook may stand for a long text, or for thousands of empty cells."""

STEP = 1 << 20
"""Bytes that are written at once."""

ROWS = 4096
"""Rows after which a block ends, however small it is."""


class _Sheet(ReadOnlyWorksheet):  # type: ignore[misc]  # openpyxl has no types
    """A sheet that does not read its size: what a workbook says of that is not to be trusted, and would be filled up
    with empty cells; where it says nothing, openpyxl would hold the whole sheet to find out."""

    def _get_size(self) -> None:
        pass


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
            yield b""
        with _reading(), WorkbookParts(file) as parts:
            _require_within(sum(part.file_size for part in parts.infolist()), most)
            yield from _convert(file, parts, sheet, most)


def _convert(file: IO[bytes], parts: WorkbookParts, name: str | None, most: int) -> Iterator[bytes]:
    reader = ExcelReader(file, read_only=True, data_only=True, keep_links=False)
    reader.archive.close()
    reader.archive = parts
    reader.read_manifest()
    reader.read_workbook()
    apply_stylesheet(parts, reader.wb)
    title, path = _select_sheet(reader, name)
    strings = StringCheck("")
    package: Manifest = reader.package
    found = package.find(SHARED_STRINGS)
    if found is not None:
        strings = StringCheck(found.PartName[1:])
        _require_within(parts.getinfo(strings.part).file_size, LARGEST_STRINGS)
        for _ in scan(parts, strings.part, strings):
            yield b""
    for _ in scan(parts, path, RowCheck(path)):
        yield b""
    yield from _csv_blocks(_Sheet(reader.wb, title, path, strings.strings), most)


def _select_sheet(reader: ExcelReader, name: str | None) -> tuple[str, str]:
    """The title of a sheet, and its part."""
    sheets = {
        sheet.name: rel.target
        for sheet, rel in reader.parser.find_sheets()
        if rel.target in reader.valid_files and "chartsheet" not in rel.Type
    }
    if name is None and sheets:
        return next(iter(sheets.items()))
    if name is None or name not in sheets:
        reason = f"the workbook has the sheets {', '.join(map(repr, [*sheets][:10]))}"[:500]
        raise SchemaViolation(f"there is no such sheet: {reason}", errors=[Fault(field="sheet", reason=reason)])
    return name, sheets[name]


def _csv_blocks(sheet: Any, most: int) -> Iterator[bytes]:
    written, size = io.StringIO(), 0
    writer = csv.writer(written, lineterminator="\n")
    for number, row in enumerate(checked(sheet.iter_rows(values_only=True)), 1):
        texts = [_cell_text(value) for value in row]
        while texts and not texts[-1]:
            texts.pop()
        writer.writerow(texts)
        if written.tell() >= STEP or number % ROWS == 0:
            block = written.getvalue().encode("utf-8", "replace")
            size += len(block)
            _require_within(size, min(most, LARGEST_TEXT))
            yield block
            written.seek(0)
            written.truncate()
    yield written.getvalue().encode("utf-8", "replace")


def _cell_text(value: object) -> str:
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
        raise invalid_workbook(str(error)) from None
    except Exception as error:  # a workbook that was tampered with may bring openpyxl to nearly any error
        raise invalid_workbook(f"{type(error).__name__}: {error}"[:200]) from error


def _require_within(size: int, most: int) -> None:
    if size > most:
        raise BodyTooLarge(f"the workbook is larger than {most} bytes, unpacked", limit=most)
