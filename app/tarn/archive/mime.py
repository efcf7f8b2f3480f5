"""Detection of MIME types: by the first bytes of a file, and by its name where they leave it open.

A name that the bytes contradict is ignored: a program called `report.pdf` is not a PDF.
"""

import mimetypes
import re

HEAD = 8192
"""Bytes at the beginning of a file that are examined."""

UNKNOWN, PLAIN = "application/octet-stream", "text/plain"
HTML, XML, SVG, EMAIL, MBOX = "text/html", "application/xml", "image/svg+xml", "message/rfc822", "application/mbox"
ZIP, OLE = "application/zip", "application/x-ole-storage"

_OFFICE = "application/vnd.openxmlformats-officedocument"
_OPEN = "application/vnd.oasis.opendocument"

SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"{\\rtf", "application/rtf"),
    (0, b"%!PS", "application/postscript"),
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF87a", "image/gif"),
    (0, b"GIF89a", "image/gif"),
    (0, b"II*\x00", "image/tiff"),
    (0, b"MM\x00*", "image/tiff"),
    (8, b"WEBP", "image/webp"),
    (0, b"8BPS", "image/vnd.adobe.photoshop"),
    (0, b"AT&TFORM", "image/vnd.djvu"),
    (0, b"\x00\x00\x00\x0cjP  ", "image/jp2"),
    (4, b"ftypheic", "image/heic"),
    (4, b"ftypavif", "image/avif"),
    (4, b"ftypM4A", "audio/mp4"),
    (4, b"ftypqt", "video/quicktime"),
    (4, b"ftyp3g", "video/3gpp"),
    (4, b"ftyp", "video/mp4"),
    (0, b"\x1aE\xdf\xa3", "video/x-matroska"),
    (8, b"AVI ", "video/x-msvideo"),
    (0, b"FLV\x01", "video/x-flv"),
    (0, b"\x00\x00\x01\xba", "video/mpeg"),
    (0, b"\x00\x00\x01\xb3", "video/mpeg"),
    (0, b"0&\xb2u\x8ef\xcf\x11", "video/x-ms-asf"),
    (8, b"WAVE", "audio/x-wav"),
    (0, b"ID3", "audio/mpeg"),
    (0, b"\xff\xfb", "audio/mpeg"),
    (0, b"\xff\xf3", "audio/mpeg"),
    (0, b"fLaC", "audio/flac"),
    (0, b"OggS", "audio/ogg"),
    (0, b"#!AMR", "audio/amr"),
    (0, b"MThd", "audio/midi"),
    (0, b"\x1f\x8b", "application/gzip"),
    (0, b"BZh", "application/x-bzip2"),
    (0, b"\xfd7zXZ\x00", "application/x-xz"),
    (0, b"(\xb5/\xfd", "application/zstd"),
    (0, b"7z\xbc\xaf\x27\x1c", "application/x-7z-compressed"),
    (0, b"Rar!\x1a\x07", "application/vnd.rar"),
    (257, b"ustar", "application/x-tar"),
    (0, b"!BDN", "application/vnd.ms-outlook-pst"),
    (0, b"SQLite format 3\x00", "application/vnd.sqlite3"),
    (4, b"Standard Jet DB", "application/x-msaccess"),
    (4, b"Standard ACE DB", "application/x-msaccess"),
    (0, b"PAR1", "application/vnd.apache.parquet"),
    (0, b"wOFF", "font/woff"),
    (0, b"wOF2", "font/woff2"),
    (0, b"\x7fELF", "application/x-elf"),
    (0, b"MZ", "application/vnd.microsoft.portable-executable"),
)
"""Offset, magic bytes and MIME type. The first match applies."""

WRITTEN = frozenset({"application/rtf", "application/postscript"})
"""Types of `SIGNATURES` that are text."""

NAMES = {
    ".7z": "application/x-7z-compressed",
    ".accdb": "application/x-msaccess",
    ".docm": "application/vnd.ms-word.document.macroenabled.12",
    ".docx": f"{_OFFICE}.wordprocessingml.document",
    ".dwg": "image/vnd.dwg",
    ".epub": "application/epub+zip",
    ".ftm": "application/json+ftm",
    ".geojson": "application/geo+json",
    ".jsonl": "application/x-ndjson",
    ".mbox": MBOX,
    ".md": "text/markdown",
    ".mdb": "application/x-msaccess",
    ".msg": "application/vnd.ms-outlook",
    ".ndjson": "application/x-ndjson",
    ".odp": f"{_OPEN}.presentation",
    ".ods": f"{_OPEN}.spreadsheet",
    ".odt": f"{_OPEN}.text",
    ".parquet": "application/vnd.apache.parquet",
    ".pptm": "application/vnd.ms-powerpoint.presentation.macroenabled.12",
    ".pptx": f"{_OFFICE}.presentationml.presentation",
    ".pst": "application/vnd.ms-outlook-pst",
    ".pub": "application/x-mspublisher",
    ".rar": "application/vnd.rar",
    ".rtf": "application/rtf",
    ".tsv": "text/tab-separated-values",
    ".vsd": "application/vnd.visio",
    ".xlsb": "application/vnd.ms-excel.sheet.binary.macroenabled.12",
    ".xlsm": "application/vnd.ms-excel.sheet.macroenabled.12",
    ".xlsx": f"{_OFFICE}.spreadsheetml.sheet",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
}
"""Extensions that Python's own list lacks, or maps to another type."""

