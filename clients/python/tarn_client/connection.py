"""HTTP to one server: what may be sent again is sent again, and counts once.

Reads change nothing. Every write carries an idempotency key, which stays the same whenever it is sent: the server
replays the first answer to the second request. So after a broken connection, an answer that never came, or a server
that asks to wait (`Retry-After`), the same request goes out again, until patience is at its end.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from uuid import uuid4

import httpx

from tarn_client.errors import BrokenOff, LakeError, Problem, Unreachable

Params = Mapping[str, Any]

KEY = "Idempotency-Key"
CONNECT_SECONDS, FIRST_WAIT, LONGEST_WAIT = 10.0, 0.1, 15.0


class Connection:
    """Speaks to one server with one key."""

    def __init__(self, url: str, key: str | None, patience: float, timeout: float) -> None:
        self._patience = patience
        self._http = httpx.Client(
            base_url=url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "Connection":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, path: str, params: Params | None = None, body: Any = None) -> Any:
        """The JSON that a read answers; a body makes it a query. Raises LakeError."""
        method, content = ("GET", {}) if body is None else ("POST", {"json": body})
        return self._repeated(lambda: self._answer(method, path, params=_given(params), **content)).json()

    def write(
        self,
        method: str,
        path: str,
        params: Params | None = None,
        body: Any = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The JSON that a write answers, made once however often it had to be sent. Raises LakeError."""
        # The same bytes under the same key: this is what makes a repetition one.
        named = {**(headers or {}), KEY: uuid4().hex}
        sent: dict[str, Any] = {"json": body} if content is None else {"content": content}
        answer = self._repeated(
            lambda: self._answer(method, path, params=_given(params), headers=named, **sent), while_locked=True
        )
        return answer.json() if answer.content else None

    @contextmanager
    def stream(self, path: str, form: str, params: Params | None = None) -> Iterator[httpx.Response]:
        """An answer of this media type, to be read as it arrives.

        Raises LakeError: until it begins what `read` does, and BrokenOff where it does not come to its end.
        """
        request = self._http.build_request("GET", path, params=_given(params), headers={"Accept": form})

        def begun() -> httpx.Response:
            response = self._http.send(request, stream=True)
            if not response.is_success:
                response.read()
                raise _problem(response)
            return response

        response = self._repeated(begun)
        try:
            yield response
        except httpx.TransportError as error:
            raise BrokenOff(f"the stream broke off: {_words(error)}") from error
        finally:
            response.close()

    def _answer(self, method: str, path: str, **options: Any) -> httpx.Response:
        response = self._http.request(method, path, **options)
        if not response.is_success:
            raise _problem(response)
        return response

    def _repeated(self, send: Callable[[], httpx.Response], while_locked: bool = False) -> httpx.Response:
        """The answer to a request that may be sent again. Raises what the last try came to."""
        begun, tries = time.monotonic(), 0
        while True:
            failure: LakeError
            try:
                return send()
            except httpx.TransportError as error:
                failure, asked = Unreachable(f"no whole answer from {self._http.base_url}: {_words(error)}"), 0.0
            except Problem as problem:
                # While the first request with a key is still being answered, the second finds it locked.
                if not (problem.retryable or (while_locked and tries and problem.slug == "locked")):
                    raise
                failure, asked = problem, problem.retry_after or 0.0
            wait = max(asked, _backoff(tries))
            if time.monotonic() - begun + wait > self._patience:
                raise failure
            time.sleep(wait)
            tries += 1


def _backoff(tries: int) -> float:
    """Seconds to wait: twice as long every time, and never in step with others who wait for the same."""
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0**tries) * random.uniform(0.5, 1)  # noqa: S311 - no secret


def _problem(response: httpx.Response) -> Problem:
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        # A proxy's answer: those that say "not now" are worth another try.
        gateway = response.status_code in (502, 503, 504)
        detail = f"{response.url} answered {response.status_code} {response.reason_phrase}"
        document = {"status": response.status_code, "detail": detail, "retryable": gateway}
    after = response.headers.get("Retry-After", "")
    return Problem(document, float(after) if after.isdecimal() else None)


def _given(params: Params | None) -> dict[str, Any]:
    return {name: value for name, value in (params or {}).items() if value is not None}


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
