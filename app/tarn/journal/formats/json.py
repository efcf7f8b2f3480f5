"""JSON: the elements of one array, or objects one after the other, cut out of the stream and not parsed.

Only the boundaries of elements are looked for: brackets are counted outside strings, nothing recurses, and what is
between two brackets is for the parser of the element to judge. An element of usual depth that lies within one block
is a single match of `_WHOLE`; for any other, `_Text._long_way` counts brackets over the ends of blocks.
"""

import re
from collections.abc import Iterator
from itertools import islice

from tarn.journal.formats.record import BadRecord, ByteSource, Record, invalid_format, text_blocks, too_long

# Possessive throughout: a failed match gives up at once and never tries the same bytes again.
_PLAIN = rb'[^"\[\]{}]*+'
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_FLAT = _PLAIN + rb"(?:" + _STRING + _PLAIN + rb")*+"


def _nested(depth: int) -> bytes:
    """An array or object that nests no deeper than this."""
    inside = _FLAT if depth == 1 else _FLAT + rb"(?:" + _nested(depth - 1) + _FLAT + rb")*+"
    return rb"[\[{]" + inside + rb"[\]}]"


_DEPTH = 6
"""An entity within an entity; what is deeper is counted."""

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
    """The elements of a top-level array, or the top-level objects, numbered from 1; none for an empty body.

    An element over `longest` bytes is a BadRecord and held no further than that. Raises InvalidFormat, naming
    the element, where the text is cut off or something stands between two elements that does not belong there.
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
            more = _goes_on(text, number)
            number += 1
    if text.peek() != _END:
        raise invalid_format("expected nothing after the array", number)


def _goes_on(text: "_Text", number: int) -> bool:
    """Step over what follows an element: true after a comma, false after the end of the array."""
    after = text.peek()
    if after not in (b",", b"]"):
        raise invalid_format("the array is cut off" if after == _END else "expected , or ] after the element", number)
    text.step()
    return after == b","


class _Text:
    """A place in the stream. Holds a block, and of an element that began in an earlier one at most `longest` bytes."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._data = b""
        self._at = 0

    def peek(self) -> bytes:
        """The next byte that is not white space, b"" at the end; the place is then before it."""
        while True:
            self._at = _end(_SPACE, self._data, self._at)
            if self._at < len(self._data):
                return self._data[self._at : self._at + 1]
            if not self._refill():
                return _END

    def step(self) -> None:
        self._at += 1

    def element(self, number: int, longest: int) -> Record | BadRecord:
        """The element that begins at the next byte that is not white space. Raises InvalidFormat if there is none."""
        first = self.peek()
        match = _WHOLE.match(self._data, self._at)
        if match:
            self._at = match.end()
            return (number, match[0]) if len(match[0]) <= longest else too_long(number, longest)
        if first in (b"]", b"}", b",", b":"):
            raise invalid_format("expected an element", number)
        kept = _ElementBytes(longest)
        found = self._long_way(kept) if first in (b"[", b"{", b'"') else self._scalar(kept)
        if not found:
            raise invalid_format("the text is cut off", number)
        return (number, bytes(kept.data)) if not kept.over else too_long(number, longest)

    def _scalar(self, kept: "_ElementBytes") -> bool:
        """Take a number or a word into `kept`; whether there is something after it."""
        while True:
            self._take(_end(_SCALAR, self._data, self._at), kept)
            if self._at < len(self._data):
                return True
            if not self._refill():
                return False

    def _long_way(self, kept: "_ElementBytes") -> bool:
        """Take a string, array or object into `kept`, over any number of blocks; whether its end was found."""
        quoted = self._data[self._at : self._at + 1] == b'"'
        depth = 0 if quoted else 1
        self._take(self._at + 1, kept)
        while quoted or depth:
            self._take(_end(_TO_QUOTE if quoted else _INSIDE, self._data, self._at), kept)
            found = self._data[self._at : self._at + 1]
            if found in (_END, b"\\"):  # a backslash stays, to be read with what it escapes
                if not self._refill():
                    return False
            elif found == b'"':
                quoted = not quoted
                self._take(self._at + 1, kept)
            else:
                depth += self._steps(depth, kept)
        return True

    def _steps(self, depth: int, kept: "_ElementBytes") -> int:
        """Take a run of opening or of closing brackets, those that end the element at most; by how much deeper."""
        down = self._data[self._at : self._at + 1] in b"[{"
        end = _end(_DOWN if down else _UP, self._data, self._at)
        run = _WHOLE_STRING.sub(b"", self._data[self._at : end])
        if down:
            self._take(end, kept)
            return run.count(b"[") + run.count(b"{")
        count = run.count(b"]") + run.count(b"}")
        if count > depth:  # the last of them end what the element is in
            count, end = depth, next(islice(_CLOSING.finditer(self._data, self._at), depth - 1, depth)).end()
        self._take(end, kept)
        return -count

    def _take(self, end: int, kept: "_ElementBytes") -> None:
        kept.add(self._data[self._at : end])
        self._at = end

    def _refill(self) -> bool:
        block = next(self._blocks, b"")
        self._data = self._data[self._at :] + block
        self._at = 0
        return bool(block)


def _end(pattern: re.Pattern[bytes], data: bytes, at: int) -> int:
    """Where the match ends of a pattern that always matches here."""
    match = pattern.match(data, at)
    assert match
    return match.end()


class _ElementBytes:
    """The bytes of one element until there are too many."""

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
