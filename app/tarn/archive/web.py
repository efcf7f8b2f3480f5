"""Files on the web, each hop connected to an address that was checked for it.

A name is resolved once a hop, every address of it is checked, and the connection goes to one of these and nowhere else:
a second answer of the name server is never asked for. TLS is still verified against the name. Every redirect is a hop
of its own. No proxy, cookie, netrc or credential of the surroundings is used, as httpcore knows none.
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

from tarn.archive.addresses import Address, Guard
from tarn.archive.sources import Source, refused
from tarn.archive.urls import Url
from tarn.errors import FileNotFound, SchemaViolation, SourceFailed, TarnError
from tarn.model.cancellation import check

Clock = Callable[[], float]

REDIRECTS = 5
REDIRECTED = frozenset({301, 302, 303, 307, 308})
WHOLE = frozenset({200, 203})
GONE = frozenset({404, 410})
BUSY = frozenset({408, 425, 429})
STEP = 1.0
"""Seconds that one read waits before it is checked whether the job that it is for is cancelled."""
TRIED = 4
"""Addresses of one host that are tried; all of them are checked."""
PLAIN_NAME = re.compile(r""";\s*+filename=("(?:[^"\\]|\\.)*+"|[^";\s]*+)""", re.IGNORECASE)
ENCODED_NAME = re.compile(r";\s*+filename\*=(utf-8|iso-8859-1)'[^';]*+'([^;\s]*+)", re.IGNORECASE)
"""Read by ourselves: the standard library's parser fails on some headers."""
MEDIA_TYPE = re.compile(r"[a-z0-9!#$&^_.+-]+/[a-z0-9!#$&^_.+-]+")


