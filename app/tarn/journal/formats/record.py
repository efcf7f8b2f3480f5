"""Types shared by all parsers: body source, records, rows and errors."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from tarn.errors import FieldError, InvalidFormat

BLOCK = 1 << 20
"""Bytes requested per read."""

BOM = b"\xef\xbb\xbf"

Record = tuple[int, bytes]
"""A line or element number from 1, and the bytes of one JSON document, not parsed."""

Row = tuple[int, dict[str, Any]]
"""A line, element or row number from 1, and a statement as a dict of FtM's statement fields."""


class ByteSource(Protocol):
    """Byte source of a body. `read` may return fewer bytes than requested, and returns none only at the end."""

    def read(self, size: int, /) -> bytes: ...


class BadRecord(Exception):
    """One record is invalid; the ones after it can be read. It is yielded, not raised: the caller decides."""

    def __init__(self, line: int, reason: str, field: str | None = None) -> None:
        super().__init__(line, reason, field)
        self.line = line
        self.reason = reason
        self.field = field


class IgnoredColumns(NamedTuple):
    """Columns of a table that are not fields of a statement. Yielded once, before the rows, which do not have them."""

    names: tuple[str, ...]


def too_long(line: int, longest: int) -> BadRecord:
    return BadRecord(line, f"longer than {longest} bytes")


def invalid_format(reason: str, line: int | None = None) -> InvalidFormat:
    """Return the InvalidFormat error for a body that cannot be read further."""
    where = "" if line is None else f" at {line}"
    return InvalidFormat(f"the body cannot be read{where}: {reason}", errors=[FieldError(line=line, reason=reason)])


def require_memory(error: ValueError) -> None:
    """Raise MemoryError if that is the cause of an orjson error: orjson reports it as a JSONDecodeError."""
    if str(error).startswith("Not enough memory"):
        raise MemoryError from None


def text_blocks(source: ByteSource) -> Iterator[bytes]:
    """Yield the blocks of a text body as they arrive, without a leading byte order mark."""
    head = b""
    while len(head) < len(BOM) and BOM.startswith(head) and (block := source.read(BLOCK)):
        head += block
    head = head.removeprefix(BOM)
    if head:
        yield head
    while block := source.read(BLOCK):
        yield block
