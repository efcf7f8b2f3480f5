"""Time-to-live cache of one value: concurrent requests share one computation."""

import time
from asyncio import Lock
from collections.abc import Callable
from typing import Generic, TypeVar

from tarn.api.http.limits.threads import Threads

T = TypeVar("T")


class TtlCache(Generic[T]):
    """The last value and when it was computed.

    One thread computes it; other requests wait on the event loop and hold no thread.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._lock = Lock()
        self._last: tuple[float, T] | None = None

    async def get(self, seconds: float, read: Callable[[], T]) -> T:
        """Return a value that is at most this many seconds old."""
        async with self._lock:
            if self._last is None or time.monotonic() - self._last[0] > seconds:
                value = await self._threads.run(read)
                self._last = (time.monotonic(), value)
            return self._last[1]
