"""Paths of source files: which are valid, and which are refused."""

# ruff: noqa: E501, RUF001 - tables of names in any script

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tarn.model.names import FilePath

CONTROLS = [chr(code) for code in (*range(0x20), 0x7F, *range(0x80, 0xA0), 0x2028, 0x2029)]
"""All characters that could end a line or a text, or control a terminal."""

ABSOLUTE = [
    "/",
    "//",
    "///",
    "/a",
    "/a/b",
    "//server/share",
    "/etc/passwd",
    "C:/a",
    "c:/Windows/x",
    "Z:",
    "C:/",
    "z:/..",
]
DOTS = [
    ".", "..", "./a", "../a", "a/.", "a/..", "a/./b", "a/../b", "../../../etc/passwd", "a/b/../../..", "./..", "..//",
    "a/../../b", "../", "./", "x/../", "..../../x",
]  # fmt: skip
EMPTY = ["", "a//b", "a/", "a/b/", "a///b", "a/b//", "//a"]
BACKSLASHES = ["\\", "\\a", "a\\b", "..\\a", "..\\..\\windows", "C:\\a", "\\\\server\\share", "a/b\\c", "a\\", "a\\/b"]
HALVES = ["\ud800", "a\udfff", "\udcff.txt", "a/\udc80/b"]
LONG = ["a" * 4097, "ä" * 2049, "文" * 1366, "😀" * 1025, "a/" * 2048 + "b"]

REFUSED = [
    *ABSOLUTE,
    *DOTS,
    *EMPTY,
    *BACKSLASHES,
    *HALVES,
    *LONG,
    *(f"a{control}b" for control in CONTROLS),
]

SCRIPTS = [
    "ኢትዮጵያ.txt", "تقرير سنوي.pdf", "հաշվետվություն.doc", "প্রতিবেদন.pdf", "ᏣᎳᎩ.txt", "отчёт/2024.pdf", "प्रतिवेदन.odt",
    "ანგარიში.pdf", "αναφορά.pdf", "અહેવાલ.pdf", "ਰਿਪੋਰਟ.pdf", "報告書.pdf", "报告/附件.xlsx", "보고서.hwp", "דוח שנתי.pdf",
    "レポート.txt", "ವರದಿ.pdf", "របាយការណ៍.pdf", "ລາຍງານ.pdf", "Übersicht/Größe.txt", "റിപ്പോർട്ട്.pdf", "ᠮᠣᠩᠭᠣᠯ.txt", "အစီရင်ခံစာ.pdf",
    "ରିପୋର୍ଟ.pdf", "වාර්තාව.pdf", "அறிக்கை.pdf", "నివేదిక.pdf", "รายงาน.pdf", "སྙན་ཞུ།.pdf", "ⵜⴰⵎⴰⵣⵉⵖⵜ.txt", "گزارش\u200cها.pdf",
    "báo cáo.pdf", "ꦗꦮ.txt", "𐎠𐎡.txt", "😀/👩\u200d👩\u200d👧.jpg", "\U0010ffff", "\u00a0", "ﷺ.txt", "a\u0301.txt", "á.txt",
    "\u200f\u05d0.txt", "\ufeffbom.txt", "\u202egpj.exe", "\ufffd.txt", "\u3000.txt", "ＡＢＣ／.txt",
]  # fmt: skip
ODD = [
    "a", "a/b", "a.b", ".a", "..a", "a..", "...", "a/...", ".../a", "a/.b", "a /b", " a", "a ", " ", "a/ /b", "-", "-rf", "--",
    "~", "~/a", "$HOME/a", "%2e%2e/a", "%00", "a%2fb", "a?b", "a#b", "a#1", "a*b", "a|b", "a<b>c", 'a"b', "a'b", "a`b`", "a;b",
    "a&b", "a=b", "a:b", "ab:/c", "a/C:/b", "C", "c:d", "CON", "nul.txt", "aux/lpt1", "data", "index.json", "{a}", "[a]", "(a)",
    "a,b", "a@b", "a!b", "a^b", "http:", "file:", "http:/x", "0", "null", "true", "__proto__", "<script>", "{{7*7}}", "' OR 1=1 --",
    "a.tar.gz", "Thumbs.db", ".DS_Store", "x" * 4096, "/".join("x" * 2048), "ä" * 2048, "文" * 1365, "a" * 255 + "/" + "b" * 300,
]  # fmt: skip
ACCEPTED = [*SCRIPTS, *ODD]


def test_the_documented_number_of_cases_is_checked():
    assert len({*REFUSED}) + len({*ACCEPTED}) >= 200


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: ascii(text)[:40])
def test_path_that_could_escape_or_be_confused_is_refused_with_the_reason(text: str):
    with pytest.raises(ValueError, match="file path") as refused:
        FilePath(text)

    assert str(refused.value).isprintable()


@pytest.mark.parametrize("text", ACCEPTED, ids=lambda text: ascii(text)[:40])
def test_path_in_any_script_with_any_harmless_character_is_unchanged(text: str):
    path = FilePath(text)

    assert path == text
    assert path.name == text.split("/")[-1]
    assert [*path.folders, path] == [
        FilePath("/".join(text.split("/")[:depth])) for depth in range(1, text.count("/") + 2)
    ]


def test_paths_in_different_normal_forms_are_different():
    assert FilePath(unicodedata.normalize("NFC", "á")) != FilePath(unicodedata.normalize("NFD", "á"))


@given(st.text(max_size=60) | st.lists(st.text("ab./\\\x00 \n", max_size=4)).map("/".join))
def test_every_path_stays_below_its_root_on_one_line_or_is_refused(text: str):
    try:
        path = FilePath(text)
    except ValueError:
        return
    assert all(name not in ("", ".", "..") for name in re.split(r"[/\\]", path))
    assert path.splitlines() == [path]
    assert path.encode().decode() == text
