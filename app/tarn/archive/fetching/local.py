"""Fetching from the server's own disk, only below the folders that the operator allowed.

A path is opened folder by folder, each relative to the one before and without following links; a link is read and
walked in the same way, and may not lead above the root. So no link can be swapped in between a check and the opening.
"""

import os
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from tarn.archive.fetching.sources import ListedFile, ListingFailure, PathFilter, Source, refused
from tarn.errors import FileNotFound, SourceFailed, TarnError

CHUNK = 1 << 20
LINKS = 40
"""Most links that are followed for one path, as in Linux."""
DEPTH = 100
"""Most nested folders of a listing; each keeps a descriptor open."""

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Non-blocking: if the file turns out to be a pipe, opening it could wait for its other end forever."""


@dataclass(frozen=True)
class Roots:
    """The folders that may be fetched from."""

    folders: tuple[Path, ...]
    limit: int

    def open(self, path: str) -> Source:
        """Open a file. Raises SchemaViolation, FileNotFound, SourceFailed, BodyTooLarge."""
        root, parts = self.place(path)
        with _translated():
            descriptor = _descend(root, parts)
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            os.close(descriptor)
            raise refused("it is a folder")
        file = os.fdopen(descriptor, "rb", buffering=0)
        return Source(
            file_uri(path), _chunks(descriptor, about), self.limit, name=parts[-1], size=about.st_size, close=file.close
        )

    def files(self, path: str, path_filter: PathFilter) -> Iterator[ListedFile | ListingFailure]:
        """Yield the files below a folder, ordered by path; links out of the root are failures.

        Raises SchemaViolation, FileNotFound or SourceFailed if the folder cannot be listed.
        """
        root, parts = self.place(path)
        with _translated():
            descriptor = _descend(root, parts)
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise refused("it is no folder")
        return _Listing(root, parts, path.rstrip("/"), path_filter).walk(descriptor, "")

    def place(self, path: str) -> tuple[Path, tuple[str, ...]]:
        """Return the root that a path is below, and the path's parts relative to it. Raises SchemaViolation."""
        if "\x00" in path:
            raise refused("the path has a NUL in it")
        if ".." in path.split("/"):
            raise refused("the path has .. in it")
        requested = PurePosixPath(path)
        for root in sorted(self.folders, key=lambda folder: len(folder.parts), reverse=True):
            if requested.is_relative_to(root):
                return root, requested.relative_to(root).parts
        raise refused("files of the server are fetched only from below the folders that its operator opened")


def file_uri(path: str) -> str:
    return f"file://{quote(path)}"


def _descend(root: Path, parts: tuple[str, ...]) -> int:
    """Return a descriptor of the regular file or folder at a path below the root. Raises OSError or SchemaViolation."""
    opened = [os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    ahead = deque(parts)
    links = 0
    try:
        while ahead:
            part = ahead.popleft()
            if part == "..":
                if len(opened) == 1:
                    raise refused("a link leads out of the folders that the operator opened")
                os.close(opened.pop())
                continue
            mode = os.stat(part, dir_fd=opened[-1], follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                links += 1
                if links > LINKS:
                    raise refused("it is behind too many links")
                target = PurePosixPath(os.readlink(part, dir_fd=opened[-1]))
                if target.is_absolute():
                    while len(opened) > 1:
                        os.close(opened.pop())
                    target = _below(root, target)
                ahead.extendleft(reversed(target.parts))
            elif stat.S_ISDIR(mode):
                opened.append(os.open(part, FOLDER, dir_fd=opened[-1]))
            elif ahead:
                raise NotADirectoryError
            elif not stat.S_ISREG(mode):  # opening a device may have side effects
                raise refused("it is no regular file")
            else:
                opened.append(_regular(part, opened[-1]))
        return opened.pop()
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _below(root: Path, target: PurePosixPath) -> PurePosixPath:
    """Return the target of an absolute link relative to the root. Raises SchemaViolation if it is outside."""
    for form in (root, root.resolve()):
        if target.is_relative_to(form):
            return target.relative_to(form)
    raise refused("a link leads out of the folders that the operator opened")


def _regular(name: str, folder: int) -> int:
    """Return a descriptor of a file that was just seen to be regular. Raises OSError, SchemaViolation if it is not."""
    descriptor = os.open(name, FILE, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused("it is no regular file")
    return descriptor


def _chunks(descriptor: int, before: os.stat_result) -> Iterator[bytes]:
    """Yield the bytes of a file. Raises SourceFailed if it changed since it was opened."""
    with _translated():
        while chunk := os.read(descriptor, CHUNK):
            yield chunk
        after = os.fstat(descriptor)
    if (before.st_size, before.st_mtime_ns, before.st_ctime_ns) != (
        after.st_size,
        after.st_mtime_ns,
        after.st_ctime_ns,
    ):
        raise SourceFailed("the file changed while it was read")


@dataclass(frozen=True)
class _Listing:
    root: Path
    parts: tuple[str, ...]
    top: str
    path_filter: PathFilter

    def walk(self, descriptor: int, below: str) -> Iterator[ListedFile | ListingFailure]:
        """Yield everything in an open folder, and close it at the end."""
        try:
            with os.scandir(descriptor) as entries:
                ordered = sorted(entries, key=lambda entry: f"{entry.name}/" if _is_folder(entry) else entry.name)
            for entry in ordered:
                yield from self._entry(descriptor, f"{below}{entry.name}", entry)
        finally:
            os.close(descriptor)

    def _entry(self, folder: int, path: str, entry: "os.DirEntry[str]") -> Iterator[ListedFile | ListingFailure]:
        if not _is_folder(entry):
            if self.path_filter.takes(path):
                yield self._file(path, entry)
        elif self.path_filter.reaches(f"{path}/"):
            try:
                if path.count("/") >= DEPTH:
                    raise refused(f"it is more than {DEPTH} folders deep")
                with _translated():
                    inner = os.open(entry.name, FOLDER, dir_fd=folder)
            except TarnError as error:
                yield ListingFailure(_printable(path), error)
            else:
                yield from self.walk(inner, f"{path}/")

    def _file(self, path: str, entry: "os.DirEntry[str]") -> ListedFile | ListingFailure:
        try:
            path.encode()
            with _translated():
                size = self._linked(path) if entry.is_symlink() else _size(entry.stat(follow_symlinks=False))
        except UnicodeEncodeError:
            return ListingFailure(_printable(path), refused("its name is not UTF-8"))
        except TarnError as error:
            return ListingFailure(path, error)
        return ListedFile(file_uri(f"{self.top}/{path}"), path, size)

    def _linked(self, path: str) -> int:
        descriptor = _descend(self.root, (*self.parts, *path.split("/")))
        try:
            return _size(os.fstat(descriptor))
        finally:
            os.close(descriptor)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    return entry.is_dir(follow_symlinks=False)


def _size(about: os.stat_result) -> int:
    if stat.S_ISDIR(about.st_mode):
        raise refused("it is a link to a folder, which a listing does not follow")
    if not stat.S_ISREG(about.st_mode):
        raise refused("it is no regular file")
    return about.st_size


def _printable(path: str) -> str:
    return path.encode(errors="surrogateescape").decode(errors="replace")


@contextmanager
def _translated() -> Iterator[None]:
    """Translate OSError to FileNotFound, SchemaViolation or SourceFailed."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFound("there is no such file") from None
    except PermissionError:
        raise refused("the server may not read it") from None
    except OSError as error:
        raise SourceFailed(f"the file cannot be read: {error.strerror}") from error