INSIDE_ZIP = (
    (b"word/", f"{_OFFICE}.wordprocessingml.document"),
    (b"xl/", f"{_OFFICE}.spreadsheetml.sheet"),
    (b"ppt/", f"{_OFFICE}.presentationml.presentation"),
)
"""Folders inside Office documents, which are ZIP archives."""

ZIPPED = re.compile(
    r"openxmlformats|macroenabled|opendocument|\+zip$|java-archive|android\.package|vnd\.google-earth\.kmz"
)
IN_OLE = re.compile(r"^application/(msword|vnd\.ms-(excel|powerpoint|outlook)|vnd\.visio|x-mspublisher)$")
TEXTUAL = re.compile(
    r"^text/|[+/](json|xml|yaml|toml|sql|javascript|x-javascript|x-ndjson|x-sh|x-tex|x-latex|rtf|pgp-signature)$"
    r"|\+ftm$|^message/|^application/(mbox|x-python|x-perl|x-subrip)$"
)
STORED_TYPE = re.compile(rb"^.{26}\x08\x00..mimetype(application/[a-z0-9.+-]+)", re.DOTALL)
"""The beginning of an OpenDocument or EPUB file: its first entry contains the MIME type."""

TAG = re.compile(
    rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(!doctype\s+)?([a-z][a-z0-9:]*)", re.DOTALL | re.IGNORECASE
)
MARKUP = {b"html": HTML, b"head": HTML, b"body": HTML, b"svg": SVG}
HEADER = re.compile(rb"[A-Za-z][A-Za-z0-9-]*:[ \t]*\S")
MAIL_HEADERS = re.compile(rb"^(?:From|To|Date|Subject|Message-ID|Received|Return-Path|MIME-Version):", re.I | re.M)
BINARY = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
BYTE_ORDERS = (b"\xff\xfe", b"\xfe\xff")


def mime_type(name: str, head: bytes) -> str:
    """Return the MIME type of a file with this name that begins with these bytes."""
    named = _by_name(name)
    detected = _by_content(head)
    if detected == ZIP:
        return _refined(_inside_zip(head), named, ZIPPED)
    if detected == OLE:
        return _refined(OLE, named, IN_OLE)
    if detected in (PLAIN, XML):
        return _refined(detected, named, TEXTUAL)
    if detected is not None:
        return detected
    # The bytes are not recognized: this excludes every type that they would have identified.
    return UNKNOWN if named is None or named in _SHOWN or TEXTUAL.search(named) else named


def _refined(detected: str, named: str | None, fitting: re.Pattern[str]) -> str:
    return named if detected in (ZIP, OLE, PLAIN, XML) and named is not None and fitting.search(named) else detected


def _by_name(name: str) -> str | None:
    ending = re.search(r"\.[A-Za-z0-9]+$", name)
    if ending is None:
        return None
    lower = ending[0].lower()
    return NAMES.get(lower) or _KNOWN.types_map[True].get(lower) or _KNOWN.types_map[False].get(lower)


def _by_content(head: bytes) -> str | None:
    if b"%PDF-" in head[:1024]:
        return "application/pdf"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return ZIP
    if head.startswith(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"):
        return OLE
    is_text = not BINARY.search(head)
    for offset, signature, kind in SIGNATURES:
        # A text may begin with the characters of a signature.
        if head.startswith(signature, offset) and (kind in WRITTEN or not (is_text and signature.isascii())):
            return kind
    return _by_text(head) if is_text or head.startswith(BYTE_ORDERS) else None


def _by_text(head: bytes) -> str:
    """Return the MIME type of a text."""
    if head.startswith(BYTE_ORDERS):
        return PLAIN
    text = head.removeprefix(b"\xef\xbb\xbf")
    if tag_match := TAG.match(text):
        root = tag_match[2].lower()
        return MARKUP.get(root) or (XML if text.lstrip().startswith(b"<?xml") else PLAIN)
    if text.startswith(b"From ") and MAIL_HEADERS.search(text):
        return MBOX
    first = text.split(b"\n", 1)[0]
    if HEADER.match(first) and len({*MAIL_HEADERS.findall(text.split(b"\n\n", 1)[0])}) >= 2:
        return EMAIL
    return PLAIN


def _inside_zip(head: bytes) -> str:
    if stored := STORED_TYPE.match(head):
        return stored[1].decode()
    if b"[Content_Types].xml" in head or b"_rels/.rels" in head:
        return next((kind for folder, kind in INSIDE_ZIP if folder in head), ZIP)
    return ZIP


# Not Python's global list, to which the machine's own files are added.
_KNOWN = mimetypes.MimeTypes()
_SHOWN = frozenset({"application/pdf", ZIP, *(kind for _, _, kind in SIGNATURES)})
