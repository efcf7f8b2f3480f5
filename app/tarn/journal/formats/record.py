"""What a parser takes and what it yields."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from tarn.errors import Fault, InvalidFormat

BLOCK = 1 << 20
"""Bytes asked for at once."""

BOM = b"\xef\xbb\xbf"

Record = tuple[int, bytes]
"""A line or element number from 1, and the bytes of one JSON document, not parsed."""

Row = tuple[int, dict[str, Any]]
"""A line, element or row number from 1, and a statement as a dict of FtM's statement fields."""


class ByteSource(Protocol):
    """A body. `read` may give fewer bytes than asked, and gives none only at the end."""

    def read(self, size: int, /) -> bytes: ...


class BadRecord(Exception):
    """One record cannot be read; the ones after it can. It is yielded, so that the caller says what becomes of it."""

    def __init__(self, line: int, reason: str, field: str | None = None) -> None:
        super().__init__(line, reason, field)
        self.line = line
        self.reason = reason
        self.field = field


class IgnoredColumns(NamedTuple):
    """Columns of a table that no statement has. It is yielded once, before the table's rows, which do not hold them."""

    names: tuple[str, ...]


def too_long(line: int, longest: int) -> BadRecord:
    return BadRecord(line, f"longer than {longest} bytes")


def invalid_format(reason: str, line: int | None = None) -> InvalidFormat:
    """The stream itself cannot be read on from here."""
    where = "" if line is None else f" at {line}"
    return InvalidFormat(f"the body cannot be read{where}: {reason}", errors=[Fault(line=line, reason=reason)])


def require_memory(error: ValueError) -> None:
    """Raise MemoryError if that is what orjson has to say: it has no other way to say it."""
    if str(error).startswith("Not enough memory"):
        raise MemoryError from None


def text_blocks(source: ByteSource) -> Iterator[bytes]:
    """The body of a text format as it arrives, without the byte order mark it may begin with."""
    head = b""
    while len(head) < len(BOM) and BOM.startswith(head) and (block := source.read(BLOCK)):
        head += block
    head = head.removeprefix(BOM)
    if head:
        yield head
    while block := source.read(BLOCK):
        yield block
