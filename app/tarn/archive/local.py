"""Files on the server's own disk, below the folders that the operator opened and nowhere else.

A path is walked folder by folder, each opened from the one before without following links; a link is read and walked
in the same way, and may not lead above the root. So nobody can slip a link in between a check and the opening.
"""

import os
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from tarn.archive.sources import ListedFile, ListingFailure, PathFilter, Source, refused
from tarn.errors import FileNotFound, SourceFailed, TarnError

CHUNK = 1 << 20
LINKS = 40
"""Links that are followed on the way to one file, as Linux has it."""
DEPTH = 100
"""Folders within folders that a listing goes into; each holds a descriptor open."""

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Without waiting: if it turns out to be a pipe, its other end may never come."""


@dataclass(frozen=True)
class Roots:
    """The folders that are open to fetching."""

    folders: tuple[Path, ...]
    limit: int

    def open(self, path: str) -> Source:
        """Raises SchemaViolation, FileNotFound, SourceFailed, BodyTooLarge."""
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

    def files(self, path: str, choice: PathFilter) -> Iterator[ListedFile | ListingFailure]:
        """What lies below a folder, in the order of the paths' characters; links out of the root are failures.

        Raises SchemaViolation, FileNotFound or SourceFailed if the folder cannot be listed.
        """
        root, parts = self.place(path)
        with _translated():
            descriptor = _descend(root, parts)
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise refused("it is no folder")
        return _Listing(root, parts, path.rstrip("/"), choice).walk(descriptor, "")

    def place(self, path: str) -> tuple[Path, tuple[str, ...]]:
        """The root that a path is below, and the way from there. Raises SchemaViolation."""
        if "\x00" in path:
            raise refused("the path has a NUL in it")
        if ".." in path.split("/"):
            raise refused("the path has .. in it")
        wanted = PurePosixPath(path)
        for root in sorted(self.folders, key=lambda folder: len(folder.parts), reverse=True):
            if wanted.is_relative_to(root):
                return root, wanted.relative_to(root).parts
        raise refused("files of the server are fetched only from below the folders that its operator opened")


def file_uri(path: str) -> str:
    return f"file://{quote(path)}"


def _descend(root: Path, parts: tuple[str, ...]) -> int:
    """A descriptor of the regular file or folder at the end of the way. Raises OSError or SchemaViolation."""
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
            elif not stat.S_ISREG(mode):  # opening a device may do something
                raise refused("it is no regular file")
            else:
                opened.append(_regular(part, opened[-1]))
        return opened.pop()
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _below(root: Path, target: PurePosixPath) -> PurePosixPath:
    """The way from the root to where an absolute link leads. Raises SchemaViolation if that is elsewhere."""
    for form in (root, root.resolve()):
        if target.is_relative_to(form):
            return target.relative_to(form)
    raise refused("a link leads out of the folders that the operator opened")


def _regular(name: str, folder: int) -> int:
    """A descriptor of a file that was a regular one a moment ago. Raises OSError, or SchemaViolation if it is not."""
    descriptor = os.open(name, FILE, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused("it is no regular file")
    return descriptor


def _chunks(descriptor: int, before: os.stat_result) -> Iterator[bytes]:
    """The file as it was when it was opened. Raises SourceFailed if it is another at the end."""
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
    choice: PathFilter

    def walk(self, descriptor: int, below: str) -> Iterator[ListedFile | ListingFailure]:
        """Everything in an open folder, which is closed at the end."""
        try:
            with os.scandir(descriptor) as entries:
                there = sorted(entries, key=lambda entry: f"{entry.name}/" if _is_folder(entry) else entry.name)
            for entry in there:
                yield from self._entry(descriptor, f"{below}{entry.name}", entry)
        finally:
            os.close(descriptor)

    def _entry(self, folder: int, path: str, entry: "os.DirEntry[str]") -> Iterator[ListedFile | ListingFailure]:
        if not _is_folder(entry):
            if self.choice.takes(path):
                yield self._file(path, entry)
        elif self.choice.reaches(f"{path}/"):
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
    """What the disk raises as FileNotFound, SchemaViolation or SourceFailed."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFound("there is no such file") from None
    except PermissionError:
        raise refused("the server may not read it") from None
    except OSError as error:
        raise SourceFailed(f"it cannot be read: {error.strerror}") from error
