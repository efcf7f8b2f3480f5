"""Local disk support beyond obstore: fsync after writes, removal of empty folders and of unfinished files."""

import os
import re
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path, PurePosixPath

AT_ONCE = 8
"""Maximum number of concurrent fsyncs of a process."""

SYNCS = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="sync")

UNFINISHED = re.compile(r"#\d+$")


class Disk:
    """The folder that is the lake's root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._writers = 0

    def make(self) -> None:
        """Create the root and missing parent folders, and fsync them. Raises OSError."""
        absent = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        self.root.mkdir(parents=True, exist_ok=True)
        for folder in absent:
            _fsync(folder.parent)

    def chunks(self, path: str, start: int, end: int | None, size: int) -> Iterator[bytes]:
        """Yield a file's bytes from `start` up to `end`. obstore reads 8 KB at a time, which takes ten times as long.

        An open file keeps its content when it is replaced. Raises OSError.
        """
        with (self.root / path).open("rb", buffering=0) as file:
            file.seek(start)
            while chunk := file.read(size if end is None else min(size, end - file.tell())):
                yield chunk

    def sync(self, paths: Iterable[str], above: bool = True) -> None:
        """Fsync files and every folder above them up to the root; without `above`, only their parent folders.

        All folders, not only new ones: another process may just have created one and not synced it yet. A file that
        was deleted meanwhile needs no sync. Raises OSError.
        """
        files = list(paths)
        folders = {folder for path in files for folder in (_above(path) if above else _above(path)[:1])}
        # Files before the folders that name them. Concurrent fsyncs share a few commits of the file system's journal;
        # sequential ones wait for one each.
        for places in (files, [*folders]):
            if len(places) == 1:
                self._sync(places[0])
            else:
                list(SYNCS.map(self._sync, places))

    def _sync(self, place: str) -> None:
        with suppress(FileNotFoundError):
            _fsync(f"{self.root}/{place}")

    def prune(self, paths: Iterable[str]) -> None:
        """Remove empty folders above these paths, never the root.

        A write creates its folders first and its file afterwards, and fails if a folder is removed in between. So
        nothing is removed while this process writes: a remaining empty folder does no harm.
        """
        with self._lock:
            if not self._writers:
                self._remove_empty(paths)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Prevent the removal of folders while something is being written."""
        with self._lock:
            self._writers += 1
        try:
            yield
        finally:
            with self._lock:
                self._writers -= 1

    def remove_unfinished(self, folder: str, before: datetime) -> None:
        """Remove obstore's temporary files below a folder that were last written before a point in time.

        Their names end in # and a number, and listings omit them. Raises OSError.
        """
        for place, _, names in os.walk(self.root / folder):
            for name in names:
                path = Path(place) / name
                if UNFINISHED.search(name):
                    with suppress(FileNotFoundError):
                        if path.stat().st_mtime <= before.timestamp():
                            path.unlink()
                            self.prune([str(path.relative_to(self.root))])

    def _remove_empty(self, paths: Iterable[str]) -> None:
        parents = {PurePosixPath(path).parent for path in paths}
        for parent in sorted(parents, key=lambda folder: len(folder.parts), reverse=True):
            for folder in (parent, *parent.parents):
                if not folder.parts:
                    break
                try:
                    (self.root / folder).rmdir()
                except FileNotFoundError:
                    continue
                except OSError:
                    break


def _above(path: str) -> list[str]:
    """Return the folders above a path, from the innermost to the root."""
    names = path.split("/")[:-1]
    return ["/".join(names[:depth]) for depth in range(len(names), -1, -1)]


def _fsync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
