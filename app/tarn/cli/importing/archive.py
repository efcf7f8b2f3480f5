"""Reader of an ftm-lakehouse archive: files by hash, with a record for each path at which a file was found."""

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


@dataclass
class ArchivedFile:
    """One file of an archive: its bytes, the records of its paths, and the texts extracted from it."""

    checksum: str
    blob: str | None = None
    records: list[str] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    """The origin of each text, and the file that contains it."""
    others: int = 0
    """The number of files in its folder that are none of these."""


@dataclass(frozen=True)
class FileRecord:
    """The path, origin and metadata under which a file is imported."""

    path: str
    origin: str | None
    meta: dict[str, Any]
    renamed: bool


@dataclass
class ArchiveSurvey:
    """The counts of an archive, and what cannot be imported."""

    files: int = 0
    size: int = 0
    texts: int = 0
    unrecorded: int = 0
    others: int = 0
    renamed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """What cannot be imported, a sentence each."""


def archived_files(folder: str) -> Iterator[ArchivedFile]:
    """Yield every file of an archive, ordered by hash."""
    for path, folders, names in os.walk(folder):
        folders.sort()
        if HASH.fullmatch(os.path.basename(path)):
            folders.clear()
            yield _in_own_folder(path, sorted(names))
        else:
            yield from _in_shared_folder(path, sorted(names))


def survey(folder: str) -> ArchiveSurvey:
    """Count what an archive has. All records are read, the files themselves are not."""
    counts = ArchiveSurvey()
    for file in archived_files(folder):
        paths: set[str] = set()
        for path in file.records:
            record = _read_record(path, file.checksum)
            if record is None:
                counts.errors.append(f"{path} is not a record of a file")
            elif file.blob is None:
                counts.errors.append(
                    f"{record.path} has no content: the archive has no file with the hash {file.checksum}"
                )
            else:
                paths.add(record.path)
                if record.renamed:
                    counts.renamed.append(record.path)
        counts.files += len(paths)
        counts.others += file.others
        if file.blob is not None and paths:
            counts.size += os.path.getsize(file.blob) * len(paths)
            counts.texts += len(file.texts)
        elif file.blob is not None and not file.records:
            counts.unrecorded += 1
    return counts


def file_records(file: ArchivedFile) -> Iterator[FileRecord]:
    """Yield the valid records of a file, one for each path."""
    seen: set[str] = set()
    for path in file.records:
        record = _read_record(path, file.checksum)
        if record is not None and record.path not in seen:
            seen.add(record.path)
            yield record


def sha256(file: ArchivedFile) -> str | None:
    """Return the SHA-256 of a file. If the source names it by its SHA-1, that is checked: None if it is wrong."""
    assert file.blob is not None
    if len(file.checksum) != SHA1_DIGITS:
        return file.checksum  # the server computes it, and refuses a wrong one
    old, new = hashlib.sha1(usedforsecurity=False), hashlib.sha256()
    with open(file.blob, "rb") as blob:
        while chunk := blob.read(CHUNK_BYTES):
            old.update(chunk)
            new.update(chunk)
    return new.hexdigest() if old.hexdigest() == file.checksum else None


def find(folder: str, checksum: str) -> ArchivedFile | None:
    """Return the file with a hash, as the source names it."""
    path = os.path.join(folder, checksum[:2], checksum[2:4], checksum[4:6], checksum)
    if os.path.isdir(path):
        return _in_own_folder(path, sorted(os.listdir(path)))
    if os.path.isfile(path):
        return ArchivedFile(checksum, path)
    return None


def _in_own_folder(folder: str, names: list[str]) -> ArchivedFile:
    file = ArchivedFile(os.path.basename(folder))
    for name in names:
        path = os.path.join(folder, name)
        if name == BLOB:
            file.blob = path
        elif name.endswith(RECORD):
            file.records.append(path)
        elif name.endswith(TEXT):
            file.texts.append((name.removesuffix(TEXT), path))
        else:
            file.others += 1
    return file


def _in_shared_folder(folder: str, names: list[str]) -> Iterator[ArchivedFile]:
    """Yield the files of the first version's layout: `{hash}`, `{hash}.json` and `{hash}.txt` in one folder."""
    files: dict[str, ArchivedFile] = {}
    for name in names:
        checksum, _, suffix = name.partition(".")
        if not HASH.fullmatch(checksum):
            continue
        file, path = files.setdefault(checksum, ArchivedFile(checksum)), os.path.join(folder, name)
        if not suffix:
            file.blob = path
        elif suffix == RECORD[1:]:
            file.records.append(path)
        elif suffix == TEXT[1:]:
            file.texts.append(("default", path))
        elif suffix.endswith(TEXT):
            file.texts.append((suffix.removesuffix(TEXT), path))
        else:
            file.others += 1
    yield from files.values()


def _read_record(path: str, checksum: str) -> FileRecord | None:
    """Return the record in a file, if it is one."""
    from tarn.model.names import Origin

    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict):
        return None
    original_path = record.get("key") or record.get("path") or record.get("name")
    if not isinstance(original_path, str):
        return None
    new_path = usable_path(original_path, checksum)
    origin = record.get("origin")
    source = {
        name: record[name] for name in ("id", "mimetype", "created_at", "updated_at") if record.get(name) is not None
    }
    source |= {"checksum": checksum}
    if new_path != original_path:
        source["path"] = original_path
    try:
        Origin(origin or "")
    except ValueError:
        if origin:
            source["origin"] = str(origin)
        origin = None
    extra = record.get("extra")
    meta = (extra if isinstance(extra, dict) else {}) | {"ftm_lakehouse": source}
    return FileRecord(new_path, origin, meta, new_path != original_path)


def usable_path(path: str, checksum: str) -> str:
    """Return a valid path: this one, else without empty and `.` segments, else the file's hash."""
    from tarn.model.names import FilePath

    names = [name for name in path.replace("\\", "/").split("/") if name not in ("", ".")]
    for candidate in (path, "/".join(names)):
        try:
            return str(FilePath(candidate))
        except ValueError:
            continue
    return checksum
