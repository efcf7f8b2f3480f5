"""The files of a lakehouse's archive: contents by their hash, and a record for each path that a content came from."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
BLOB, RECORD, TEXT = "blob", ".json", ".txt"
SHA1_DIGITS = 40
CHUNK_BYTES = 1 << 20
EXAMPLES = 5


@dataclass
class ArchivedFile:
    """One content: its bytes, the records of where it came from, and what text was found in it."""

    checksum: str
    blob: str | None = None
    records: list[str] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    """The origin of each text, and its file."""
    others: int = 0
    """Files that others put beside it."""


@dataclass(frozen=True)
class FileRecord:
    """A file as the source describes it, with the path that it gets."""

    path: str
    origin: str | None
    meta: dict[str, Any]
    renamed: bool


@dataclass
class ArchiveSurvey:
    """What an archive holds, and what is wrong with it."""

    files: int = 0
    size: int = 0
    texts: int = 0
    unrecorded: int = 0
    others: int = 0
    renamed: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """What cannot be imported, a sentence each."""


def archived_files(folder: str) -> Iterator[ArchivedFile]:
    """Everything in an archive, in the order of the hashes."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        if HASH.fullmatch(os.path.basename(place)):
            folders.clear()
            yield _in_own_folder(place, sorted(names))
        else:
            yield from _in_shared_folder(place, sorted(names))


def survey(folder: str) -> ArchiveSurvey:
    """What an archive holds. Its records are all read, its contents are not."""
    seen = ArchiveSurvey()
    for content in archived_files(folder):
        found: set[str] = set()
        for path in content.records:
            record = _read_record(path, content.checksum)
            if record is None:
                seen.faults.append(f"{path} is no record of a file")
            elif content.blob is None:
                seen.faults.append(f"{record.path} has no content: there is none with the hash {content.checksum}")
            else:
                found.add(record.path)
                if record.renamed:
                    seen.renamed.append(record.path)
        seen.files += len(found)
        seen.others += content.others
        if content.blob is not None and found:
            seen.size += os.path.getsize(content.blob) * len(found)
            seen.texts += len(content.texts)
        elif content.blob is not None and not content.records:
            seen.unrecorded += 1
    return seen


def records(content: ArchivedFile) -> Iterator[FileRecord]:
    """The records of a content that can be used, one for each path."""
    seen: set[str] = set()
    for path in content.records:
        record = _read_record(path, content.checksum)
        if record is not None and record.path not in seen:
            seen.add(record.path)
            yield record


def sha256(content: ArchivedFile) -> str | None:
    """The SHA-256 of a content. Where the source knows it by its SHA-1, both are computed: None if it is wrong."""
    assert content.blob is not None
    if len(content.checksum) != SHA1_DIGITS:
        return content.checksum  # the server computes it, and refuses what is not so
    old, new = hashlib.sha1(usedforsecurity=False), hashlib.sha256()
    with open(content.blob, "rb") as file:
        while piece := file.read(CHUNK_BYTES):
            old.update(piece)
            new.update(piece)
    return new.hexdigest() if old.hexdigest() == content.checksum else None


def find(folder: str, checksum: str) -> ArchivedFile | None:
    """The content with a hash, as the source knows it."""
    inside = os.path.join(folder, checksum[:2], checksum[2:4], checksum[4:6])
    if os.path.isdir(os.path.join(inside, checksum)):
        return _in_own_folder(os.path.join(inside, checksum), sorted(os.listdir(os.path.join(inside, checksum))))
    if os.path.isfile(os.path.join(inside, checksum)):
        return ArchivedFile(checksum, os.path.join(inside, checksum))
    return None


def _in_own_folder(folder: str, names: list[str]) -> ArchivedFile:
    content = ArchivedFile(os.path.basename(folder))
    for name in names:
        path = os.path.join(folder, name)
        if name == BLOB:
            content.blob = path
        elif name.endswith(RECORD):
            content.records.append(path)
        elif name.endswith(TEXT):
            content.texts.append((name.removesuffix(TEXT), path))
        else:
            content.others += 1
    return content


def _in_shared_folder(folder: str, names: list[str]) -> Iterator[ArchivedFile]:
    """As the first version wrote it: the content under its hash, the record and the texts beside it."""
    found: dict[str, ArchivedFile] = {}
    for name in names:
        checksum, _, rest = name.partition(".")
        if not HASH.fullmatch(checksum):
            continue
        content, path = found.setdefault(checksum, ArchivedFile(checksum)), os.path.join(folder, name)
        if not rest:
            content.blob = path
        elif rest == RECORD[1:]:
            content.records.append(path)
        elif rest == TEXT[1:]:
            content.texts.append(("default", path))
        elif rest.endswith(TEXT):
            content.texts.append((rest.removesuffix(TEXT), path))
        else:
            content.others += 1
    yield from found.values()


def _read_record(path: str, checksum: str) -> FileRecord | None:
    """The record in a file, if it is one."""
    from tarn.model.names import Origin

    try:
        with open(path, encoding="utf-8") as file:
            said = json.load(file)
    except (OSError, ValueError):
        return None
    if not isinstance(said, dict) or not isinstance(
        told := said.get("key") or said.get("path") or said.get("name"), str
    ):
        return None
    place = usable_path(told, checksum)
    origin = said.get("origin")
    source = {name: said[name] for name in ("id", "mimetype", "created_at", "updated_at") if said.get(name) is not None}
    source |= {"checksum": checksum}
    if place != told:
        source["path"] = told
    try:
        Origin(origin or "")
    except ValueError:
        if origin:
            source["origin"] = str(origin)
        origin = None
    extra = said.get("extra")
    meta = (extra if isinstance(extra, dict) else {}) | {"ftm_lakehouse": source}
    return FileRecord(place, origin, meta, place != told)


def usable_path(told: str, checksum: str) -> str:
    """A path that Tarn takes: the one that was told, without what leads out of its root, or else the content's hash."""
    from tarn.model.names import FilePath

    names = [name for name in told.replace("\\", "/").split("/") if name not in ("", ".")]
    for path in (told, "/".join(names)):
        try:
            return str(FilePath(path))
        except ValueError:
            continue
    return checksum
