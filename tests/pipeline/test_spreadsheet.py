"""Spreadsheets as text: equal to what openpyxl reads, with limits whose errors name the value."""

import csv
import io
import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import openpyxl
import pytest
from openpyxl.cell.rich_text import CellRichText, TextBlock
from openpyxl.cell.text import InlineFont
from openpyxl.xml.constants import SHARED_STRINGS
from tarn.errors import BodyTooLarge, InvalidFormat, TarnError
from tarn.pipeline.jobs import spreadsheet, workbook_parts
from tarn.pipeline.jobs.spreadsheet import as_text

MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
SHEET, STRINGS, STYLES = "xl/worksheets/sheet1.xml", "xl/sharedStrings.xml", "xl/styles.xml"
TYPES = "[Content_Types].xml"
MOST = 20 << 20


def saved(*rows: list[Any]) -> bytes:
    workbook = openpyxl.Workbook()
    for row in rows or [["a", "b"], [1, "x"]]:
        workbook.active.append(row)
    written = io.BytesIO()
    workbook.save(written)
    return written.getvalue()


def with_part(name: str, content: bytes | str, data: bytes | None = None) -> bytes:
    """Return a workbook with one part replaced, or with shared strings."""
    shared = f'<Override PartName="/{STRINGS}" ContentType="{SHARED_STRINGS}"/></Types>'.encode()
    written = io.BytesIO()
    with ZipFile(io.BytesIO(data or saved())) as old, ZipFile(written, "w", ZIP_DEFLATED) as new:
        for part in sorted({*old.namelist(), name}):
            former = old.read(part) if part != name else b""
            if part == TYPES and name == STRINGS:
                former = former.replace(b"</Types>", shared)
            new.writestr(part, content if part == name else former)
    return written.getvalue()


def sheet_of(rows: str, more: str = "") -> bytes:
    return with_part(SHEET, f'<worksheet xmlns="{MAIN}">{more}<sheetData>{rows}</sheetData></worksheet>')


def text_of(data: bytes, limit: int = MOST) -> str:
    return b"".join(as_text([data], None, limit)).decode()


def test_sheet_equals_what_openpyxl_reads():
    rich = CellRichText("bold ", TextBlock(InlineFont(b=True), "text"), " end")
    data = saved(
        ["text", "", "ü, \"x\"\ny", None, 1, 1.5, 2.0, -3, 1e20, True, False],
        [],
        [date(2020, 1, 2), datetime(2020, 1, 2, 3, 4, 5), time(3, 4), timedelta(hours=30), rich, "#N/A", "=1+1"],
        [None, None, "x005F_x", " padded ", "text"],
    )  # fmt: skip
    rows = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True).active.iter_rows(values_only=True)
    expected = [[spreadsheet._cell_text(value) for value in row] for row in rows]

    parsed = list(csv.reader(io.StringIO(text_of(data))))

    assert parsed == [[*row[: max((at for at, text in enumerate(row, 1) if text), default=0)]] for row in expected]
    assert parsed[2][4] == "bold text end"


def test_inline_texts_and_phonetic_hints_equal_what_openpyxl_reads():
    strings = f'<sst xmlns="{MAIN}"><si><t>東京</t><rPh sb="0" eb="2"><t>とうきょう</t></rPh></si><si/></sst>'
    shared = '<c t="s"><v>0</v></c><c t="s"><v>1</v></c>'
    inline = '<c t="inlineStr"><is><t>in</t></is></c>'
    data = with_part(STRINGS, strings, sheet_of(f'<row>{inline}{shared}<c t="b"><v>1</v></c></row>'))

    assert text_of(data) == "in,東京,,true\n"
    rows = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True).active.iter_rows(values_only=True)
    assert list(rows) == [("in", "東京", "", True)]


def test_cell_in_the_last_corner_is_one_row_and_not_a_full_grid():
    lines = text_of(
        sheet_of('<row r="1"><c r="A1"><v>1</v></c></row><row r="1048576"><c r="XFD1048576"><v>2</v></c></row>')
    )

    assert lines.count("\n") == 1_048_576
    assert lines.startswith("1\n\n")
    assert lines.endswith("\n" + "," * 16_383 + "2\n")


