"""A place of backups: what lakes held, each state of an object once, and which of it each backup needs.

    objects/{path in the lake}/{state}     shared by all backups that found the object in that state
    backups/{id}/tables/{table}.ndjson.zst the dump
    backups/{id}/objects.ndjson.zst        the index: path in the lake, object, size
    backups/{id}/backup.json               put last: a backup without it was never finished

An object's state is named by its entity tag and size, which the lake's store tells without reading it. So what is here
already is known by its name, and is not read again.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import orjson
import zstandard
from pydantic import ValidationError

from tarn.errors import StartRefused
from tarn.model.ids import now, stamp
from tarn.model.recovery import BackupManifest, DumpedTable
from tarn.storage.layout import Layout
from tarn.storage.store import Entry, Missing, Store

OBJECTS, BACKUPS = "objects", "backups"

LEVEL = 3
BLOCK = 1 << 20
"""Bytes of text that are compressed at once."""

DELETED_AT_ONCE = 1000


class DamagedBackup(StartRefused):
    """A backup is not whole: the message says what is missing or not as it was."""


class BackupObject(NamedTuple):
    """An object that a backup needs: where it was, and where it is."""

    path: str
    object: str
    size: int


def object_of(entry: Entry) -> str:
    """Where an object of the lake in the state that it has is kept."""
    state = f"{entry.etag or entry.modified.isoformat()} {entry.size}"
    return f"{OBJECTS}/{entry.path}/{hashlib.sha256(state.encode()).hexdigest()[:16]}"


class BackupStore:
    """The backups at one place."""

    def __init__(self, store: Store) -> None:
        """Raises StartRefused for a place that is a lake."""
        self.store = store
        if store.head(Layout.lake) is not None:
            raise StartRefused(f"{store.connection.uri} is a lake: keep backups elsewhere")

    # Backups

    def new(self) -> str:
        """The id of a backup that begins now. Ids sort by time."""
        return stamp(now())

    def finished(self) -> list[str]:
        """The ids of all backups that are whole, oldest first."""
        return [one for one in self.store.folders(BACKUPS) if self.store.head(f"{BACKUPS}/{one}/backup.json")]

    def read(self, backup: str) -> BackupManifest:
        """What a backup says of itself. Raises Damaged."""
        path = f"{BACKUPS}/{backup}/backup.json"
        try:
            return BackupManifest.model_validate_json(self.store.get(path))
        except Missing:
            known = self.finished()
            there = f"; there are {', '.join(known)}" if known else "; there is none"
            raise DamagedBackup(f"{self.store.connection.uri} has no backup {backup!r}{there}") from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"])) or "document"
            raise DamagedBackup(f"{path} is not as this version of Tarn writes it: {field}: {first['msg']}") from None

    def finish(self, manifest: BackupManifest) -> None:
        """Make a backup one: until here there was none."""
        text = orjson.dumps(manifest.model_dump(mode="json"), option=orjson.OPT_INDENT_2)
        self.store.put_new(f"{BACKUPS}/{manifest.id}/backup.json", text)

    def remove(self, backup: str) -> None:
        """Remove a backup, but for the objects that it needs. First what makes it one."""
        self.store.delete([f"{BACKUPS}/{backup}/backup.json"])
        self.store.delete([entry.path for entry in self.store.list(f"{BACKUPS}/{backup}")])

    # Lists of lines

    def put_table(self, backup: str, table: str, lines: Iterable[bytes]) -> DumpedTable:
        """Write the lines of a table; the first of them is no row."""
        return self._put(f"{BACKUPS}/{backup}/tables/{table}.ndjson.zst", table, lines, -1)

    def put_index(self, backup: str, held: Iterable[BackupObject]) -> DumpedTable:
        lines = (orjson.dumps(one._asdict()) + b"\n" for one in held)
        return self._put(f"{BACKUPS}/{backup}/objects.ndjson.zst", "objects", lines, 0)

    def table(self, backup: str, table: DumpedTable) -> Iterator[bytes]:
        """The lines of a table, checked against what the backup says of it. Raises Damaged, by the end."""
        return self._lines(f"{BACKUPS}/{backup}/tables/{table.table}.ndjson.zst", table)

    def index(self, manifest: BackupManifest) -> Iterator[BackupObject]:
        """What a backup needs, in the order of paths within each dataset. Raises Damaged."""
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
                *whole, left = (left + unpacking.decompress(chunk)).split(b"\n")
                yield from whole
        except Missing:
            raise DamagedBackup(f"the backup lacks {path}") from None
        except zstandard.ZstdError:
            raise DamagedBackup(f"{path} cannot be unpacked: it is damaged") from None
        if digest.hexdigest() != expected.sha256:
            raise DamagedBackup(f"{path} is not what was written: its SHA-256 is {digest.hexdigest()}")

    # Objects

    def known(self, folder: str) -> dict[str, int]:
        """The objects of a folder of the lake, or the states of one object, that are here, with their sizes."""
        return {entry.path: entry.size for entry in self.store.list(f"{OBJECTS}/{folder}".rstrip("/"))}

    def sweep(self, needed: Callable[[], Iterable[BackupObject]]) -> int:
        """Delete the objects that no backup needs, and what was never finished; how many objects that were."""
        kept = {held.object for held in needed()}
        unneeded = (entry.path for entry in self.store.list(OBJECTS) if entry.path not in kept)
        deleted, some = 0, []
        for path in unneeded:
            some.append(path)
            if len(some) == DELETED_AT_ONCE:
                self.store.delete(some)
                deleted, some = deleted + len(some), []
        self.store.delete(some)
        whole = set(self.finished())
        for backup in self.store.folders(BACKUPS):
            if backup not in whole:
                self.remove(backup)
        return deleted + len(some)


def _blocks(lines: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    some: list[bytes] = []
    size = 0
    for line in lines:
        some.append(line)
        size += len(line)
        if size >= BLOCK:
            yield b"".join(some), len(some)
            some, size = [], 0
    if some:
        yield b"".join(some), len(some)
