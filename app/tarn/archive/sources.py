"""What a fetch gives: the bytes of one file, once, and what is known of it; and what a listing finds."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Self

from tarn.errors import BodyTooLarge, Fault, SchemaViolation, SourceFailed, TarnError

UNNAMED = re.compile(r"[\x00-\x1f\x7f/\\]|^\.{0,2}$")


def refused(reason: str) -> SchemaViolation:
    """The answer for a source that is not fetched from, whatever it holds."""
    return SchemaViolation(f"this cannot be fetched: {reason}", errors=[Fault(field="uri", reason=reason)])


class Source:
    """One file that is being fetched. Read it once, from a `with`.

    Iterating raises BodyTooLarge past the limit and SourceFailed if there is less or more than was announced.
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
        """Raises BodyTooLarge, and closes, for a file that is announced as larger than the limit."""
        self.uri = uri
        """Where it was found in the end, without query or credentials."""
        self.name = name if name and not UNNAMED.search(name) else None
        self.size = size
        """As announced, if it was."""
        self.media_type = media_type
        """As announced, if it was."""
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
            raise SourceFailed(f"the source gave {received} bytes of {self.size}")

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
    """A file that a listing found."""

    uri: str
    """What fetches it."""
    path: str
    """Below the place that was listed."""
    size: int | None


@dataclass(frozen=True)
class ListingFailure:
    """Something that a listing came upon and that cannot be fetched or looked into."""

    path: str
    error: TarnError


@dataclass(frozen=True)
class PathFilter:
    """Which paths of a listing are wanted. In a pattern, `*` stands for any characters, slashes too."""

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
        """Whether something below the folder, which ends with a slash unless it is the top, may be taken."""
        return folder.startswith(self.prefix) or self.prefix.startswith(folder)
