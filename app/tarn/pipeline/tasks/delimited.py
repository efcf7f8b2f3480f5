"""Delimited files: how one is written, and where it can be cut so that every piece holds whole records.

Python's csv module says what a record is, as it does for followthemoney. A quote opens only where a field begins, so a
piece of a file tells nothing without what comes before it: the bytes are looked through once, in their order. Where
there is no quote a line is a record, and nothing is parsed.
"""

import codecs
import csv
import io
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tarn.errors import BodyTooLarge, Fault, InvalidFormat

# One limit for the whole process, which followthemoney lowers when it is imported: ours is `longest`, below.
csv.field_size_limit(sys.maxsize)

DELIMITERS = (",", ";", "\t", "|")
"""Those that are looked for where none is named."""

GZIP = b"\x1f\x8b"
MARK = codecs.BOM_UTF8
MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
         codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # fmt: skip
"""Encodings by the marks that files begin with; of those that begin alike, the longer one first."""

STEP = 1 << 20
"""Bytes that are decompressed at once."""

MOST_COLUMNS = 16_384
"""Columns of a file, as of a spreadsheet."""

MOST_UNCLOSED = 100
"""Quotes of a file that are not closed within the longest record: to find the end of each, as much is parsed again."""

UNREADABLE = "\udcff"
"""Stands for what is not of the file's encoding, in a text that is to be written as UTF-8: no UTF-8 has it."""


class Dialect(NamedTuple):
    """How a file is written."""

    encoding: str
    delimiter: str

    def rows(self, text: str) -> Iterator[list[str]]:
        """The records of a text, as FtM reads them; a blank line is one without fields."""
        return self._reader(io.StringIO(text, newline=None))

    def decoded(self, data: bytes) -> tuple[str, bool]:
        """The text of a piece, and whether all of it is of the encoding: each byte that is not is a surrogate."""
        try:
            return data.decode(self.encoding), True
        except UnicodeDecodeError:
            return data.decode(self.encoding, "surrogateescape"), False

    def whole(self, data: bytes) -> int:
        """How many bytes of whole records there are at the beginning."""
        end = data.rfind(b"\n") + 1
        if b'"' not in data:
            return end
        read = whole = 0
        over = False

        def lines() -> Iterator[str]:
            nonlocal read, over
            for line in data[:end].splitlines(keepends=True):
                read += len(line)
                yield line.decode(self.encoding, "replace")
            over = True

        for _ in self._reader(lines()):
            if over:
                break  # it asked for more than there is
            whole = read
        return whole

    def first(self, data: bytes) -> tuple[list[str], int]:
        """The first record, and how many bytes it takes."""
        read = 0

        def lines() -> Iterator[str]:
            nonlocal read
            for line in data.splitlines(keepends=True):
                read += len(line)
                yield line.decode(self.encoding, "replace")

        return next(self._reader(lines()), []), read

    def _reader(self, lines: Iterable[str]) -> Iterator[list[str]]:
        return csv.reader(lines, delimiter=self.delimiter, skipinitialspace=True)


class FilePiece(NamedTuple):
    """Consecutive bytes of whole records; or a line that is no record, and is left out."""

    start: int
    data: bytes
    is_left_out: bool = False


def pieces(blocks: Iterable[bytes], form: Dialect, target: int, longest: int, start: int = 0) -> Iterator[FilePiece]:
    """The file, from the byte `start` on, in pieces of about `target` bytes.

    A record longer than `longest` is none: a line that has no end, or a quote that is not closed. The line that it
    begins with is left out, and the next one begins a record again. Raises InvalidFormat if that happens too often.
    """
    rest = bytearray()
    whole = 0
    is_left_out = False
    unclosed = 0
    parsed = 0
    """How much of a record whose end was not found has been parsed: it is parsed again when there is twice as much."""
    for block in blocks:
        if is_left_out:  # until its end
            end = block.find(b"\n") + 1
            start += end or len(block)
            is_left_out, block = not end, block[end or len(block) :]
        rest += block
        if len(rest) - whole >= 2 * parsed or len(rest) - whole > longest:
            whole += form.whole(bytes(rest[whole:]))
            parsed = len(rest) - whole
        while len(rest) - whole > longest:
            if whole:
                yield FilePiece(start, bytes(rest[:whole]))
            yield FilePiece(start + whole, b"", is_left_out=True)
            end = rest.find(b"\n", whole) + 1
            unclosed += end > 0
            if unclosed > MOST_UNCLOSED:
                reason = f"more than {MOST_UNCLOSED} quotes are not closed within {longest} bytes"
                at = f"the last is in the line at byte {start + whole}"
                raise InvalidFormat(
                    f"the file cannot be read: {reason}; {at}", errors=[Fault(reason=f"{reason}; {at}")]
                )
            is_left_out = not end
            start += end or len(rest)
            del rest[: end or len(rest)]
            whole = form.whole(bytes(rest))
            parsed = len(rest) - whole
        if whole >= target:
            yield FilePiece(start, bytes(rest[:whole]))
            del rest[:whole]
            start, whole = start + whole, 0
    if rest:
        yield FilePiece(start, bytes(rest))


def is_transparent(encoding: str) -> bool:
    """Whether ASCII is written as itself, so that bytes can be looked at without decoding them."""
    try:
        return all(bytes([code]).decode(encoding) == chr(code) for code in range(128))
    except UnicodeDecodeError:
        return False


def detect_encoding(head: bytes) -> str:
    """What a file's beginning says it is; without a mark that is UTF-8."""
    return next((encoding for mark, encoding in MARKS.items() if head.startswith(mark)), "utf-8")


def detect_delimiter(head: bytes, encoding: str, columns: Sequence[str]) -> str:
    """The delimiter under which the header names most of these columns; a comma unless another one names more."""

    def named(delimiter: str) -> int:
        header, _ = Dialect(encoding, delimiter).first(head)
        return len(set(columns).intersection(header))

    return max(DELIMITERS, key=named)


def unzipped(blocks: Iterable[bytes], most: int) -> Iterator[bytes]:
    """What gzip members hold, in bounded steps. Raises InvalidFormat, and BodyTooLarge past so many bytes."""
    size = 0
    current = None
    for block in blocks:
        rest = block
        while rest:
            if current is None:
                current = zlib.decompressobj(wbits=31)
            try:
                piece = current.decompress(rest, STEP)
            except zlib.error as error:
                raise _broken(str(error)) from None
            size += len(piece)
            if size > most:
                raise BodyTooLarge(f"the file is larger than {most} bytes, decompressed", limit=most)
            if piece:
                yield piece
            rest = current.unconsumed_tail
            if current.eof:
                # Some writers fill the last block with zeros.
                rest, current = current.unused_data.lstrip(b"\0"), None
    if current is not None:
        raise _broken("the file is cut off")


def as_utf8(blocks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """The same text in UTF-8, every line of it ended by a newline alone. What cannot be decoded is no UTF-8."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)("tarn-unreadable"), translate=True)
    for block in blocks:
        yield decoder.decode(block).encode("utf-8", "surrogateescape")
    yield decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")


def _unreadable(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return UNREADABLE, error.end


codecs.register_error("tarn-unreadable", _unreadable)


def _broken(reason: str) -> InvalidFormat:
    return InvalidFormat(f"the file is not valid gzip: {reason}", errors=[Fault(reason=reason)])
