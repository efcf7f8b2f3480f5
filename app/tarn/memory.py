"""Free memory goes back to the system.

Threads come and go with requests, and glibc keeps an arena for each that was busy at once: what they freed stays with
them, in pieces, and a process that lives for weeks grows without holding anything more.
"""

import ctypes
from threading import Event, Thread
from types import TracebackType

EVERY = 30.0
"""Seconds. It takes some milliseconds for a hundred megabytes."""


def give_back() -> None:
    """Let the system have the pages that nothing lies on; with an allocator other than glibc's, nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class PeriodicTrim:
    """Gives back what is free, again and again, until the block ends."""

    def __init__(self, every: float = EVERY) -> None:
        self._every = every
        self._stop = Event()
        self._thread = Thread(target=self._run, name="gives back memory", daemon=True)

    def __enter__(self) -> "PeriodicTrim":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            give_back()
