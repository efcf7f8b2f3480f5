"""Streaming parser of a multipart form with one file. The file is streamed; other fields are small and buffered."""

from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from tarn.errors import BodyTooLarge, EmptyBody, FieldError, InvalidFormat, SchemaViolation, UnsupportedMediaType

FORM = "multipart/form-data"
LONGEST_HEADER = 16 << 10
"""Bytes of a part's header: a path may be long, and is three times as long when percent-encoded."""


class _PartBegin(NamedTuple):
    """A part begins."""

    name: str
    filename: str | None


class _PartEnd(NamedTuple):
    """A part ends."""


class Form:
    """The parts of a multipart request body, read in the order in which they arrive."""

    def __init__(self, request: Request, file: str, fields: tuple[str, ...], most: int) -> None:
        """Begin to parse a form. `file` is the part that may be large; each of `fields` has at most `most` bytes.

        Raises UnsupportedMediaType for another media type, and InvalidFormat if the boundary is missing.
        """
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != FORM.encode():
            raise UnsupportedMediaType(
                f"send {FORM}, not {kind.decode('latin-1') or 'a body without Content-Type'}", supported=[FORM]
            )
        if not options.get(b"boundary"):
            raise _broken("Content-Type has no boundary")
        self.fields: dict[str, bytes] = {}
        self._stream = request.stream()
        self._file, self._names, self._most = file, fields, most
        self._events: deque[_PartBegin | _PartEnd | bytes] = deque()
        self._header: tuple[list[bytes], list[bytes]] = ([], [])
        self._headers: dict[bytes, bytes] = {}
        self._over = False
        self._size = 0
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._headers.clear,
                    "on_header_begin": self._begin_header,
                    "on_header_field": lambda data, start, end: self._header[0].append(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].append(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_part,
                    "on_part_data": lambda data, start, end: self._events.append(data[start:end]),
                    "on_part_end": lambda: self._events.append(_PartEnd()),
                    "on_end": self._end,
                },
                max_header_size=LONGEST_HEADER,
            )
        except FormParserError as error:
            raise _broken(str(error)) from None

    async def until_file(self) -> str | None:
        """Read up to the file and return its file name, or None. Raises SchemaViolation if the form has no file."""
        file_data = await self._read_fields()
        if file_data is None:
            if not self._size:
                raise EmptyBody(f"the body is empty; send a form with a part {self._file!r}")
            raise _violated(self._file, "is missing")
        return file_data.filename

    async def file(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the file."""
        while not isinstance(event := await self._next(), _PartEnd | None):
            assert isinstance(event, bytes)
            yield event
        if event is None:
            raise _broken("it is truncated")

    async def rest(self) -> None:
        """Read the rest of the form after the file. Raises SchemaViolation for a second file."""
        if await self._read_fields() is not None:
            raise _violated(self._file, "occurs twice")

    async def _read_fields(self) -> _PartBegin | None:
        """Read fields up to the next file. Return None at the end of the form."""
        while (event := await self._next()) is not None:
            assert isinstance(event, _PartBegin)
            if event.name == self._file:
                return event
            if event.name not in self._names or event.name in self.fields:
                reason = "occurs twice" if event.name in self.fields else "is not a part of this form"
                raise _violated(event.name, reason)
            self.fields[event.name] = await self._field()
        return None

    async def _field(self) -> bytes:
        value = b""
        while isinstance(event := await self._next(), bytes):
            value += event
            if len(value) > self._most:
                raise BodyTooLarge(f"a part other than the file is larger than {self._most} bytes", limit=self._most)
        if event is None:
            raise _broken("it is truncated")
        return value

    async def _next(self) -> _PartBegin | _PartEnd | bytes | None:
        """Return the next event, or None at the end. Raises InvalidFormat if the form is truncated."""
        while not self._events:
            piece = await anext(self._stream, b"")
            if not piece:
                if not self._over and self._size:
                    raise _broken("it is truncated")
                return None
            self._size += len(piece)
            try:
                self._parser.write(piece)
            except FormParserError as error:
                raise _broken(str(error)) from None
        return self._events.popleft()

    # Parser callbacks

    def _begin_header(self) -> None:
        self._header = ([], [])

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[b"".join(name).lower()] = b"".join(value)

    def _begin_part(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        try:
            name = options.get(b"name", b"").decode()
            filename = options[b"filename"].decode() if b"filename" in options else None
        except UnicodeDecodeError:
            raise _broken("a part's name is not UTF-8") from None
        self._events.append(_PartBegin(name, filename))

    def _end(self) -> None:
        self._over = True


def _violated(part: str, reason: str) -> SchemaViolation:
    return SchemaViolation(f"the part {part!r} {reason}", errors=[FieldError(field=part, reason=reason)])


def _broken(reason: str) -> InvalidFormat:
    return InvalidFormat(f"the form is not valid: {reason}", errors=[FieldError(reason=reason)])
