"""Return free heap memory to the operating system (`malloc_trim`).

glibc keeps an allocation arena for each thread that was active concurrently. Memory freed in an arena stays there in
fragments, so a process that runs for weeks grows although it does not use more memory.
"""

import ctypes
from threading import Event, Thread
from types import TracebackType

EVERY = 30.0
"""Seconds between two trims. One takes some milliseconds per hundred megabytes."""


def trim() -> None:
    """Return unused pages to the operating system; does nothing with an allocator other than glibc's."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class PeriodicTrim:
    """Context manager with a background thread that periodically returns free memory to the operating system."""

    def __init__(self, every: float = EVERY) -> None:
        self._every = every
        self._stop = Event()
        self._thread = Thread(target=self._run, name="malloc-trim", daemon=True)

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
            trim()
