"""Limits on the parts of a workbook (XLSX), checked before openpyxl parses them.

openpyxl trusts a workbook: it creates an empty row for every skipped row number, builds a whole row or part in memory,
and drops cells and rows that are not in order. Expat rescans a tag from its beginning with each block. So each part
first passes through an event parser, which keeps nothing in memory and stops at the first value out of bounds. The
limits on rows and columns are Excel's own.
"""

import re
import zipfile
from collections.abc import Iterator
from typing import IO, Any
from xml.parsers import expat
from zipfile import ZipFile

from tarn.errors import FieldError, InvalidFormat

MOST_ROWS, MOST_COLUMNS = 1_048_576, 16_384
"""Rows and columns of a sheet, as in Excel."""

MOST_PARTS = 10_000
"""Entries of a workbook: sheets, pictures and the like."""

LARGEST_DIRECTORY = 4 << 20
"""Bytes of the directory of a zip file, which is read at once."""

LARGEST_PART = 32 << 20
"""Bytes of a part that is held in memory: styles, names, relations."""

MOST_ELEMENTS = 200_000
"""Elements of a part that is held in memory, of a row, and of a sheet outside its rows."""

MOST_STRINGS = 4_000_000
"""Shared strings of a workbook."""

LONGEST_TEXT = 1 << 20
"""Characters of a shared string. Excel's limit is 32 767."""

LONGEST_ROW = 16 << 20
"""Characters in the cells of a row."""

LONGEST_TAG = 1 << 20
"""Bytes of a tag, a comment or similar."""

DEEPEST = 100
BLOCK = 64 << 10
"""Bytes that are parsed at once."""

PAUSE = 16
"""Blocks after which a scan yields, so that its caller can stop."""

REFERENCE = re.compile("([A-Za-z]{1,10})([0-9]{1,20})")
ROW_NUMBER = re.compile(r"[0-9]{1,20}(?:\.0{1,20})?")
LONGEST_SHOWN = 60


class WorkbookParts(ZipFile):
    """A workbook's parts. A part that is read at once is checked before it is returned."""

    def __init__(self, file: IO[bytes]) -> None:
        end = zipfile._EndRecData(file)  # type: ignore[attr-defined]  # ZipFile reads the directory however large it is
        if end is None:
            raise invalid_workbook("it is not a zip file")
        if end[5] > LARGEST_DIRECTORY:
            raise invalid_workbook(f"its directory takes {end[5]} bytes, at most {LARGEST_DIRECTORY} are read")
        super().__init__(file)
        if len(self.filelist) > MOST_PARTS:
            raise invalid_workbook(f"it has {len(self.filelist)} parts, at most {MOST_PARTS} are read")

    def read(self, name: Any, pwd: bytes | None = None) -> bytes:
        info = self.getinfo(name)
        if info.file_size > LARGEST_PART:
            raise invalid_workbook(f"{name} takes {info.file_size} bytes, at most {LARGEST_PART} are read")
        for _ in scan(self, name, ElementCheck(name)):
            pass
        return super().read(name, pwd)


class ElementCheck:
    """Checks for every part: the number of elements, and their depth."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.depth = 0
        self.elements = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.error(f"elements are nested more than {DEEPEST} deep")
        self.count()

    def count(self) -> None:
        self.elements += 1
        if self.elements > MOST_ELEMENTS:
            raise self.error(f"it has more than {MOST_ELEMENTS} elements")

    def end(self, name: str) -> None:
        self.depth -= 1

    def text(self, data: str) -> None:
        pass

    def error(self, reason: str) -> InvalidFormat:
        return invalid_workbook(f"{self.part}: {reason}")


class RowCheck(ElementCheck):
    """Checks for a sheet: rows and cells are in order, within Excel's limits, and not too large."""

    def __init__(self, part: str) -> None:
        super().__init__(part)
        self._row = 0
        self._column = 0
        self._row_depth = 0
        """Depth of the open row; 0 if none is open."""
        self._in_row = 0
        self._characters = 0

    def count(self) -> None:
        if not self._row_depth:
            super().count()

    def start(self, name: str, attributes: dict[str, str]) -> None:
        super().start(name, attributes)
        if name == "row":
            if self._row_depth:
                raise self.error(f"row {self._row} has another row in it")
            self._begin_row(attributes.get("r"))
        elif self._row_depth:
            self._in_row += 1
            if self._in_row > MOST_ELEMENTS:
                raise self.error(f"row {self._row} has more than {MOST_ELEMENTS} elements")
            if self.depth == self._row_depth + 1:
                self._cell(attributes.get("r"))

    def end(self, name: str) -> None:
        if self.depth == self._row_depth:
            self._row_depth = 0
        super().end(name)

    def text(self, data: str) -> None:
        self._characters += len(data)
        if self._characters > LONGEST_ROW:
            raise self.error(f"row {self._row} has more than {LONGEST_ROW} characters")

    def _begin_row(self, number: str | None) -> None:
        if number is not None and not ROW_NUMBER.fullmatch(number):
            raise self.error(f"the row number {_shown(number)} is not a number")
        before, self._row = self._row, self._row + 1 if number is None else int(number.partition(".")[0])
        if not 1 <= self._row <= MOST_ROWS:
            raise self.error(f"the row number {_shown(str(self._row))} is not between 1 and {MOST_ROWS}")
        if self._row <= before:
            raise self.error(f"row {self._row} comes after row {before}: rows must be in order")
        self._row_depth = self.depth
        self._column = self._in_row = self._characters = 0

    def _cell(self, reference: str | None) -> None:
        before, self._column = self._column, self._column + 1
        shown = f"cell {self._column} of row {self._row}"
        if reference:
            match = REFERENCE.fullmatch(reference)
            if match is None:
                raise self.error(f"the cell reference {_shown(reference)} is not valid")
            self._column = _column_number(match[1])
            shown = f"the cell {_shown(reference)}"
        if self._column > MOST_COLUMNS:
            raise self.error(f"{shown} is beyond the {MOST_COLUMNS} columns that a sheet has")
        if self._column <= before:
            raise self.error(f"{shown} of row {self._row} comes after column {before}: cells must be in order")


