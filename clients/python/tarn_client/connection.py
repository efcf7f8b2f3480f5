"""HTTP connection to one server, with retries that are safe for reads and writes.

Reads change nothing. Every write carries an idempotency key, which is the same for every attempt: the server executes
the write once and replays the first response to a repeated request. So after a broken connection, a lost response or a
response that asks to wait (`Retry-After`), the same request is sent again, until `retry_timeout` seconds have passed
since it first failed.
"""

import copy
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from types import TracebackType
from typing import Any
from uuid import uuid4

import httpx

from tarn_client.errors import IncompleteResponse, InvalidRequest, LakeError, Problem, Unreachable

Params = Mapping[str, Any]
Content = bytes | Callable[[], Iterable[bytes]]
"""A body: bytes, or a function that returns its pieces, which is called for each attempt."""

KEY = "Idempotency-Key"
CONNECT_SECONDS, FIRST_WAIT, LONGEST_WAIT = 10.0, 0.1, 15.0
LARGEST_PAGE = 1000


class Connection:
    """An HTTP client for one server and one key."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        retry_timeout: float = 120.0,
        timeout: float = 120.0,
        user_agent: str = "tarn-client",
    ) -> None:
        """Open a connection pool. Raises InvalidRequest for an invalid URL, and for a key that no header can carry."""
        self.url = url
        self._retry_timeout = retry_timeout
        self._timeout = timeout
        self._http = httpx.Client(
            base_url=url,
            # A proxy cannot reach this machine's loopback interface, and must not receive its keys.
            trust_env=not is_loopback(url),
            headers={"User-Agent": user_agent} | _authorization(key),
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "Connection":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def with_retries(self, retry_timeout: float) -> "Connection":
        """Return a connection that shares this one's HTTP client and retries for another time."""
        other = copy.copy(self)
        other._retry_timeout = retry_timeout
        return other

    def with_timeout(self, timeout: float) -> "Connection":
        """Return a connection that shares this one's HTTP client and waits for another time for each part read."""
        other = copy.copy(self)
        other._timeout = timeout
        return other

    def read(
        self, path: str, params: Params | None = None, body: Any = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Return the JSON document of a GET, or of a POST if there is a body (a query). Raises LakeError."""
        method = "GET" if body is None else "POST"
        return _document(self.request(method, path, body, params=params, timeout=timeout))

    def read_with_etag(self, path: str) -> tuple[dict[str, Any], str]:
        """Return the JSON document of a GET, and its entity tag: `*` if it has none. Raises LakeError."""
        response = self.request("GET", path)
        return _document(response), response.headers.get("ETag", "*")

    def write(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Params | None = None,
        content: Content | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Send a write, which the server executes once however often it is sent. Raises LakeError.

        Return the JSON document of the response, or an empty one if it has none.
        """
        # Without retries no key is needed; and a few routes, whose responses must not be stored, take none.
        key = {KEY: uuid4().hex} if self._retry_timeout > 0 else {}
        response = self.request(
            method, path, body, params=params, content=content, headers={**key, **(headers or {})}, timeout=timeout
        )
        return _document(response) if response.content else {}

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Params | None = None,
        content: Content | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> httpx.Response:
        """Return the successful response to a request, which is retried unchanged. Raises LakeError.

        `timeout` is the time limit in seconds for each read from the server, if it differs from the connection's.
        """
        headers = dict(headers or {})
        if body is not None:
            content, headers["Content-Type"] = _encode(body), "application/json"

        def send() -> httpx.Response:
            return self._send(method, path, params, content, headers, timeout)

        return self._retry(send, while_locked=KEY in headers)

    @contextmanager
    def stream(
        self, path: str, media_type: str, params: Params | None = None, *, timeout: float | None = None
    ) -> Iterator[httpx.Response]:
        """Open a response of this media type, to be read as it arrives.

        Raises LakeError: until the response begins the same as `read`, and IncompleteResponse if it ends early.
        """
        headers = {"Accept": media_type}
        response = self._retry(lambda: self._send("GET", path, params, None, headers, timeout, stream=True))
        try:
            received = response.headers.get("Content-Type", "").partition(";")[0]
            if response.status_code != 204 and media_type not in ("*/*", received):
                raise _unexpected(response)
            yield response
        except httpx.RequestError as error:
            raise IncompleteResponse(f"the stream ended early: {_text(error)}") from error
        finally:
            response.close()

    def pages(
        self,
        path: str,
        params: Params | None = None,
        query: Mapping[str, Any] | None = None,
        limit: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Yield the pages of a list, or of a query (its body), up to `limit` results in total."""
        cursor, remaining = None, limit
        while remaining is None or remaining > 0:
            size = LARGEST_PAGE if remaining is None else min(LARGEST_PAGE, remaining)
            window = {"limit": size, "cursor": cursor}
            if query is None:
                response = self.request("GET", path, params={**(params or {}), **window}, timeout=timeout)
            else:
                response = self.request("POST", path, {**query, **window}, params=params, timeout=timeout)
            page = _document(response, "results", "next")
            yield page
            cursor, remaining = page["next"], None if remaining is None else remaining - len(page["results"])
            if cursor is None:
                return

    def each(self, path: str, params: Params | None = None, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the results of a list, over all of its pages or up to a limit."""
        for page in self.pages(path, params, limit=limit):
            yield from page["results"]

    def _send(
        self,
        method: str,
        path: str,
        params: Params | None,
        content: Content | None,
        headers: Mapping[str, str],
        timeout: float | None,
        stream: bool = False,
    ) -> httpx.Response:
        request = self._http.build_request(
            method,
            path,
            params={name: value for name, value in (params or {}).items() if value is not None},
            content=content() if callable(content) else content,
            headers=headers,
            timeout=httpx.Timeout(self._timeout if timeout is None else timeout, connect=CONNECT_SECONDS),
        )
        response = self._http.send(request, stream=stream)
        if not response.is_success:
            response.read()
            raise _problem(response)
        return response

    def _retry(self, send: Callable[[], httpx.Response], while_locked: bool = False) -> httpx.Response:
        """Send a request until it succeeds or its time for retries is over. Raises the failure of the last attempt."""
        failed: float | None = None
        attempts = 0
        while True:
            failure: LakeError
            try:
                return send()
            except httpx.RequestError as error:
                failure, requested_wait = self._unreachable(error), 0.0
            except Problem as problem:
                # While the first request with a key is still running, a repeated one gets `locked`.
                if not (_is_temporary(problem) or (while_locked and attempts and problem.slug == "locked")):
                    raise
                failure, requested_wait = problem, problem.retry_after or 0.0
            failed = time.monotonic() if failed is None else failed
            wait = max(requested_wait, _backoff(attempts))
            if time.monotonic() - failed + wait > self._retry_timeout:
                raise failure
            time.sleep(wait)
            attempts += 1

    def _unreachable(self, error: httpx.RequestError) -> Unreachable:
        if isinstance(error, httpx.ConnectError) and "SSL" in str(error):
            return Unreachable(f"the TLS connection to {self.url} failed: {_text(error)}")
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return Unreachable(f"no server answers at {self.url}: {_text(error)}", connected=False)
        return Unreachable(f"no complete response from {self.url}: {_text(error)}")


def is_loopback(url: str) -> bool:
    """Return whether a server's URL is on this machine. Raises InvalidRequest for an invalid URL."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidRequest(f"{url!r} is not the URL of a server: it must look like http://127.0.0.1:8000")
    try:
        return ip_address(parsed.host).is_loopback
    except ValueError:
        return parsed.host == "localhost"


def _authorization(key: str | None) -> dict[str, str]:
    if not key:
        return {}
    if not key.isascii() or not key.isprintable():
        raise InvalidRequest("the key contains characters that are not printable ASCII")
    return {"Authorization": f"Bearer {key}"}


def _encode(body: Any) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the body cannot be sent as JSON: {error}") from None


def _is_temporary(problem: Problem) -> bool:
    # A quota becomes free when data is deleted, not by waiting.
    return problem.retryable and problem.slug != "quota-exceeded"


def _backoff(attempts: int) -> float:
    """Return the seconds to wait: doubled with each attempt, with jitter so that clients do not retry in step."""
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0**attempts) * random.uniform(0.5, 1)  # noqa: S311 - no secret


def _problem(response: httpx.Response) -> Problem:
    """Return the error for a response that is not a success."""
    after = response.headers.get("Retry-After", "")
    retry_after = float(after) if after.isdecimal() else None
    try:
        document = response.json()
    except ValueError:
        document = None
    if isinstance(document, dict) and document.keys() >= {"type", "detail"}:
        return Problem(document, retry_after)
    return _unexpected(response, retry_after)


def _document(response: httpx.Response, *members: str) -> dict[str, Any]:
    """Return the response's JSON object. Raises Problem if it is none, or lacks one of these members."""
    try:
        document = response.json()
    except ValueError:
        document = None
    if isinstance(document, dict) and document.keys() >= set(members):
        return document
    raise _unexpected(response)


def _unexpected(response: httpx.Response, retry_after: float | None = None) -> Problem:
    """Return the error for a response that does not come from Tarn, such as a proxy's."""
    status, reason = response.status_code, response.reason_phrase
    detail = f"{response.url} answered {status} {reason}, which is not a response of Tarn"
    # Gateway errors are worth a retry.
    gateway = status in (502, 503, 504)
    document = {"type": "about:blank", "title": reason, "status": status, "detail": detail, "retryable": gateway}
    return Problem(document, retry_after)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
