"""Backup store: each state of a lake's objects once, and for each backup the index of those that it needs.

    objects/{path in the lake}/{state}     shared by all backups that need the object in that state
    backups/{id}/tables/{table}.ndjson.zst the dump
    backups/{id}/objects.ndjson.zst        the index: path in the lake, object, size
    backups/{id}/backup.json               put last: a backup without it is unfinished

An object's state is named by its entity tag and size, which the lake's store lists without reading the object. An
object that is already backed up is therefore recognised by its name and not read again.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import orjson
import zstandard
from pydantic import ValidationError

from tarn.errors import StartRefused
from tarn.model.datasets.recovery import BackupManifest, DumpedTable
from tarn.model.ids import now, stamp
from tarn.storage.layout import Layout
from tarn.storage.store import Entry, ObjectMissing, Store

OBJECTS, BACKUPS = "objects", "backups"

LEVEL = 3
BLOCK = 1 << 20
"""Bytes of text per compression call."""

DELETED_AT_ONCE = 1000


class DamagedBackup(StartRefused):
    """A backup is incomplete or damaged: the message says what is missing or has changed."""


class BackupObject(NamedTuple):
    """An object that a backup needs: its path in the lake, and its path in the backup store."""

    path: str
    object: str
    size: int


def object_of(entry: Entry) -> str:
    """Return the path in the backup store of an object of the lake in its current state."""
    state = f"{entry.etag or entry.modified.isoformat()} {entry.size}"
    return f"{OBJECTS}/{entry.path}/{hashlib.sha256(state.encode()).hexdigest()[:16]}"


class BackupStore:
    """The backups at one location."""

    def __init__(self, store: Store) -> None:
        """Raise StartRefused for a location that is a lake."""
        self.store = store
        if store.head(Layout.lake) is not None:
            raise StartRefused(f"{store.connection.uri} is a lake: keep backups elsewhere")

    # Backups

    def new(self) -> str:
        """Return the id of a new backup. Ids sort by time."""
        return stamp(now())

    def finished(self) -> list[str]:
        """Return the ids of all finished backups, oldest first."""
        return [backup for backup in self.store.folders(BACKUPS) if self.store.head(f"{BACKUPS}/{backup}/backup.json")]

    def read(self, backup: str) -> BackupManifest:
        """Return a backup's manifest. Raises DamagedBackup."""
        path = f"{BACKUPS}/{backup}/backup.json"
        try:
            return BackupManifest.model_validate_json(self.store.get(path))
        except ObjectMissing:
            known = self.finished()
            existing = f"; there are {', '.join(known)}" if known else "; there is none"
            raise DamagedBackup(f"{self.store.connection.uri} has no backup {backup!r}{existing}") from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"])) or "document"
            raise DamagedBackup(f"{path} is not a valid backup manifest: {field}: {first['msg']}") from None

    def finish(self, manifest: BackupManifest) -> None:
        """Finish a backup by writing its manifest: without it the backup does not exist."""
        text = orjson.dumps(manifest.model_dump(mode="json"), option=orjson.OPT_INDENT_2)
        self.store.put_new(f"{BACKUPS}/{manifest.id}/backup.json", text)

    def remove(self, backup: str) -> None:
        """Remove a backup, its manifest first. The shared objects stay until `sweep`."""
        self.store.delete([f"{BACKUPS}/{backup}/backup.json"])
        self.store.delete([entry.path for entry in self.store.list(f"{BACKUPS}/{backup}")])

    # Tables and indexes, as compressed lines

    def put_table(self, backup: str, table: str, lines: Iterable[bytes]) -> DumpedTable:
        """Write the lines of a table; the first one is a header and not counted as a row."""
        return self._put(f"{BACKUPS}/{backup}/tables/{table}.ndjson.zst", table, lines, -1)

    def put_index(self, backup: str, held: Iterable[BackupObject]) -> DumpedTable:
        lines = (orjson.dumps(each._asdict()) + b"\n" for each in held)
        return self._put(f"{BACKUPS}/{backup}/objects.ndjson.zst", "objects", lines, 0)

    def table(self, backup: str, table: DumpedTable) -> Iterator[bytes]:
        """Yield the lines of a table and check them against the manifest's digest. Raises DamagedBackup."""
        return self._lines(f"{BACKUPS}/{backup}/tables/{table.table}.ndjson.zst", table)

    def index(self, manifest: BackupManifest) -> Iterator[BackupObject]:
        """Yield the objects that a backup needs, ordered by path within each dataset. Raises DamagedBackup."""
        for line in self._lines(f"{BACKUPS}/{manifest.id}/objects.ndjson.zst", manifest.index):
            yield BackupObject(**orjson.loads(line))

    def _put(self, path: str, table: str, lines: Iterable[bytes], rows: int) -> DumpedTable:
        digest, counted = hashlib.sha256(), rows

        def compressed() -> Iterator[bytes]:
            nonlocal counted
            packing = zstandard.ZstdCompressor(level=LEVEL).compressobj()
            for block, count in _blocks(lines):
                counted += count
                if packed := packing.compress(block):
                    digest.update(packed)
                    yield packed
            packed = packing.flush()
            digest.update(packed)
            yield packed

        size = self.store.put_stream(path, compressed())
        return DumpedTable(table=table, rows=counted, size=size, sha256=digest.hexdigest())

    def _lines(self, path: str, expected: DumpedTable) -> Iterator[bytes]:
        digest, left = hashlib.sha256(), b""
        unpacking = zstandard.ZstdDecompressor().decompressobj()
        try:
            for chunk in self.store.stream(path):
                digest.update(chunk)
                *complete, left = (left + unpacking.decompress(chunk)).split(b"\n")
                yield from complete
        except ObjectMissing:
            raise DamagedBackup(f"the backup lacks {path}") from None
        except zstandard.ZstdError:
            raise DamagedBackup(f"{path} cannot be unpacked: it is damaged") from None
        if digest.hexdigest() != expected.sha256:
            raise DamagedBackup(f"{path} is not what was written: its SHA-256 is {digest.hexdigest()}")

    # Objects

    def known(self, folder: str) -> dict[str, int]:
        """Return the backed-up objects of a folder of the lake, or the states of one object, with their sizes."""
        return {entry.path: entry.size for entry in self.store.list(f"{OBJECTS}/{folder}".rstrip("/"))}

    def sweep(self, needed: Callable[[], Iterable[BackupObject]]) -> int:
        """Delete the objects that no backup needs and the unfinished backups; return the number of deleted objects."""
        kept = {held.object for held in needed()}
        unneeded = (entry.path for entry in self.store.list(OBJECTS) if entry.path not in kept)
        deleted, batch = 0, []
        for path in unneeded:
            batch.append(path)
            if len(batch) == DELETED_AT_ONCE:
                self.store.delete(batch)
                deleted, batch = deleted + len(batch), []
        self.store.delete(batch)
        finished = set(self.finished())
        for backup in self.store.folders(BACKUPS):
            if backup not in finished:
                self.remove(backup)
        return deleted + len(batch)


def _blocks(lines: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    batch: list[bytes] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += len(line)
        if size >= BLOCK:
            yield b"".join(batch), len(batch)
            batch, size = [], 0
    if batch:
        yield b"".join(batch), len(batch)
