"""Sources of the fetcher: a file being fetched, and the entries of a listing."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Self

from tarn.errors import BodyTooLarge, FieldError, SchemaViolation, SourceFailed, TarnError

UNNAMED = re.compile(r"[\x00-\x1f\x7f/\\]|^\.{0,2}$")


def refused(reason: str) -> SchemaViolation:
    """Return the error for a source that must not be fetched from."""
    return SchemaViolation(f"this cannot be fetched: {reason}", errors=[FieldError(field="uri", reason=reason)])


class Source:
    """A file that is being fetched. Read it once, in a `with` block.

    Iterating raises BodyTooLarge beyond the limit, and SourceFailed if the size differs from the announced one.
    """

    def __init__(
        self,
        uri: str,
        chunks: Iterable[bytes],
        limit: int,
        *,
        name: str | None = None,
        size: int | None = None,
        media_type: str | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Create it. If the announced size is above the limit, close it and raise BodyTooLarge."""
        self.uri = uri
        """The final address after redirects, without query or credentials."""
        self.name = name if name and not UNNAMED.search(name) else None
        self.size = size
        """As announced by the source, if it was."""
        self.media_type = media_type
        """As announced by the source, if it was."""
        self._chunks = chunks
        self._limit = limit
        self.close = close
        if size is not None and size > limit:
            close()
            raise self._too_large()

    def __iter__(self) -> Iterator[bytes]:
        received = 0
        for chunk in self._chunks:
            received += len(chunk)
            if received > self._limit:
                raise self._too_large()
            yield chunk
        if self.size is not None and received != self.size:
            raise SourceFailed(f"the source sent {received} bytes instead of {self.size}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the source has more than {self._limit} bytes", limit=self._limit)


@dataclass(frozen=True)
class ListedFile:
    """A file in a listing."""

    uri: str
    """The address to fetch it from."""
    path: str
    """Path relative to the listed address."""
    size: int | None


@dataclass(frozen=True)
class ListingFailure:
    """An entry of a listing that cannot be fetched or listed."""

    path: str
    error: TarnError


@dataclass(frozen=True)
class PathFilter:
    """Filter for the paths of a listing. In a pattern, `*` matches any characters, slashes too."""

    prefix: str = ""
    glob: tuple[str, ...] = ()
    """One of them must match, if there are any."""
    exclude: tuple[str, ...] = ()
    """None of them may match."""

    def takes(self, path: str) -> bool:
        return (
            path.startswith(self.prefix)
            and (not self.glob or any(fnmatchcase(path, pattern) for pattern in self.glob))
            and not any(fnmatchcase(path, pattern) for pattern in self.exclude)
        )

    def reaches(self, folder: str) -> bool:
        """Return whether a path below the folder, which ends with a slash unless it is the top, may be taken."""
        return folder.startswith(self.prefix) or self.prefix.startswith(folder)
