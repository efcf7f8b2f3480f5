"""DNS lookups with a timeout, which the system's resolver does not offer.

Each name is looked up in a thread, and the caller waits for it no longer than the timeout. A thread that hangs in the
resolver cannot be ended, so their number is limited: if all of them hang, the next caller waits for a free one, within
the same timeout.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

AT_ONCE = 32
"""Names that one process looks up concurrently."""

Resolve = Callable[[str, int], Sequence[str]]
"""Function that returns the addresses of a host name. Raises OSError if there are none, TimeoutError on a timeout."""


class Lookups:
    """Resolver with a timeout around another one. When pickled to another process it uses its own threads there."""

    def __init__(self, resolve: Resolve, timeout_seconds: float) -> None:
        self._resolve = resolve
        self._timeout_seconds = timeout_seconds
        self._free = threading.BoundedSemaphore(AT_ONCE)

    def __reduce__(self) -> tuple[Any, ...]:
        return Lookups, (self._resolve, self._timeout_seconds)

    def __call__(self, host: str, port: int) -> Sequence[str]:
        end = time.monotonic() + self._timeout_seconds
        if not self._free.acquire(timeout=self._timeout_seconds):
            raise TimeoutError
        future: Future[Sequence[str]] = Future()

        def look_up() -> None:
            try:
                future.set_result(self._resolve(host, port))
            except BaseException as error:  # noqa: BLE001 - raised again in the waiting caller
                future.set_exception(error)
            finally:
                self._free.release()

        try:
            threading.Thread(target=look_up, name="lookup", daemon=True).start()
        except RuntimeError as error:  # the system cannot start another thread
            self._free.release()
            raise OSError(str(error)) from error
        return future.result(max(0.0, end - time.monotonic()))
