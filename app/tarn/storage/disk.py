"""What a local disk needs beyond obstore: writes that survive a power cut, and no empty folders left behind."""

import os
import re
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path, PurePosixPath

AT_ONCE = 8
"""Syncs that are under way at once in a process."""

SYNCS = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="sync")

UNFINISHED = re.compile(r"#\d+$")


class Disk:
    """The folder that is the lake's root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._writers = 0

    def make(self) -> None:
        """Make the root, and put it on the disk with every folder that had to be made above it. Raises OSError."""
        absent = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        self.root.mkdir(parents=True, exist_ok=True)
        for folder in absent:
            _fsync(folder.parent)

    def chunks(self, path: str, start: int, end: int | None, size: int) -> Iterator[bytes]:
        """A file's bytes from `start` up to `end`. obstore reads it in pieces of 8 KB, which takes ten times as long.

        An open file stays what it is when another takes its place. Raises OSError.
        """
        with (self.root / path).open("rb", buffering=0) as file:
            file.seek(start)
            while chunk := file.read(size if end is None else min(size, end - file.tell())):
                yield chunk

    def sync(self, paths: Iterable[str], above: bool = True) -> None:
        """Put files and every folder above them on the disk, up to the root; or only the folders that they are in.

        All folders, not only those that look new: another process may have made one a moment ago and not synced it
        yet. A file that is gone by now needs no sync. Raises OSError.
        """
        files = list(paths)
        folders = {folder for path in files for folder in (_above(path) if above else _above(path)[:1])}
        # What a folder names is there before the folder is. Together they wait for the same few writes of the disk's
        # own log; one after the other, each waits for its own.
        for places in (files, [*folders]):
            if len(places) == 1:
                self._sync(places[0])
            else:
                list(SYNCS.map(self._sync, places))

    def _sync(self, place: str) -> None:
        with suppress(FileNotFoundError):
            _fsync(f"{self.root}/{place}")

    def prune(self, paths: Iterable[str]) -> None:
        """Remove the folders above these paths that are empty, never the root.

        A write makes its folders first and its file after, and fails if one goes away in between. So nothing is removed
        while this process writes: an empty folder that stays harms nobody.
        """
        with self._lock:
            if not self._writers:
                self._remove_empty(paths)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep folders from being removed for as long as something is being written."""
        with self._lock:
            self._writers += 1
        try:
            yield
        finally:
            with self._lock:
                self._writers -= 1

    def remove_unfinished(self, folder: str, before: datetime) -> None:
        """Remove the files in which obstore gathers what is written, below a folder, that nobody has written to since.

        Their names end in # and a number, and no listing shows them. Raises OSError.
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
    """The folders that a path is in, from the innermost to the root."""
    names = path.split("/")[:-1]
    return ["/".join(names[:depth]) for depth in range(len(names), -1, -1)]


def _fsync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
