"""HTTP client for fetching files from the web, protected against server-side request forgery (SSRF).

For every hop a name is resolved once, all of its addresses are checked, and the connection goes to one of them: the
name is never resolved again. TLS is still verified against the name. Every redirect is a hop of its own. No proxy,
cookie, netrc or credential of the environment is used, as httpcore does not support them.
"""

import re
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import unquote

import httpcore
import httpx

from tarn.archive.fetching.addresses import Address, Guard
from tarn.archive.fetching.sources import Source, refused
from tarn.archive.fetching.urls import Url
from tarn.errors import FileNotFound, SchemaViolation, SourceFailed, TarnError
from tarn.model.work.cancellation import check

Clock = Callable[[], float]

REDIRECTS = 5
REDIRECTED = frozenset({301, 302, 303, 307, 308})
WHOLE = frozenset({200, 203})
GONE = frozenset({404, 410})
BUSY = frozenset({408, 425, 429})
STEP = 1.0
"""Seconds of one read, after which it is checked whether the job is cancelled."""
MAX_CONNECT_ADDRESSES = 4
"""Addresses of one host that a connection is tried to; all addresses are checked."""
PLAIN_NAME = re.compile(r""";\s*+filename=("(?:[^"\\]|\\.)*+"|[^";\s]*+)""", re.IGNORECASE)
ENCODED_NAME = re.compile(r";\s*+filename\*=(utf-8|iso-8859-1)'[^';]*+'([^;\s]*+)", re.IGNORECASE)
"""Parsed here because the standard library's parser fails on some headers."""
MEDIA_TYPE = re.compile(r"[a-z0-9!#$&^_.+-]+/[a-z0-9!#$&^_.+-]+")


@dataclass(frozen=True)
class Web:
    """Client for http and https sources."""

    guard: Guard
    limit: int
    step_timeout: float
    max_seconds: float
    clock: Clock = time.monotonic

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_tls"}

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return httpx.create_ssl_context()

    def open(self, url: Url, limit: int | None = None) -> tuple[Url, Source]:
        """Open a file, and return it with its final URL after redirects.

        Raises SchemaViolation, FileNotFound, SourceFailed, BodyTooLarge.
        """
        deadline = Deadline(self.step_timeout, self.clock() + self.max_seconds, self.clock)
        for _ in range(REDIRECTS + 1):
            exchange = self._request(url, deadline)
            if exchange.status not in REDIRECTED:
                return url, exchange.source(self.limit if limit is None else limit)
            exchange.close()
            url = exchange.redirect()
        raise refused(f"the source redirects more than {REDIRECTS} times")

    def post(self, url: Url, body: bytes, headers: Mapping[str, str]) -> int:
        """Send a POST request once, and return the status of the response; its body is not read. Follows no redirects.

        Raises SchemaViolation for an address that may not be connected to, and SourceFailed.
        """
        deadline = Deadline(self.step_timeout, self.clock() + self.max_seconds, self.clock)
        exchange = self._request(url, deadline, "POST", {**headers, "Content-Length": str(len(body))}, body)
        exchange.close()
        return exchange.status

    def _request(
        self,
        url: Url,
        deadline: "Deadline",
        method: str = "GET",
        more: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> "Exchange":
        backend = PinnedBackend(self.guard.addresses(url.host, url.port)[:MAX_CONNECT_ADDRESSES], deadline)
        target_url = httpcore.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target)
        connection = httpcore.HTTPConnection(
            target_url.origin, ssl_context=self._tls if url.scheme == "https" else None, network_backend=backend
        )
        headers = [
            ("Host", url.authority),
            ("User-Agent", "tarn"),
            ("Accept", "*/*"),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
            *(more or {}).items(),
        ]
        try:
            with _translated(url):
                response = connection.handle_request(
                    httpcore.Request(method, target_url, headers=headers, content=body)
                )
        except BaseException:
            connection.close()
            raise
        return Exchange(url, connection, response)


@dataclass(frozen=True)
class Deadline:
    """Time limits of a request: `step_timeout` seconds for each read or write, and `end` for all of it."""

    step_timeout: float
    end: float
    clock: Clock

    def remaining(self) -> float:
        """Return the seconds that the next step may take. Raises httpcore's ReadTimeout after the end."""
        remaining = self.end - self.clock()
        if remaining <= 0:
            raise httpcore.ReadTimeout
        return min(remaining, self.step_timeout)


class PinnedBackend(httpcore.NetworkBackend):
    """Network backend that connects only to the given addresses, whatever the host."""

    def __init__(self, addresses: Sequence[Address], deadline: Deadline) -> None:
        self._addresses = addresses
        self._deadline = deadline
        self._network = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        failure: Exception | None = None
        for address in self._addresses:
            try:
                stream = self._network.connect_tcp(str(address), port, self._deadline.remaining())
                return TimedStream(stream, self._deadline)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure or httpcore.ConnectError


