"""An answer that is good for a moment, so that a crowd that asks for it costs no more than one."""

import time
from asyncio import Lock
from collections.abc import Callable
from typing import Generic, TypeVar

from tarn.api.http.limits.threads import Threads

T = TypeVar("T")


class TtlCache(Generic[T]):
    """The last answer, and when it was given.

    One thread looks; the others who ask wait on the event loop and hold none.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._lock = Lock()
        self._last: tuple[float, T] | None = None

    async def get(self, seconds: float, look: Callable[[], T]) -> T:
        """An answer that is at most this old."""
        async with self._lock:
            if self._last is None or time.monotonic() - self._last[0] > seconds:
                answer = await self._threads.run(look)
                self._last = (time.monotonic(), answer)
            return self._last[1]
