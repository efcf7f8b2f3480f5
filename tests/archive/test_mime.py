"""Detection of MIME types."""

import io
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tarn.archive.mime import SIGNATURES, mime_type

OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(100)


def zipped(*entries: tuple[str, str]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return file.getvalue()


DOCX = zipped(("[Content_Types].xml", "<x/>"), ("_rels/.rels", ""), ("word/document.xml", ""))
XLSX = zipped(("[Content_Types].xml", "<x/>"), ("xl/workbook.xml", ""))
ODT = zipped(("mimetype", "application/vnd.oasis.opendocument.text"), ("content.xml", ""))
EPUB = zipped(("mimetype", "application/epub+zip"))
ANY = zipped(("a.txt", "a"))

OFFICE = "application/vnd.openxmlformats-officedocument"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.pdf", b"%PDF-1.4", "application/pdf"),
        ("a.txt", b"\n\n%PDF-1.4", "application/pdf"),
        ("report", b"%PDF-1.4", "application/pdf"),
        ("a.pdf", b"MZ\x90\x00", "application/vnd.microsoft.portable-executable"),
        ("a.pdf", b"\x00\x01", "application/octet-stream"),
        ("a.pdf", b"hello", "text/plain"),
        ("a.docx", DOCX, f"{OFFICE}.wordprocessingml.document"),
        ("a", DOCX, f"{OFFICE}.wordprocessingml.document"),
        ("a.zip", XLSX, f"{OFFICE}.spreadsheetml.sheet"),
        ("a.xlsx", ANY, f"{OFFICE}.spreadsheetml.sheet"),
        ("a.bin", ODT, "application/vnd.oasis.opendocument.text"),
        ("a", EPUB, "application/epub+zip"),
        ("a.zip", ANY, "application/zip"),
        ("a.png", ANY, "application/zip"),
        ("a.doc", OLE, "application/msword"),
        ("a.xls", OLE, "application/vnd.ms-excel"),
        ("a.msg", OLE, "application/vnd.ms-outlook"),
        ("a.pdf", OLE, "application/x-ole-storage"),
        ("a.csv", b"a,b\n1,2\n", "text/csv"),
        ("A.CSV", "ä;ö\n".encode("latin-1"), "text/csv"),
        ("a.tsv", b"a\tb\n", "text/tab-separated-values"),
        ("a.csv", b"\x00\x01\x02", "application/octet-stream"),
        ("a.json", b'{"a": 1}', "application/json"),
        ("a.ndjson", b"{}\n{}\n", "application/x-ndjson"),
        ("a.md", b"# a", "text/markdown"),
        ("a", b"hello", "text/plain"),
        ("a.txt", "привет".encode("utf-16"), "text/plain"),
        ("a.txt", b"MZ is how this text begins", "text/plain"),
        ("a.txt", b"ID3 is a word", "text/plain"),
        ("a", b"<!DOCTYPE html><p>", "text/html"),
        ("a.txt", b"\xef\xbb\xbf  <HTML>", "text/html"),
        ("a.htm", b"<p>", "text/html"),
        ("a", b"<?xml version='1.0'?><rss/>", "application/xml"),
        ("a", b"<?xml version='1.0'?>\n<!-- x --><svg/>", "image/svg+xml"),
        ("a", b"From: a@b.c\r\nSubject: x\r\n\r\nhi", "message/rfc822"),
        ("a.eml", b"anything", "message/rfc822"),
        ("a", b"From a@b.c Mon\nFrom: a@b.c\n\n", "application/mbox"),
        ("a", b"Subject: only\n\nhi", "text/plain"),
        ("a", b"{\\rtf1 x}", "application/rtf"),
        ("a.dwg", b"AC1032\x00", "image/vnd.dwg"),
        ("a.tar", bytes(257) + b"ustar\x00" + bytes(200), "application/x-tar"),
        ("a.mp4", bytes(4) + b"ftypisom\x00", "video/mp4"),
        ("a", b"RIFF\x00\x00\x00\x00WAVEfmt ", "audio/x-wav"),
        ("a.unknown", b"\x00", "application/octet-stream"),
        ("a.", b"x", "text/plain"),
    ],
)
def test_type_is_detected_by_content_or_else_by_name(name: str, content: bytes, expected: str):
    assert mime_type(name, content) == expected


@pytest.mark.parametrize(("offset", "signature", "kind"), SIGNATURES)
def test_every_signature_is_detected_with_any_name(offset: int, signature: bytes, kind: str):
    head = bytes(offset) + signature + b"\x00" * 20

    assert mime_type("a.txt", head) == kind


@given(st.text(max_size=30), st.binary(max_size=300))
def test_any_content_has_a_type(name: str, head: bytes):
    assert mime_type(name, head).count("/") == 1
