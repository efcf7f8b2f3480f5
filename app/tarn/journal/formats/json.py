"""Streaming splitter of JSON: yields the elements of one array, or of concatenated objects, without parsing them.

Only the boundaries of elements are searched: brackets are counted outside strings, without recursion, and the content
is validated by the parser of the element. An element of usual depth within one block is a single match of `_WHOLE`; for
any other, `_Text._read_nested` counts brackets across blocks.
"""

import re
from collections.abc import Iterator
from itertools import islice

from tarn.journal.formats.record import BadRecord, ByteSource, Record, invalid_format, text_blocks, too_long

# All quantifiers are possessive: a failed match ends without backtracking.
_PLAIN = rb'[^"\[\]{}]*+'
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_FLAT = _PLAIN + rb"(?:" + _STRING + _PLAIN + rb")*+"


def _nested(depth: int) -> bytes:
    """Return a pattern for an array or object that nests no deeper than this."""
    inside = _FLAT if depth == 1 else _FLAT + rb"(?:" + _nested(depth - 1) + _FLAT + rb")*+"
    return rb"[\[{]" + inside + rb"[\]}]"


_DEPTH = 6
"""Nesting depth of the pattern, enough for an entity within an entity; deeper elements are split by `_read_nested`."""

_WHOLE = re.compile(_nested(_DEPTH), re.DOTALL)
_INSIDE = re.compile(_FLAT + rb"(?:" + _nested(_DEPTH) + _FLAT + rb")*+", re.DOTALL)
_DOWN = re.compile(rb"(?:[\[{]" + _FLAT + rb")++", re.DOTALL)
_CLOSING = re.compile(_FLAT + rb"[\]}]", re.DOTALL)
_UP = re.compile(rb"(?:" + _CLOSING.pattern + rb")++", re.DOTALL)
_WHOLE_STRING = re.compile(_STRING, re.DOTALL)
_TO_QUOTE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_SCALAR = re.compile(rb'[^ \t\r\n,\[\]{}":]*+')
_SPACE = re.compile(rb"[ \t\r\n]*+")

_END = b""


def elements(source: ByteSource, longest: int) -> Iterator[Record | BadRecord]:
    """Yield the elements of a top-level array, or the top-level objects, numbered from 1; none for an empty body.

    An element over `longest` bytes is a BadRecord, and its bytes beyond the limit are not kept. Raises InvalidFormat
    with the element's number if the text is truncated or there is unexpected text between two elements.
    """
    text = _Text(text_blocks(source))
    if text.peek() == b"[":
        yield from _array(text, longest)
    else:
        yield from _objects(text, longest)


def _objects(text: "_Text", longest: int) -> Iterator[Record | BadRecord]:
    number = 1
    while (first := text.peek()) != _END:
        if first != b"{":
            raise invalid_format("expected an object", number)
        yield text.element(number, longest)
        number += 1


def _array(text: "_Text", longest: int) -> Iterator[Record | BadRecord]:
    text.step()
    number = 1
    if text.peek() == b"]":
        text.step()
    else:
        more = True
        while more:
            yield text.element(number, longest)
            more = _skip_separator(text, number)
            number += 1
    if text.peek() != _END:
        raise invalid_format("expected nothing after the array", number)


def _skip_separator(text: "_Text", number: int) -> bool:
    """Skip the separator after an element; return True for a comma, False for the end of the array."""
    after = text.peek()
    if after not in (b",", b"]"):
        raise invalid_format("the array is cut off" if after == _END else "expected , or ] after the element", number)
    text.step()
    return after == b","


class _Text:
    """Cursor in the stream. Holds one block, and at most `longest` bytes of an element that began in an earlier one."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._data = b""
        self._at = 0

    def peek(self) -> bytes:
        """Skip white space and return the next byte without consuming it; b"" at the end."""
        while True:
            self._at = _end(_SPACE, self._data, self._at)
            if self._at < len(self._data):
                return self._data[self._at : self._at + 1]
            if not self._refill():
                return _END

    def step(self) -> None:
        self._at += 1

    def element(self, number: int, longest: int) -> Record | BadRecord:
        """Read the element after any white space. Raises InvalidFormat if there is none."""
        first = self.peek()
        match = _WHOLE.match(self._data, self._at)
        if match:
            self._at = match.end()
            return (number, match[0]) if len(match[0]) <= longest else too_long(number, longest)
        if first in (b"]", b"}", b",", b":"):
            raise invalid_format("expected an element", number)
        content = _ElementBytes(longest)
        complete = self._read_nested(content) if first in (b"[", b"{", b'"') else self._read_scalar(content)
        if not complete:
            raise invalid_format("the text is cut off", number)
        return (number, bytes(content.data)) if not content.over else too_long(number, longest)

    def _read_scalar(self, content: "_ElementBytes") -> bool:
        """Read a number or literal into `content`; return whether more text follows it."""
        while True:
            self._take(_end(_SCALAR, self._data, self._at), content)
            if self._at < len(self._data):
                return True
            if not self._refill():
                return False

    def _read_nested(self, content: "_ElementBytes") -> bool:
        """Read a string, array or object into `content`, across blocks; return whether its end was found."""
        quoted = self._data[self._at : self._at + 1] == b'"'
        depth = 0 if quoted else 1
        self._take(self._at + 1, content)
        while quoted or depth:
            self._take(_end(_TO_QUOTE if quoted else _INSIDE, self._data, self._at), content)
            following = self._data[self._at : self._at + 1]
            if following in (_END, b"\\"):  # keep a backslash in the buffer, to be read with the character it escapes
                if not self._refill():
                    return False
            elif following == b'"':
                quoted = not quoted
                self._take(self._at + 1, content)
            else:
                depth += self._steps(depth, content)
        return True

    def _steps(self, depth: int, content: "_ElementBytes") -> int:
        """Read a run of opening or closing brackets, at most to the end of the element; return the change of depth."""
        down = self._data[self._at : self._at + 1] in b"[{"
        end = _end(_DOWN if down else _UP, self._data, self._at)
        run = _WHOLE_STRING.sub(b"", self._data[self._at : end])
        if down:
            self._take(end, content)
            return run.count(b"[") + run.count(b"{")
        count = run.count(b"]") + run.count(b"}")
        if count > depth:  # the last brackets close what contains the element
            count, end = depth, next(islice(_CLOSING.finditer(self._data, self._at), depth - 1, depth)).end()
        self._take(end, content)
        return -count

    def _take(self, end: int, content: "_ElementBytes") -> None:
        content.add(self._data[self._at : end])
        self._at = end

    def _refill(self) -> bool:
        block = next(self._blocks, b"")
        self._data = self._data[self._at :] + block
        self._at = 0
        return bool(block)


def _end(pattern: re.Pattern[bytes], data: bytes, at: int) -> int:
    """Return the end of the match of a pattern that always matches."""
    match = pattern.match(data, at)
    assert match
    return match.end()


class _ElementBytes:
    """Bytes of one element, discarded once it exceeds the limit."""

    def __init__(self, longest: int) -> None:
        self.data = bytearray()
        self.over = False
        self.size = 0
        self._longest = longest

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        self.over = self.size > self._longest
        if self.over:
            self.data.clear()
        else:
            self.data += piece
