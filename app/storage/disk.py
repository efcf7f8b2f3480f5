"""What a local disk needs beyond obstore: writes that survive a power cut, and no empty folders left behind."""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Disk:
    """The folder that is the lake's root."""

    root: Path

    def make(self) -> None:
        """Make the root, and put it on the disk with every folder that had to be made above it. Raises OSError."""
        absent = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        self.root.mkdir(parents=True, exist_ok=True)
        for folder in absent:
            _fsync(folder.parent)

    def sync(self, paths: Iterable[str]) -> None:
        """Put files and every folder above them on the disk, up to the root.

        All folders, not only those that look new: another process may have made one a moment ago and not synced it
        yet. A file that is gone by now needs no sync. Raises OSError.
        """
        folders: set[PurePosixPath] = set()
        for path in paths:
            with suppress(FileNotFoundError):
                _fsync(self.root / path)
            folders.update(PurePosixPath(path).parents)
        for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
            with suppress(FileNotFoundError):
                _fsync(self.root / folder)

    def prune(self, paths: Iterable[str]) -> None:
        """Remove the folders above these paths that are empty, never the root.

        `rmdir` refuses a folder that somebody writes to at this moment, and obstore makes a folder again that went
        away under it, so no write is lost to this.
        """
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


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