class StringCheck(ElementCheck):
    """Checks for the shared strings, and their texts."""

    def __init__(self, part: str) -> None:
        super().__init__(part)
        self.strings: list[str] = []
        self._pieces: list[str] = []
        self._length = 0
        self._is_text = False
        self._phonetic = 0
        """Depth of an open phonetic run, which is not part of the text; 0 if none is open."""

    def count(self) -> None:
        if len(self.strings) >= MOST_STRINGS:
            raise self.error(f"it has more than {MOST_STRINGS} texts")
        self._length += 1  # so that a text cannot consist of elements alone
        self._check()

    def start(self, name: str, attributes: dict[str, str]) -> None:
        super().start(name, attributes)
        if name == "si":
            self._pieces, self._length = [], 0
        elif name == "rPh" and not self._phonetic:
            self._phonetic = self.depth
        self._is_text = name == "t" and not self._phonetic

    def end(self, name: str) -> None:
        self._is_text = False
        if self.depth == self._phonetic:
            self._phonetic = 0
        if name == "si":
            # As openpyxl does.
            self.strings.append("".join(self._pieces).replace("x005F_", ""))
            self._pieces, self._length = [], 0
        super().end(name)

    def text(self, data: str) -> None:
        if self._is_text:
            self._length += len(data)
            self._check()
            self._pieces.append(data)

    def _check(self) -> None:
        if self._length > LONGEST_TEXT:
            raise self.error(f"the text {len(self.strings)} has more than {LONGEST_TEXT} characters or elements")


def scan(archive: ZipFile, name: str, check: ElementCheck) -> Iterator[None]:
    """Parse a part block by block, and yield every PAUSE blocks. Raises InvalidFormat."""
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True

    def start(tag: str, attributes: dict[str, str]) -> None:
        check.start(tag.rpartition(" ")[2], attributes)

    def end(tag: str) -> None:
        check.end(tag.rpartition(" ")[2])

    def doctype(*_: object) -> None:
        raise check.error("it has a document type, which may define entities")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = check.text
    parser.StartDoctypeDeclHandler = doctype
    parsed = blocks = 0
    with archive.open(name) as opened:
        try:
            while block := opened.read(BLOCK):
                if b"\0" in block:
                    raise check.error("it is not in UTF-8")
                parser.Parse(block, False)
                parsed += len(block)
                if parsed - parser.CurrentByteIndex > LONGEST_TAG:
                    raise check.error(f"a tag is longer than {LONGEST_TAG} bytes")
                blocks += 1
                if blocks % PAUSE == 0:
                    yield
            parser.Parse(b"", True)
        except expat.ExpatError as error:
            raise check.error(str(error)) from None


def invalid_workbook(reason: str) -> InvalidFormat:
    """Return the error for a workbook that cannot be read."""
    return InvalidFormat(f"the file is not a readable spreadsheet: {reason}", errors=[FieldError(reason=reason)])


def _column_number(letters: str) -> int:
    number = 0
    for letter in letters.upper():
        number = number * 26 + ord(letter) - ord("A") + 1
    return number


def _shown(text: str) -> str:
    return repr(text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…")
