"""An answer that is good for a moment, so that a crowd that asks for it costs no more than one."""

import time
from asyncio import Lock
from collections.abc import Callable
from typing import Generic, TypeVar

from starlette.concurrency import run_in_threadpool

T = TypeVar("T")


class Recent(Generic[T]):
    """The last answer, and when it was given.

    One thread of the pool looks; the others who ask wait on the event loop and hold none, so that a look that hangs
    does not take the pool from the rest of the API.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._last: tuple[float, T] | None = None

    async def get(self, seconds: float, look: Callable[[], T]) -> T:
        """An answer that is at most this old."""
        async with self._lock:
            if self._last is None or time.monotonic() - self._last[0] > seconds:
                answer = await run_in_threadpool(look)
                self._last = (time.monotonic(), answer)
            return self._last[1]
