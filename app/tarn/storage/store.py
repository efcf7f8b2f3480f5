"""Object store: read, write, list and delete whole objects, on any store that obstore supports.

Guarantees on every store:
- writes are atomic; a failed write leaves the previous object;
- once a write has returned, it survives a power cut (on a local disk: file and folders are fsynced);
- of concurrent `put_new` or `copy_new` calls for a path exactly one succeeds.

Raises `ObjectMissing` for an object that does not exist, and of `tarn.errors`: PathExists, StorageFull, Unavailable.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from obstore.exceptions import BaseError

from tarn.errors import PathExists
from tarn.storage.chunk_queue import pump
from tarn.storage.connection import Connection
from tarn.storage.disk import Disk
from tarn.storage.error_mapping import ObjectMissing, translated

if TYPE_CHECKING:
    from obstore import ObjectMeta

__all__ = ["Entry", "ObjectMissing", "Store"]

CHUNK = 4 << 20
PART = 8 << 20
PARTS_AT_ONCE = 4
LARGEST_COPY = 5 << 30
"""S3 copies no more than this in one request."""


@dataclass(frozen=True)
class Entry:
    """An object without its bytes. Equal etags of one path mean equal contents."""

    path: str
    size: int
    modified: datetime
    etag: str | None

    @classmethod
    def of(cls, meta: "ObjectMeta") -> "Entry":
        return cls(meta["path"], meta["size"], meta["last_modified"], meta["e_tag"])


class Store:
    """Objects by path. Safe to share between threads."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._objects = connection.object_store()
        self._disk = Disk(connection.folder) if connection.folder else None

    # Reading

    def get(self, path: str) -> bytes:
        with translated(path, self.connection):
            return bytes(self._objects.get(path).bytes())

    def get_range(self, path: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end`, or up to the end of the object if it is shorter."""
        return b"".join(self.stream(path, start, end))

    def stream(self, path: str, start: int = 0, end: int | None = None, chunk_size: int = CHUNK) -> Iterator[bytes]:
        """Yield the bytes in chunks, all of one state of the object, even if it is replaced meanwhile."""
        if end is not None and end <= start:
            return
        with translated(path, self.connection):
            if self._disk:
                yield from self._disk.chunks(path, start, end, chunk_size)
                return
            if start == 0 and end is None:
                found = self._objects.get(path)
            else:
                try:
                    found = self._objects.get(path, options={"range": (start, end) if end else {"offset": start}})
                except BaseError:
                    # Stores differ in their error for a range that begins past the end.
                    if start >= self._objects.head(path)["size"]:
                        return
                    raise
            for chunk in found.stream(min_chunk_size=chunk_size):
                yield bytes(chunk)

    def open(self, path: str, start: int = 0, end: int | None = None) -> tuple[Entry, Iterator[bytes]]:
        """Return an object and its bytes from `start` up to `end`, both of one state. `start` must lie within it."""
        with translated(path, self.connection):
            whole = start == 0 and end is None
            found = self._objects.get(
                path, options={} if whole else {"range": (start, end) if end is not None else {"offset": start}}
            )
            entry = Entry.of(found.meta)

        def chunks() -> Iterator[bytes]:
            with translated(path, self.connection):
                for chunk in found.stream(min_chunk_size=CHUNK):
                    yield bytes(chunk)

        return entry, chunks()

    def head(self, path: str) -> Entry | None:
        try:
            with translated(path, self.connection):
                return Entry.of(self._objects.head(path))
        except ObjectMissing:
            return None

    def list(self, prefix: str, after: str | None = None) -> Iterator[Entry]:
        """Yield every object below the folder `prefix` ("" is the root), sorted by the characters of the path.

        `after` skips everything up to and including that path. Objects written concurrently may be listed or not.
        """
        with translated(prefix, self.connection):
            if self._disk:
                yield from self._walk(prefix, after)
            else:
                for page in self._objects.list(prefix or None, offset=after, chunk_size=1000):
                    yield from map(Entry.of, page)

    def _walk(self, prefix: str, after: str | None) -> Iterator[Entry]:
        """List a disk in order: sort one folder at a time, so that the tree is never in memory as a whole."""
        found = self._objects.list_with_delimiter(prefix or None)
        places: dict[str, Entry | None] = {f"{folder}/": None for folder in found["common_prefixes"]}
        places |= {meta["path"]: Entry.of(meta) for meta in found["objects"]}
        for place, entry in sorted(places.items()):
            if entry is None:
                if after is None or place > after or after.startswith(place):
                    yield from self._walk(place.rstrip("/"), after)
            elif after is None or place > after:
                yield entry

    def folders(self, prefix: str) -> Sequence[str]:
        """Return the names of the folders directly below `prefix`, sorted."""
        with translated(prefix, self.connection):
            found = self._objects.list_with_delimiter(prefix or None)["common_prefixes"]
        return sorted(folder.rsplit("/", 1)[-1] for folder in found)

    # Writing

    def put(self, path: str, data: bytes) -> None:
        """Put an object; replace an existing one."""
        with self._writing(path):
            self._objects.put(path, data, use_multipart=False)

    def put_hint(self, path: str, data: bytes) -> None:
        """Put an object that may be lost in a power cut: its content is stored durably elsewhere."""
        with self._writing(path, durable=False):
            self._objects.put(path, data, use_multipart=False)

    def put_new(self, path: str, data: bytes) -> None:
        """Put an object only if nothing is there.

        Raises PathExists. On a network that may be the response to this write, retried because the first response was
        lost: a caller for which it matters must read the object.
        """
        with self._writing(path):
            self._objects.put(path, data, mode="create")

    def place(self, path: str, data: bytes) -> None:
        """Put an object only if nothing is there, as `put_new` does; it may be lost until `sync` has returned."""
        with self._writing(path, durable=False):
            self._objects.put(path, data, mode="create")

    def put_stream(self, path: str, chunks: Iterable[bytes], durable: bool = True) -> int:
        """Put an object from chunks, in bounded memory, and return its size. If `chunks` raises, nothing was put.

        An object that is not durable may be lost in a power cut; use that for parts that can be written again.
        """

        def send(received: Iterator[bytes]) -> None:
            with self._writing(path, durable=durable):
                self._objects.put(path, received, use_multipart=True, chunk_size=PART, max_concurrency=PARTS_AT_ONCE)

        return pump(chunks, send)

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the store; replace an existing one."""
        self._copy(source, target, overwrite=True)

    def copy_new(self, source: str, target: str) -> None:
        """Copy an object within the store only if nothing is at `target`. Raises PathExists, as `put_new` does.

        More than 5 GiB on S3 passes through this process, and two such copies at once may both succeed.
        """
        self._copy(source, target, overwrite=False)

    def place_copy(self, source: str, target: str) -> None:
        """Copy an object as `copy_new` does; the copy may be lost until `sync` has returned."""
        self._copy(source, target, overwrite=False, durable=False)

    def _copy(self, source: str, target: str, *, overwrite: bool, durable: bool = True) -> None:
        if self.connection.scheme == "s3":
            found = self.head(source)
            if found and found.size > LARGEST_COPY:
                if not overwrite and self.head(target):
                    raise PathExists(f"{target} exists")
                self.put_stream(target, self.stream(source))
                return
        with self._writing(target, source, durable):
            self._objects.copy(source, target, overwrite=overwrite)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects, and on a disk the folders that this leaves empty. Missing objects are ignored."""
        gone = [*paths]
        if not gone:
            return
        with translated(gone[0], self.connection):
            try:
                self._objects.delete(gone)
            except FileNotFoundError:
                # Some stores stop at the first that is missing.
                for path in gone:
                    with suppress(FileNotFoundError):
                        self._objects.delete(path)
            if self._disk:
                self._disk.prune(gone)

    def sweep_unfinished(self, prefix: str, before: datetime) -> None:
        """Delete the files that interrupted writes left below a folder before a point in time; listings omit them.

        Only on a disk: object stores need a lifecycle rule for incomplete multipart uploads.
        """
        if self._disk:
            with translated(prefix, self.connection):
                self._disk.remove_unfinished(prefix, before)

    def sync(self, paths: Iterable[str], above: bool = True) -> None:
        """Make the objects at these paths durable, whichever process wrote them; only a local disk needs it.

        Without `above`, the folders that they are in must have been synced since they were made.
        """
        if self._disk:
            with translated("", self.connection):
                self._disk.sync(paths, above)

    @contextmanager
    def _writing(self, path: str, source: str | None = None, durable: bool = True) -> Iterator[None]:
        """Translate errors, make the write durable, and remove folders that a failed write left empty."""
        try:
            keeping = self._disk.writing() if self._disk else nullcontext()
            with keeping, translated(source or path, self.connection, target=path):
                yield
                if self._disk and durable:
                    self._disk.sync([path])
        except Exception:
            if self._disk:
                self._disk.prune([path])
            raise