class TimedStream(httpcore.NetworkStream):
    """Network stream whose every read and write is limited by the deadline."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read in short steps, and check in between whether the job is cancelled."""
        remaining = self._deadline.remaining()
        while remaining > STEP:
            try:
                return self._stream.read(max_bytes, STEP)
            except httpcore.ReadTimeout:
                check()
            remaining = min(remaining - STEP, self._deadline.remaining())
        return self._stream.read(max_bytes, remaining)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.remaining())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return TimedStream(
            self._stream.start_tls(ssl_context, server_hostname, self._deadline.remaining()), self._deadline
        )

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class Exchange:
    """A request and its response, whose body is not read yet."""

    def __init__(self, url: Url, connection: httpcore.HTTPConnection, response: httpcore.Response) -> None:
        self._url = url
        self._connection = connection
        self._response = response
        self._headers = {name.lower(): value for name, value in response.headers}

    @property
    def status(self) -> int:
        return self._response.status

    def close(self) -> None:
        self._connection.close()

    def redirect(self) -> Url:
        """Return the URL that the response redirects to. Raises SchemaViolation."""
        try:
            location = self._headers[b"location"].decode()
        except (KeyError, UnicodeDecodeError):
            raise refused(f"the source responded with status {self.status} without a valid Location header") from None
        try:
            following = self._url.joined(location)
        except SchemaViolation as error:
            raise refused(f"the source redirects, and {error.members['errors'][0].reason}") from None
        if (self._url.scheme, following.scheme) == ("https", "http"):
            raise refused("the source redirects from https to http")
        return following

    def source(self, limit: int) -> Source:
        """Return the body as a source. Raises FileNotFound, SchemaViolation, SourceFailed, BodyTooLarge, and closes."""
        try:
            self._check()
        except TarnError:
            self.close()
            raise
        length = self._headers.get(b"content-length")
        return Source(
            self._url.shown,
            self._chunks(),
            limit,
            name=self._name(),
            size=None if length is None else int(length),
            media_type=self._media_type(),
            close=self.close,
        )

    def _check(self) -> None:
        if self.status in GONE:
            raise FileNotFound(f"there is no such file: {self._url.origin} responded with status {self.status}")
        if self.status in BUSY or self.status >= 500:
            raise SourceFailed(f"{self._url.origin} responded with status {self.status}")
        if self.status not in WHOLE:
            raise refused(f"{self._url.origin} responded with status {self.status}")
        encoding = self._headers.get(b"content-encoding", b"").strip().lower()
        if encoding not in (b"", b"identity"):
            # A decompression bomb would be unpacked here. A file that is itself compressed has no such header.
            raise refused(f"{self._url.origin} sends it in an encoding that was not requested")

    def _chunks(self) -> Iterator[bytes]:
        assert isinstance(self._response.stream, Iterable)
        with _translated(self._url):
            yield from self._response.stream

    def _name(self) -> str | None:
        """Return the name that the server gives the file, or the last segment of its URL."""
        return file_name(self._headers.get(b"content-disposition", b"")) or self._url.name or None

    def _media_type(self) -> str | None:
        value = self._headers.get(b"content-type", b"").decode(errors="replace").partition(";")[0].strip().lower()
        return value if MEDIA_TYPE.fullmatch(value) else None


def file_name(disposition: bytes) -> str | None:
    """Return the file name in a `Content-Disposition`, or None; the encoded one if there are two (RFC 6266)."""
    text = disposition.decode(errors="replace")
    if match := ENCODED_NAME.search(text):
        return unquote(match[2], match[1].lower())
    if match := PLAIN_NAME.search(text):
        return re.sub(r"\\(.)", r"\1", match[1][1:-1]) if match[1].startswith('"') else match[1]
    return None


@contextmanager
def _translated(url: Url) -> Iterator[None]:
    """Translate httpcore's errors to SourceFailed, or to SchemaViolation for an invalid certificate."""
    try:
        yield
    except httpcore.TimeoutException as error:
        raise SourceFailed(f"{url.origin} did not respond in time") from error
    except httpcore.ConnectError as error:
        if isinstance(error.__cause__, ssl.SSLCertVerificationError):
            raise refused(f"{url.origin} has no valid certificate for that name") from error
        raise SourceFailed(f"cannot connect to {url.origin}") from error
    except httpcore.NetworkError as error:
        raise SourceFailed(f"{url.origin} closed the connection before the response was complete") from error
    except httpcore.ProtocolError as error:
        raise SourceFailed(f"{url.origin} sent an invalid or incomplete HTTP response") from error
