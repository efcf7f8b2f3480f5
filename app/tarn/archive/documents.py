"""Document and Folder entities of FollowTheMoney for a file and the folders in its path.

Ids depend only on dataset, path and content, so that writing the entities again gives the same ids.
"""

import hashlib
import re
from typing import Any

from tarn.archive.mime import TEXTUAL, UNKNOWN
from tarn.model.file import ArchiveFile
from tarn.model.ftm.entity import Exploded
from tarn.model.ftm.omissions import Omissions
from tarn.model.names import DatasetName, FilePath

Entity = dict[str, Any]

SCHEMATA: tuple[tuple[str, str], ...] = (
    ("Email", r"message/(rfc822|.*partial)|application/vnd\.ms-outlook"),
    ("HyperText", r"text/html|application/xhtml\+xml|(text|application)/xml"),
    (
        "Table",
        r"text/(csv|tab-separated-values)|application/(csv|vnd\.ms-excel(\..+)?|vnd\.oasis\.opendocument\.spreadsheet"
        r"|vnd\.openxmlformats-officedocument\.spreadsheetml\..+|vnd\.apache\.parquet|x-dbf|dbase)",
    ),
    (
        "Pages",
        r"application/(pdf|rtf|postscript|msword|epub\+zip|vnd\.ms-(word|powerpoint)(\..+)?|vnd\.visio|x-mspublisher"
        r"|vnd\.oasis\.opendocument\.(text|presentation)(-.+)?|vnd\.openxmlformats-officedocument\.(word|presentation).+)"
        r"|text/rtf|image/vnd\.djvu",
    ),
    (
        "Package",
        r"application/(zip|gzip|zstd|mbox|java-archive|vnd\.rar|vnd\.ms-outlook-pst"
        r"|x-(7z-compressed|tar|xz|bzip2?|rar|gtar|cpio|rar-compressed))",
    ),
    ("Image", r"image/.+"),
    ("Audio", r"audio/.+"),
    ("Video", r"video/.+"),
    ("PlainText", TEXTUAL.pattern),
)
"""Schemata with the patterns of their MIME types. The first that matches applies."""

OTHER, FOLDER = "Document", "Folder"

REJECTED = "rejected by FollowTheMoney's cleaning"
LONGEST_REASON = 500


def entities(dataset: DatasetName, file: ArchiveFile) -> list[Entity]:
    """Return the entities of a file: its folders, from the outermost on, and the document."""
    return [*(folder(dataset, path) for path in file.path.folders), document(dataset, file)]


def document(dataset: DatasetName, file: ArchiveFile) -> Entity:
    """Return the Document of a file. It has the file's own id."""
    properties = {
        "contentHash": [file.sha1],
        "fileName": [file.name],
        "fileSize": [str(file.size)],
        # FtM does not accept the MIME type of unknown files as a value.
        **({} if file.mime_type == UNKNOWN else {"mimeType": [file.mime_type]}),
        **_parent(dataset, file.path),
    }
    return {"id": str(file.id), "schema": schema_of(file.mime_type), "properties": properties}


def folder(dataset: DatasetName, path: FilePath) -> Entity:
    """Return the Folder at a path."""
    properties = {"fileName": [path.name], **_parent(dataset, path)}
    return {"id": folder_id(dataset, path), "schema": FOLDER, "properties": properties}


def report_omitted(entity: Entity, exploded: Exploded, path: FilePath, omitted: Omissions) -> None:
    """Add to `omitted` the properties of a file's Document or Folder that have no statement."""
    stored = set(exploded.props)
    for name, values in entity["properties"].items():
        if name not in stored:
            for value in values:
                omitted.add(exploded.schema, name, value, f"{REJECTED}, of the file {path}"[:LONGEST_REASON])


def folder_id(dataset: DatasetName, path: FilePath) -> str:
    """Return the id of the Folder at a path."""
    return hashlib.sha1(f"{dataset}/folder/{path}".encode(), usedforsecurity=False).hexdigest()


def schema_of(mime_type: str) -> str:
    """Return the FtM schema for files of a MIME type."""
    return next((schema for schema, pattern in _PATTERNS if pattern(mime_type)), OTHER)


def _parent(dataset: DatasetName, path: FilePath) -> dict[str, list[str]]:
    return {} if path.parent is None else {"parent": [folder_id(dataset, path.parent)]}


_PATTERNS = [
    (schema, (re.compile(pattern).search if schema == "PlainText" else re.compile(pattern).fullmatch))
    for schema, pattern in SCHEMATA
]
