"""Spreadsheets (XLSX): convert one sheet to CSV.

A workbook is a zip of XML, and either may be malicious. So the unpacked size of all parts is limited (`zipfile` returns
no more of a part than its entry declares), and each part is checked before openpyxl parses it (`workbook_parts`). Rows
are read one after the other, and the size of the text is counted. The text is yielded in blocks of bounded size and
effort, some of them empty, so that the caller can stop between them.
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

from tarn.errors import BodyTooLarge, FieldError, SchemaViolation, TarnError
from tarn.model.work.cancellation import checked
from tarn.pipeline.jobs.workbook_parts import RowCheck, StringCheck, WorkbookParts, invalid_workbook, scan

ZIP = b"PK\x03\x04"

LARGEST_STRINGS = 256 << 20
"""Bytes of the shared strings part, which is held in memory."""

LARGEST_TEXT = 2 << 30
"""Bytes of a sheet as CSV: a few bytes of a workbook may expand to a long text, or to thousands of empty cells."""

STEP = 1 << 20
"""Bytes per block of text."""

ROWS = 4096
"""Rows after which a block ends, even if it is small."""


class _Sheet(ReadOnlyWorksheet):  # type: ignore[misc]  # openpyxl has no types
    """A sheet that ignores its declared size: it cannot be trusted, and openpyxl would fill it up with empty cells.
    Without a declared size, openpyxl would load the whole sheet to compute it."""

    def _get_size(self) -> None:
        pass


def as_text(blocks: Iterable[bytes], sheet: str | None, most: int) -> Iterator[bytes]:
    """Yield a sheet of a workbook, by default the first, as CSV in UTF-8. A row without values is a blank line.

    Raises InvalidFormat if it is not a workbook, SchemaViolation if there is no such sheet, and BodyTooLarge past
    `most` bytes, packed or unpacked.
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
    shared = package.find(SHARED_STRINGS)
    if shared is not None:
        strings = StringCheck(shared.PartName[1:])
        _require_within(parts.getinfo(strings.part).file_size, LARGEST_STRINGS)
        for _ in scan(parts, strings.part, strings):
            yield b""
    for _ in scan(parts, path, RowCheck(path)):
        yield b""
    yield from _csv_blocks(_Sheet(reader.wb, title, path, strings.strings), most)


def _select_sheet(reader: ExcelReader, name: str | None) -> tuple[str, str]:
    """Return the title of the requested sheet, and the path of its part."""
    sheets = {
        sheet.name: rel.target
        for sheet, rel in reader.parser.find_sheets()
        if rel.target in reader.valid_files and "chartsheet" not in rel.Type
    }
    if name is None and sheets:
        return next(iter(sheets.items()))
    if name is None or name not in sheets:
        reason = f"the workbook has the sheets {', '.join(map(repr, [*sheets][:10]))}"[:500]
        raise SchemaViolation(f"there is no such sheet: {reason}", errors=[FieldError(field="sheet", reason=reason)])
    return name, sheets[name]


def _csv_blocks(sheet: Any, most: int) -> Iterator[bytes]:
    buffer, size = io.StringIO(), 0
    writer = csv.writer(buffer, lineterminator="\n")
    for number, row in enumerate(checked(sheet.iter_rows(values_only=True)), 1):
        texts = [_cell_text(value) for value in row]
        while texts and not texts[-1]:
            texts.pop()
        writer.writerow(texts)
        if buffer.tell() >= STEP or number % ROWS == 0:
            block = buffer.getvalue().encode("utf-8", "replace")
            size += len(block)
            _require_within(size, min(most, LARGEST_TEXT))
            yield block
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue().encode("utf-8", "replace")


def _cell_text(value: object) -> str:
    """Return a cell as text: dates without a midnight time, whole numbers without a decimal point."""
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
    except Exception as error:  # openpyxl may raise nearly any error for a manipulated workbook
        raise invalid_workbook(f"{type(error).__name__}: {error}"[:200]) from error


def _require_within(size: int, most: int) -> None:
    if size > most:
        raise BodyTooLarge(f"the workbook is larger than {most} bytes, unpacked", limit=most)