@dataclass(frozen=True)
class Web:
    """Fetches from http and https."""

    guard: Guard
    limit: int
    patience: float
    longest: float
    clock: Clock = time.monotonic

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_tls"}

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return httpx.create_ssl_context()

    def open(self, url: Url, limit: int | None = None) -> tuple[Url, Source]:
        """The file, and where it was found in the end.

        Raises SchemaViolation, FileNotFound, SourceFailed, BodyTooLarge.
        """
        deadline = Deadline(self.patience, self.clock() + self.longest, self.clock)
        for _ in range(REDIRECTS + 1):
            exchange = self._ask(url, deadline)
            if exchange.status not in REDIRECTED:
                return url, exchange.source(self.limit if limit is None else limit)
            exchange.close()
            url = exchange.redirect()
        raise refused(f"the source redirects more than {REDIRECTS} times")

    def post(self, url: Url, body: bytes, headers: Mapping[str, str]) -> int:
        """Send something, once; the status of the answer, of which nothing else is read. Redirects are not followed.

        Raises SchemaViolation for an address that may not be connected to, and SourceFailed.
        """
        deadline = Deadline(self.patience, self.clock() + self.longest, self.clock)
        exchange = self._ask(url, deadline, "POST", {**headers, "Content-Length": str(len(body))}, body)
        exchange.close()
        return exchange.status

    def _ask(
        self,
        url: Url,
        deadline: "Deadline",
        method: str = "GET",
        more: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> "Exchange":
        backend = PinnedBackend(self.guard.addresses(url.host, url.port)[:TRIED], deadline)
        place = httpcore.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target)
        connection = httpcore.HTTPConnection(
            place.origin, ssl_context=self._tls if url.scheme == "https" else None, network_backend=backend
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
                response = connection.handle_request(httpcore.Request(method, place, headers=headers, content=body))
        except BaseException:
            connection.close()
            raise
        return Exchange(url, connection, response)


@dataclass(frozen=True)
class Deadline:
    """How long may be waited: so long for a byte, and until `end` for everything."""

    patience: float
    end: float
    clock: Clock

    def left(self) -> float:
        """Raises httpcore's ReadTimeout when it is over."""
        left = self.end - self.clock()
        if left <= 0:
            raise httpcore.ReadTimeout
        return min(left, self.patience)


class PinnedBackend(httpcore.NetworkBackend):
    """Connects to these addresses, whatever host it is told."""

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
                stream = self._network.connect_tcp(str(address), port, self._deadline.left())
                return TimedStream(stream, self._deadline)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure or httpcore.ConnectError


class TimedStream(httpcore.NetworkStream):
    """A stream whose every step has what is left of the deadline, and no more."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """In steps, between which it is checked whether the job that waits for this is cancelled."""
        left = self._deadline.left()
        while left > STEP:
            try:
                return self._stream.read(max_bytes, STEP)
            except httpcore.ReadTimeout:
                check()
            left = min(left - STEP, self._deadline.left())
        return self._stream.read(max_bytes, left)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.left())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return TimedStream(self._stream.start_tls(ssl_context, server_hostname, self._deadline.left()), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class Exchange:
    """One request and what came back, its body still unread."""

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
        """Raises SchemaViolation."""
        try:
            location = self._headers[b"location"].decode()
        except (KeyError, UnicodeDecodeError):
            raise refused(f"the source answers {self.status} without saying where it is") from None
        try:
            following = self._url.joined(location)
        except SchemaViolation as error:
            raise refused(f"the source redirects, and {error.members['errors'][0].reason}") from None
        if (self._url.scheme, following.scheme) == ("https", "http"):
            raise refused("the source redirects from https to http")
        return following

    def source(self, limit: int) -> Source:
        """Raises FileNotFound, SchemaViolation, SourceFailed or BodyTooLarge, and closes then."""
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
            raise FileNotFound(f"there is no such file: {self._url.origin} answers {self.status}")
        if self.status in BUSY or self.status >= 500:
            raise SourceFailed(f"{self._url.origin} answers {self.status}")
        if self.status not in WHOLE:
            raise refused(f"{self._url.origin} answers {self.status}")
        encoding = self._headers.get(b"content-encoding", b"").strip().lower()
        if encoding not in (b"", b"identity"):
            # A bomb would be unpacked by us. A file that is compressed itself comes without such a header.
            raise refused(f"{self._url.origin} sends it in an encoding that was not asked for")

    def _chunks(self) -> Iterator[bytes]:
        assert isinstance(self._response.stream, Iterable)
        with _translated(self._url):
            yield from self._response.stream

    def _name(self) -> str | None:
        """What the server calls the file, or the end of its URL."""
        return file_name(self._headers.get(b"content-disposition", b"")) or self._url.name or None

    def _media_type(self) -> str | None:
        given = self._headers.get(b"content-type", b"").decode(errors="replace").partition(";")[0].strip().lower()
        return given if MEDIA_TYPE.fullmatch(given) else None


def file_name(disposition: bytes) -> str | None:
    """The name that a `Content-Disposition` gives, if any: the encoded one where there are two (RFC 6266)."""
    text = disposition.decode(errors="replace")
    if found := ENCODED_NAME.search(text):
        return unquote(found[2], found[1].lower())
    if found := PLAIN_NAME.search(text):
        return re.sub(r"\\(.)", r"\1", found[1][1:-1]) if found[1].startswith('"') else found[1]
    return None


@contextmanager
def _translated(url: Url) -> Iterator[None]:
    """What httpcore raises as SourceFailed, or as SchemaViolation if it is the certificate."""
    try:
        yield
    except httpcore.TimeoutException as error:
        raise SourceFailed(f"{url.origin} takes too long") from error
    except httpcore.ConnectError as error:
        if isinstance(error.__cause__, ssl.SSLCertVerificationError):
            raise refused(f"{url.origin} has no valid certificate for that name") from error
        raise SourceFailed(f"{url.origin} cannot be connected to") from error
    except httpcore.NetworkError as error:
        raise SourceFailed(f"{url.origin} broke off") from error
    except httpcore.ProtocolError as error:
        raise SourceFailed(f"{url.origin} broke off, or does not speak HTTP as it should") from error
