"""A client of one server: requests in, JSON documents or a failure out.

Imported when a command runs, not when its help is shown: httpx takes longer than everything else a command needs.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tarn.cli.failures import Misuse, ProblemAnswered, Unreachable

ADMIN_KEY_FILE = "data/admin.key"
"""Where a server that was started here keeps its administrator's key, unless it is told otherwise."""

CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 60.0
LONG_TIMEOUT = 600.0
"""How long a server may be silent over much data: before it sends the first of it, or when it has received the last."""

LARGEST_PAGE = 1000
NO_KEY = "no key was sent: set TARN_KEY, or start where data/admin.key is"


class Client:
    """Speaks to one server with one key. It tries nothing twice: whether to repeat is for the caller to say."""

    def __init__(self, url: str, key: str | None) -> None:
        """Raises Misuse for what is no URL, and for a key that no header can carry."""
        self.url = url
        local = _is_loopback(_host(url))
        self.key = key or (_admin_key() if local else None)
        self._http = httpx.Client(
            base_url=url,
            headers={"User-Agent": f"tarn/{version('tarn')}"} | _authorization(self.key),
            # A proxy has no way to this machine's own loopback, and no business with its keys.
            trust_env=not local,
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        wait: float = 0,
    ) -> httpx.Response:
        """The server's answer, if it is a success; `wait` is how long the server was asked to take over it.

        Raises ProblemAnswered for any other answer, Unreachable if there is none.
        """
        content, kind = (None, {}) if body is None else (_encoded(body), {"Content-Type": "application/json"})
        return self._answer(method, path, content, params, {**kind, **(headers or {})}, ANSWER_SECONDS + wait)

    def upload(
        self,
        path: str,
        content: Iterable[bytes],
        headers: Mapping[str, str],
        params: Mapping[str, Any],
        method: str = "POST",
    ) -> httpx.Response:
        """The answer to a body that is sent as it is read. Raises what `request` does, and what reading it does."""
        return self._answer(method, path, content, params, headers, LONG_TIMEOUT)

    @contextmanager
    def stream(self, path: str, form: str, params: Mapping[str, Any]) -> Iterator[Iterator[bytes]]:
        """The body of an answer of this media type, as it arrives. It is given up when the context is left.

        Raises what `request` does, also while it is read: a body that breaks off does not look whole.
        """
        with (
            self._heard(),
            self._http.stream(
                "GET", path, params=_given(params), headers={"Accept": form}, timeout=_timeout(LONG_TIMEOUT)
            ) as response,
        ):
            if not response.is_success:
                response.read()
                raise self._refused(response)
            if response.status_code == 204:
                yield iter(())
                return
            if response.headers.get("Content-Type", "").partition(";")[0] != form:
                raise _foreign(response)
            yield response.iter_bytes()

    def document(self, method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        """The JSON object the server answers. Raises what `request` does, and ProblemAnswered for anything else."""
        return _object(self.request(method, path, body, **options))

    def tagged(self, path: str) -> tuple[dict[str, Any], str]:
        """A document and its entity tag."""
        response = self.request("GET", path)
        return _object(response), response.headers.get("ETag", "*")

    def each(
        self, path: str, /, limit: int | None = None, page: int = LARGEST_PAGE, **params: Any
    ) -> Iterator[dict[str, Any]]:
        """What a list holds, over all its pages or up to a limit."""
        cursor, left = None, limit
        while left is None or left > 0:
            size = page if left is None else min(page, left)
            response = self.request("GET", path, params={**params, "limit": size, "cursor": cursor})
            found = _object(response, "results", "next")
            yield from found["results"]
            cursor, left = found["next"], None if left is None else left - len(found["results"])
            if cursor is None:
                return

    def _answer(
        self,
        method: str,
        path: str,
        content: bytes | Iterable[bytes] | None,
        params: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        seconds: float,
    ) -> httpx.Response:
        with self._heard():
            response = self._http.request(
                method, path, content=content, params=_given(params), headers=headers, timeout=_timeout(seconds)
            )
        if not response.is_success:
            raise self._refused(response)
        return response

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Raises Unreachable where the server is not heard to the end."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if "SSL" in str(error):
                raise Unreachable(f"the server at {self.url} cannot be trusted: {error}") from None
            raise Unreachable(
                f"no server answers at {self.url}: start one with make run or tarn serve, or name one with --url"
            ) from None
        except httpx.RequestError as error:
            reason = str(error) or type(error).__name__
            raise Unreachable(f"the server at {self.url} gave no whole answer: {reason}") from None

    def _refused(self, response: httpx.Response) -> ProblemAnswered:
        keyless = response.status_code == 401 and not self.key
        after = response.headers.get("Retry-After", "")
        return ProblemAnswered(
            _object(response, "type", "detail"),
            hint=NO_KEY if keyless else None,
            after=int(after) if after.isdecimal() else None,
        )


def _given(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (params or {}).items() if value is not None}


def _timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=CONNECT_SECONDS, pool=CONNECT_SECONDS)


def _host(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise Misuse(f"{url!r} is not the URL of a server: it must look like http://127.0.0.1:8000")
    return parsed.host


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _admin_key() -> str | None:
    """The administrator's key of a server on this machine, if it is known here. No other server may be sent it."""
    if key := os.environ.get("TARN_ADMIN_KEY", "").strip():
        return key
    path = Path(os.environ.get("TARN_ADMIN_KEY_FILE") or ADMIN_KEY_FILE)
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Misuse(f"the key in {path} cannot be read, give one with TARN_KEY: {error}") from None


def _authorization(key: str | None) -> dict[str, str]:
    if not key:
        return {}
    if not key.isascii() or not key.isprintable():
        raise Misuse("the key holds characters that no key has")
    return {"Authorization": f"Bearer {key}"}


def _encoded(body: Any) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise Misuse(f"this cannot be sent as JSON: {error}") from None


def _object(response: httpx.Response, *members: str) -> dict[str, Any]:
    """The JSON object with these members that an answer holds. Raises ProblemAnswered if it is anybody else's."""
    try:
        document = response.json()
    except ValueError:
        document = None
    if isinstance(document, dict) and document.keys() >= set(members):
        return document
    raise _foreign(response)


def _foreign(response: httpx.Response) -> ProblemAnswered:
    """An answer that is somebody else's."""
    status, reason = response.status_code, response.reason_phrase
    detail = f"{response.url} answered {status} {reason}, which is not an answer of Tarn"
    return ProblemAnswered({"type": "about:blank", "title": reason, "status": status, "detail": detail})