def cells(count: int) -> str:
    return "<row>" + "<c/>" * count + "</row>"


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "row number": (
        lambda: sheet_of('<row r="1000000000000"><c><v>1</v></c></row>'),
        "the row number '1000000000000' is not between 1 and 1048576",
    ),
    "row 0": (lambda: sheet_of('<row r="0"/>'), "the row number '0' is not between"),
    "row after the last": (lambda: sheet_of('<row r="1048576"/><row/>'), "the row number '1048577' is not between"),
    "no row number": (lambda: sheet_of('<row r="1e9"/>'), "the row number '1e9' is not a number"),
    "rows back and forth": (
        lambda: sheet_of('<row r="1048576"/><row r="1"/>' * 9), "row 1 comes after row 1048576: rows must be in order"
    ),
    "row twice": (lambda: sheet_of('<row r="2"/><row r="2"/>'), "row 2 comes after row 2"),
    "column": (
        lambda: sheet_of('<row><c r="XFE1"/></row>'), "the cell 'XFE1' is beyond the 16384 columns that a sheet has"
    ),
    "far column": (lambda: sheet_of('<row><c r="ZZZZZZ1"/></row>'), "the cell 'ZZZZZZ1' is beyond"),
    "no reference": (lambda: sheet_of('<row><c r="1A"/></row>'), "the cell reference '1A' is not valid"),
    "cells out of order": (
        lambda: sheet_of('<row><c r="C1"/><c r="B1"/></row>'), "the cell 'B1' of row 1 comes after column 3"
    ),
    "many cells": (lambda: sheet_of(cells(16_385)), "cell 16385 of row 1 is beyond the 16384 columns"),
    "many elements in a row": (
        lambda: sheet_of("<row><c>" + "<x/>" * 200_001 + "</c></row>"), "row 1 has more than 200000 elements"
    ),
    "row in a row": (lambda: sheet_of("<row><c><row/></c></row>"), "row 1 has another row in it"),
    "long row": (
        lambda: sheet_of(f"<row><c><v>{'x' * (16 << 20)}x</v></c></row>"), "row 1 has more than 16777216 characters"
    ),
    "many other elements": (lambda: sheet_of("", "<x/>" * 200_001), "it has more than 200000 elements"),
    "deep": (lambda: sheet_of("", "<x>" * 200 + "</x>" * 200), "elements are nested more than 100 deep"),
    "long tag": (lambda: sheet_of("", f'<x a="{"y" * (2 << 20)}"/>'), "a tag is longer than 1048576 bytes"),
    "long comment": (lambda: sheet_of("", f"<!--{'y' * (2 << 20)}-->"), "a tag is longer than 1048576 bytes"),
    "entities": (
        lambda: with_part(STRINGS, '<!DOCTYPE a [<!ENTITY b "c">]><sst/>'), f"{STRINGS}: it has a document type"
    ),
    "another encoding": (lambda: with_part(STYLES, "<!DOCTYPE a><a/>".encode("utf-16")), "it is not in UTF-8"),
    "styles": (lambda: with_part(STYLES, "<a>" + "<b/>" * 200_000 + "</a>"), "more than 200000 elements"),
    "large styles": (lambda: with_part(STYLES, " " * (33 << 20)), "takes 34603008 bytes, at most 33554432 are read"),
    "long shared text": (
        lambda: with_part(STRINGS, f"<sst><si><t>{'x' * (1 << 20)}x</t></si></sst>"),
        "the text 0 has more than 1048576 characters",
    ),
    "elements in a shared text": (
        lambda: with_part(STRINGS, "<sst><si>" + "<r/>" * (1 << 20) + "<r/></si></sst>"), "the text 0 has more than"
    ),
    "no xml": (lambda: with_part(SHEET, "<worksheet><row>"), "no element found"),
    "cut off": (lambda: saved()[:-30], "it is not a zip file"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_part_over_a_limit_is_refused_with_the_value(name: str):
    data, reason = HOSTILE[name]

    with pytest.raises(InvalidFormat, match=re.escape(reason)):
        text_of(data(), limit=64 << 20)


def test_shared_texts_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workbook_parts, "MOST_STRINGS", 3)
    assert text_of(with_part(STRINGS, f'<sst xmlns="{MAIN}">' + "<si/>" * 3 + "</sst>", sheet_of("<row/>"))) == "\n"
    with pytest.raises(InvalidFormat, match="more than 3 texts"):
        text_of(with_part(STRINGS, "<sst>" + "<si/>" * 4 + "</sst>"))


def test_directory_of_the_zip_file_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workbook_parts, "LARGEST_DIRECTORY", 500)
    with pytest.raises(InvalidFormat, match=r"its directory takes \d+ bytes, at most 500 are read"):
        text_of(saved())


def test_part_larger_than_its_declared_size_is_refused():
    data = bytearray(with_part(SHEET, f'<worksheet xmlns="{MAIN}">{" " * 5_000_000}</worksheet>'))
    size = (5_000_000 + len(f'<worksheet xmlns="{MAIN}"></worksheet>')).to_bytes(4, "little")
    assert data.count(size) == 2
    with pytest.raises(InvalidFormat):
        text_of(bytes(data.replace(size, (1000).to_bytes(4, "little"))))


@pytest.mark.parametrize(
    "rows",
    ['<row><c r="XFD{n}"><v>1</v></c></row>', '<row><c t="s"><v>0</v></c></row>'],
    ids=["empty cells", "long shared text"],
)
def test_text_of_a_small_workbook_is_bounded(rows: str):
    strings = f'<sst xmlns="{MAIN}"><si><t>{"x" * 16_384}</t></si></sst>'
    sheet = sheet_of("".join(rows.replace("{n}", str(number)) for number in range(1, 5000)))
    data = with_part(STRINGS, strings, sheet)
    assert len(data) < 100_000

    with pytest.raises(BodyTooLarge, match="larger than 10485760 bytes"):
        text_of(data, limit=10 << 20)


def test_blocks_are_small_and_are_returned_while_a_part_is_checked():
    sheet = sheet_of("".join(f'<row r="{number}"><c><v>{number}</v></c></row>' for number in range(1, 100_001)))

    blocks = list(as_text([sheet], None, MOST))

    assert sum(not block for block in blocks) > 2
    assert max(map(len, blocks)) < 100_000
    assert b"".join(blocks).count(b"\n") == 100_000


def test_any_mutation_of_a_workbook_is_read_or_refused():
    data = saved(*([number, "text", date(2020, 1, 2)] for number in range(50)))
    for offset in range(0, len(data), 61):
        changed = data[:offset] + bytes([data[offset] ^ 0x55]) + data[offset + 1 :]
        try:
            text_of(changed)
        except TarnError as error:
            assert error.slug in ("invalid-format", "body-too-large", "schema-violation")  # noqa: PT017 - either is fine
