"""Delimited files (CSV): detect encoding and delimiter, and cut a file into pieces of complete records.

Python's csv module defines what a record is, as it does for followthemoney. A quote opens only at the beginning of a
field, so a piece of a file cannot be parsed without what precedes it: the bytes are scanned once, in order. Where there
is no quote, a line is a record, and nothing is parsed.
"""

import codecs
import csv
import io
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tarn.errors import BodyTooLarge, FieldError, InvalidFormat

# One limit for the whole process, which followthemoney lowers when it is imported: ours is `longest`, below.
csv.field_size_limit(sys.maxsize)

DELIMITERS = (",", ";", "\t", "|")
"""Delimiters that are detected if none is given."""

GZIP = b"\x1f\x8b"
MARK = codecs.BOM_UTF8
MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
         codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # fmt: skip
"""Encodings by byte order mark. A mark that begins with another one comes first."""

STEP = 1 << 20
"""Bytes that are decompressed in one step."""

MOST_COLUMNS = 16_384
"""Columns of a file at most, as in a spreadsheet."""

MOST_UNCLOSED = 100
"""Quotes of a file that may be unclosed within the longest record: for each, that much is parsed again."""

UNREADABLE = "\udcff"
"""Replaces bytes that are invalid in the file's encoding. It cannot occur in valid UTF-8."""


class Dialect(NamedTuple):
    """Encoding and delimiter of a file."""

    encoding: str
    delimiter: str

    def rows(self, text: str) -> Iterator[list[str]]:
        """Yield the records of a text, as FtM reads them. A blank line is a record without fields."""
        return self._reader(io.StringIO(text, newline=None))

    def decoded(self, data: bytes) -> tuple[str, bool]:
        """Return the text of a piece, and whether all bytes are valid; each invalid byte becomes a surrogate."""
        try:
            return data.decode(self.encoding), True
        except UnicodeDecodeError:
            return data.decode(self.encoding, "surrogateescape"), False

    def complete_bytes(self, data: bytes) -> int:
        """Return the number of bytes of complete records at the beginning."""
        end = data.rfind(b"\n") + 1
        if b'"' not in data:
            return end
        position = complete = 0
        over = False

        def lines() -> Iterator[str]:
            nonlocal position, over
            for line in data[:end].splitlines(keepends=True):
                position += len(line)
                yield line.decode(self.encoding, "replace")
            over = True

        for _ in self._reader(lines()):
            if over:
                break  # the record continues after the end
            complete = position
        return complete

    def first(self, data: bytes) -> tuple[list[str], int]:
        """Return the first record, and its number of bytes."""
        position = 0

        def lines() -> Iterator[str]:
            nonlocal position
            for line in data.splitlines(keepends=True):
                position += len(line)
                yield line.decode(self.encoding, "replace")

        return next(self._reader(lines()), []), position

    def _reader(self, lines: Iterable[str]) -> Iterator[list[str]]:
        return csv.reader(lines, delimiter=self.delimiter, skipinitialspace=True)


class FilePiece(NamedTuple):
    """Consecutive bytes of complete records, or a line that is skipped because it is not a record."""

    start: int
    data: bytes
    is_skipped: bool = False


def pieces(blocks: Iterable[bytes], dialect: Dialect, target: int, longest: int, start: int = 0) -> Iterator[FilePiece]:
    """Split the file, from the byte `start` on, into pieces of about `target` bytes.

    A record longer than `longest` is invalid: its line has no end, or a quote is not closed. Its first line is skipped,
    and the next line begins a record. Raises InvalidFormat if that happens too often.
    """
    buffer = bytearray()
    complete = 0
    is_skipped = False
    unclosed = 0
    parsed = 0
    """Bytes of an incomplete record that have been parsed: it is parsed again when there are twice as many."""
    for block in blocks:
        if is_skipped:  # up to the end of the line
            end = block.find(b"\n") + 1
            start += end or len(block)
            is_skipped, block = not end, block[end or len(block) :]
        buffer += block
        if len(buffer) - complete >= 2 * parsed or len(buffer) - complete > longest:
            complete += dialect.complete_bytes(bytes(buffer[complete:]))
            parsed = len(buffer) - complete
        while len(buffer) - complete > longest:
            if complete:
                yield FilePiece(start, bytes(buffer[:complete]))
            yield FilePiece(start + complete, b"", is_skipped=True)
            end = buffer.find(b"\n", complete) + 1
            unclosed += end > 0
            if unclosed > MOST_UNCLOSED:
                reason = f"more than {MOST_UNCLOSED} quotes are not closed within {longest} bytes"
                at = f"the last is in the line at byte {start + complete}"
                raise InvalidFormat(
                    f"the file cannot be read: {reason}; {at}", errors=[FieldError(reason=f"{reason}; {at}")]
                )
            is_skipped = not end
            start += end or len(buffer)
            del buffer[: end or len(buffer)]
            complete = dialect.complete_bytes(bytes(buffer))
            parsed = len(buffer) - complete
        if complete >= target:
            yield FilePiece(start, bytes(buffer[:complete]))
            del buffer[:complete]
            start, complete = start + complete, 0
    if buffer:
        yield FilePiece(start, bytes(buffer))


def is_transparent(encoding: str) -> bool:
    """Return whether the encoding contains ASCII, so that bytes can be searched without decoding them."""
    try:
        return all(bytes([code]).decode(encoding) == chr(code) for code in range(128))
    except UnicodeDecodeError:
        return False


def detect_encoding(beginning: bytes) -> str:
    """Return the encoding of a file by its byte order mark; UTF-8 without one."""
    return next((encoding for mark, encoding in MARKS.items() if beginning.startswith(mark)), "utf-8")


def detect_delimiter(beginning: bytes, encoding: str, columns: Sequence[str]) -> str:
    """Return the delimiter with which the header has most of these columns; among equals, the comma."""

    def columns_named(delimiter: str) -> int:
        header, _ = Dialect(encoding, delimiter).first(beginning)
        return len(set(columns).intersection(header))

    return max(DELIMITERS, key=columns_named)


def decompress(blocks: Iterable[bytes], limit: int) -> Iterator[bytes]:
    """Decompress gzip members in bounded steps. Raises InvalidFormat, and BodyTooLarge beyond `limit` bytes."""
    size = 0
    current = None
    for block in blocks:
        buffer = block
        while buffer:
            if current is None:
                current = zlib.decompressobj(wbits=31)
            try:
                piece = current.decompress(buffer, STEP)
            except zlib.error as error:
                raise _broken(str(error)) from None
            size += len(piece)
            if size > limit:
                raise BodyTooLarge(f"the file is larger than {limit} bytes, decompressed", limit=limit)
            if piece:
                yield piece
            buffer = current.unconsumed_tail
            if current.eof:
                # Some writers fill the last block with zeros.
                buffer, current = current.unused_data.lstrip(b"\0"), None
    if current is not None:
        raise _broken("the file is cut off")


def as_utf8(blocks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """Convert text to UTF-8 with newlines as line ends. Invalid bytes become invalid UTF-8."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)("tarn-unreadable"), translate=True)
    for block in blocks:
        yield decoder.decode(block).encode("utf-8", "surrogateescape")
    yield decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")


def _unreadable(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return UNREADABLE, error.end


codecs.register_error("tarn-unreadable", _unreadable)


def _broken(reason: str) -> InvalidFormat:
    return InvalidFormat(f"the file is not valid gzip: {reason}", errors=[FieldError(reason=reason)])
