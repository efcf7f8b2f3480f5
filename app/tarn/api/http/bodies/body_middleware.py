"""Request body middleware: decompression, size limit and arrival time-outs.

The size limit applies to the bytes received and to the decompressed bytes. An idle time-out and a minimum rate end a
body whose client stops or trickles (`Pace`).

A decompressor is fed a few hundred bytes at a time, so that one step of a decompression bomb yields a few megabytes at
most, and the limit is checked between two steps.
"""

import asyncio
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import zstandard
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tarn.errors import BodyTimeout, BodyTooLarge, FieldError, InvalidFormat, UnsupportedMediaType

STEP = 512
"""Bytes fed at once. A zstd block of 4 bytes may hold 128 KiB, so a step is never more than 16 MiB."""

LARGEST_WINDOW = 1 << 23
"""8 MiB: the window that RFC 8878 recommends every zstd decoder to support."""

LIMIT = "tarn.body_limit"
"""Scope key of the body limit. A route that accepts more than a document raises it there."""

FEW_MEMBERS, TINY_MEMBER = 1000, 64
"""A stream of more than FEW_MEMBERS members must have TINY_MEMBER decoded bytes per member on average: creating a
decompressor costs far more than the few bytes of an empty member."""


LATE_SECONDS = 0.1
"""Seconds of a second wait for a body that timed out. If the event loop was busy when the time ran out, bytes that
arrived before are still unread; the second wait reads them."""


class Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


class Decoder:
    """Decodes a stream of one or more gzip members or zstd frames."""

    def __init__(self, name: str, begin: Callable[[], Callable[[], Decompressor]]) -> None:
        self._name = name
        self._make = begin()
        self._current: Decompressor | None = None
        self._members = 0
        self._decoded = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the decoded bytes in bounded pieces. Raises InvalidFormat for data that is not of this encoding."""
        for start in range(0, len(data), STEP):
            block = data[start : start + STEP]
            while block:
                if self._current is None:
                    self._current = self._next_member()
                try:
                    piece = self._current.decompress(block)
                except (zlib.error, zstandard.ZstdError) as error:
                    raise self._broken(str(error)) from None
                self._decoded += len(piece)
                if piece:
                    yield piece
                block = b""
                if self._current.eof:
                    block, self._current = self._current.unused_data, None

    def finish(self) -> None:
        """Raise InvalidFormat if the stream ended inside a member."""
        if self._current is not None:
            raise self._broken("the stream is truncated")

    def require_member(self) -> None:
        """Raise InvalidFormat if the stream had no bytes: even a compressed empty file has a member."""
        if self._members == 0:
            raise self._broken("the stream is truncated")

    def _next_member(self) -> Decompressor:
        if self._members > FEW_MEMBERS and self._decoded < self._members * TINY_MEMBER:
            raise self._broken("too many members that decode to almost no bytes")
        self._members += 1
        return self._make()

    def _broken(self, reason: str) -> InvalidFormat:
        return InvalidFormat(f"the body is not valid {self._name}: {reason}", errors=[FieldError(reason=reason)])


DECODERS: dict[str, Callable[[], Callable[[], Decompressor]]] = {
    "gzip": lambda: lambda: zlib.decompressobj(wbits=31),
    "zstd": lambda: zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj,
}
"""By encoding: a function that begins a stream and returns the factory of its members' decompressors. The decompressors
of a zstd stream share one context, which is far more expensive to create than they are."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a request body must arrive."""

    idle_timeout: float
    """Maximum seconds without a byte."""
    min_rate: int
    """Bytes a second as received, before decompression; 0: no minimum."""
    grace: float
    """Seconds that a body may be behind the minimum rate."""


class BodyMiddleware:
    """ASGI middleware: handlers receive decompressed bytes, never more than the limit, and never wait forever.

    Errors are raised from `receive`, so that no body is judged before its sender is authenticated.
    """

    def __init__(self, app: ASGIApp, limit: int, pace: Pace) -> None:
        self.app = app
        self.limit = limit
        self.pace = pace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault(LIMIT, self.limit)
            receive = _Body(scope, _Paced(receive, self.pace).receive).receive
        await self.app(scope, receive, send)


