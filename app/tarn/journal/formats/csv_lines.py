"""Streaming CSV reader with a maximum record length.

Python's csv.reader finds the fields. It requests another line in the middle of a record only inside quotes. That is how
`_Lines` knows whether a line begins a record without parsing quotes itself, except in a record that is too long.
"""

import csv
import re
from collections.abc import Iterator

from tarn.journal.formats.record import BadRecord, ByteSource, invalid_format, text_blocks, too_long

_CR = "\udc0d"
"""Placeholder for a carriage return within a line, because csv.reader rejects one outside quotes and FtM's pack writer
does not quote it. Valid UTF-8 never decodes to this character."""

_TO_QUOTE = re.compile(rb'[^"]*+(?:""[^"]*+)*+')

Fields = tuple[int, list[str]]


def csv_records(source: ByteSource, longest: int) -> Iterator[Fields | BadRecord]:
    """Yield the fields of every record that is not blank, with the line number at which it begins.

    A record over `longest` bytes, including line ends, is a BadRecord; reading continues after the line that exceeded
    the limit. Raises InvalidFormat if a quote is open at the end of that line or of the text, and for invalid UTF-8.
    """
    lines = _Lines(source, longest)
    over = True
    while over:
        over = False
        try:
            for fields in csv.reader(lines):
                if fields:
                    yield lines.first, lines.restored(fields)
                lines.begin_record()
        except _Over:
            over = True
            yield too_long(lines.first, longest)
            lines.begin_record()


class _Over(Exception):
    """The record is too long; the next line begins another."""


class _Lines:
    """Iterable of lines for csv.reader. After `_Over`, a new iteration continues with the next line."""

    def __init__(self, source: ByteSource, longest: int) -> None:
        self.first = 1
        self._pieces = _pieces(text_blocks(source), longest)
        self._longest = longest
        self._number = 0
        self._size = 0
        self._marked = False

    def begin_record(self) -> None:
        self.first = self._number + 1
        self._size = 0

    def restored(self, fields: list[str]) -> list[str]:
        if self._marked:
            self._marked = False
            return [field.replace(_CR, "\r") for field in fields]
        return fields

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            self._number += 1
            self._size += len(piece)
            if self._size > self._longest:
                if self._drop(piece, quoted=self._size > len(piece)):
                    raise invalid_format(f"a quote is not closed within {self._longest} bytes", self.first)
                raise _Over
            try:
                line = piece.decode()
            except UnicodeDecodeError as error:
                raise invalid_format(f"not valid UTF-8: {error.reason}", self._number) from None
            yield self._mark(line) if "\r" in line else line
        if self._size:
            raise invalid_format("a quote is not closed", self.first)

    def _mark(self, line: str) -> str:
        """Replace every carriage return that is not part of the line end by the placeholder."""
        end = "\r\n" if line.endswith("\r\n") else "\n" if line.endswith("\n") else ""
        marked = line.removesuffix(end).replace("\r", _CR) + end
        self._marked = self._marked or _CR in marked
        return marked

    def _drop(self, piece: bytes, quoted: bool) -> bool:
        """Skip the rest of a line piece by piece; return whether a quote is open at its end."""
        quotes = _Quotes(quoted)
        quotes.read(piece)
        while not piece.endswith(b"\n") and (piece := next(self._pieces, b"")):
            quotes.read(piece)
        return quotes.unclosed


class _Quotes:
    """Tracks whether a quote is open like csv.reader: a quote opens only at the beginning of a field."""

    def __init__(self, quoted: bool) -> None:
        self._open = quoted
        self._closing = False
        self._before = b","

    @property
    def unclosed(self) -> bool:
        return self._open and not self._closing

    def read(self, piece: bytes) -> None:
        at = 0
        if self._closing:  # the previous piece ended with a quote; a second one makes it an escaped quote
            self._closing = False
            self._open = piece.startswith(b'"')
            at = int(self._open)
        while at < len(piece):
            if self._open:
                match = _TO_QUOTE.match(piece, at)
                assert match
                at = match.end() + 1
                if at == len(piece):
                    self._closing = True
                elif at < len(piece):
                    self._open = False
            else:
                at = piece.find(b'"', at) + 1 or len(piece) + 1
                self._open = at <= len(piece) and (piece[at - 2 : at - 1] if at > 1 else self._before) == b","
        self._before = piece[-1:]


def _pieces(blocks: Iterator[bytes], longest: int) -> Iterator[bytes]:
    """Yield lines with their line ends; a line over `longest` bytes in pieces, of which only the last has the end."""
    cut = bytearray()
    for block in blocks:
        *complete, tail = block.split(b"\n")
        if complete:
            yield bytes(cut + complete[0] + b"\n")
            for line in complete[1:]:
                yield line + b"\n"
            cut = bytearray()
        cut += tail
        if len(cut) > longest:
            yield bytes(cut)
            cut.clear()
    if cut:
        yield bytes(cut)
