"""Host names looked up with a limit of our own: a system's resolver has none that it could be told.

Each name is looked up in a thread, and whoever asks waits for it no longer than they want. A thread that hangs in the
resolver cannot be ended, so there are only so many: when all of them hang, who asks next waits for one to come back,
for as long as for an answer.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

AT_ONCE = 32
"""Names that one process looks up at once."""

Resolve = Callable[[str, int], Sequence[str]]
"""The addresses of a host name. Raises OSError if there are none, TimeoutError if that takes too long to tell."""


class Lookups:
    """Resolves names as another does, and gives up in time. Sent to another process it has threads of its own there."""

    def __init__(self, resolve: Resolve, patience: float) -> None:
        self._resolve = resolve
        self._patience = patience
        self._free = threading.BoundedSemaphore(AT_ONCE)

    def __reduce__(self) -> tuple[Any, ...]:
        return Lookups, (self._resolve, self._patience)

    def __call__(self, host: str, port: int) -> Sequence[str]:
        end = time.monotonic() + self._patience
        if not self._free.acquire(timeout=self._patience):
            raise TimeoutError
        answer: Future[Sequence[str]] = Future()

        def look() -> None:
            try:
                answer.set_result(self._resolve(host, port))
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                answer.set_exception(error)
            finally:
                self._free.release()

        try:
            threading.Thread(target=look, name="lookup", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads
            self._free.release()
            raise OSError(str(error)) from error
        return answer.result(max(0.0, end - time.monotonic()))