class _Paced:
    """Receives a body in time, or raises BodyTimeout.

    Only the time spent in `receive` counts, which is time spent waiting for the client: while the server does not read,
    because it is busy or has no slot for the request yet, the client cannot send, and its clock does not run.

    1. idle   seconds waited since the last byte, at most `idle_timeout`
    2. lag    seconds waited, less one for every `min_rate` bytes, never below zero; at most `grace`. What a client sent
              faster at first does not allow it to trickle later.
    """

    def __init__(self, upstream: Receive, pace: Pace) -> None:
        self._upstream = upstream
        self._pace = pace
        self._complete = False
        self._idle = 0.0
        self._lag = 0.0
        self._received = 0

    async def receive(self) -> Message:
        if self._complete:
            return await self._upstream()
        message = await self._receive_in_time()
        if message["type"] != "http.request":
            return message
        self._complete = not message.get("more_body", False)
        if size := len(message.get("body", b"")):
            self._received += size
            self._idle = 0.0
            if self._pace.min_rate:
                self._lag = max(0.0, self._lag - size / self._pace.min_rate)
        return message

    async def _receive_in_time(self) -> Message:
        loop = asyncio.get_running_loop()
        start, seconds_left = loop.time(), self._left
        try:
            try:
                async with asyncio.timeout(seconds_left):
                    return await self._upstream()
            except TimeoutError:
                async with asyncio.timeout(LATE_SECONDS):
                    return await self._upstream()
        except TimeoutError:
            raise self._timed_out() from None
        finally:
            # A wait that is cancelled counts too.
            waited = min(loop.time() - start, seconds_left)
            self._idle += waited
            self._lag += waited

    @property
    def _left(self) -> float:
        """Seconds to wait for the next bytes."""
        idle = self._pace.idle_timeout - self._idle
        return max(0.0, min(idle, self._pace.grace - self._lag) if self._pace.min_rate else idle)

    def _timed_out(self) -> BodyTimeout:
        sent = f"after {self._received} bytes of the body"
        if self._pace.idle_timeout - self._idle <= self._left:
            return BodyTimeout(f"{sent} no more came for {self._pace.idle_timeout:g} seconds")
        return BodyTimeout(
            f"{sent} it is {self._pace.grace:g} seconds behind the minimum rate of {self._pace.min_rate} bytes a second"
        )


class _Body:
    def __init__(self, scope: Scope, upstream: Receive) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        self._scope = scope
        self._upstream = upstream
        self._declared = headers.get(b"content-length", "")
        self._encoding = headers.get(b"content-encoding", "identity").strip().lower()
        self._decoder: Decoder | None = None
        self._pieces: Iterator[bytes] = iter(())
        self._more = True
        self._over = False
        self._received = 0
        self._size = 0
        self._begun = False

    async def receive(self) -> Message:
        if not self._begun:
            self._begin()
        if self._decoder is None:
            message = await self._upstream()
            if message["type"] == "http.request":
                self._count(message.get("body", b""))
            return message
        while True:
            for piece in self._pieces:
                self._count(piece)
                return {"type": "http.request", "body": piece, "more_body": True}
            if self._over:
                return await self._upstream()
            if not self._more:
                self._over = True
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._upstream()
            if message["type"] != "http.request":
                return message
            self._more, data = message.get("more_body", False), message.get("body", b"")
            self._received += len(data)
            self._require_within(self._received)
            self._pieces = self._decode(data, last=not self._more)

    def _begin(self) -> None:
        self._begun = True
        if self._encoding in DECODERS:
            self._decoder = Decoder(self._encoding, DECODERS[self._encoding])
        elif self._encoding != "identity":
            raise UnsupportedMediaType(
                f"the encoding {self._encoding!r} is not supported", supported=[*DECODERS, "identity"]
            )
        if self._declared.isdigit():
            self._require_within(int(self._declared))

    def _decode(self, data: bytes, last: bool) -> Iterator[bytes]:
        assert self._decoder is not None
        yield from self._decoder.feed(data)
        if last:
            self._decoder.finish()
            if self._scope["method"] in ("POST", "PUT", "PATCH"):
                self._decoder.require_member()

    def _count(self, data: bytes) -> None:
        self._size += len(data)
        self._require_within(self._size)

    @property
    def _limit(self) -> int:
        limit = self._scope[LIMIT]
        assert isinstance(limit, int)
        return limit

    def _require_within(self, size: int) -> None:
        if size > self._limit:
            raise BodyTooLarge(
                f"the body is larger than {self._limit} bytes, as received or decompressed", limit=self._limit
            )
