"""Waiting for a state in SQL, on the event loop: a waiting request holds no thread."""

import time
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from anyio import move_on_after

from tarn.api.http.services.container import Services

Result = TypeVar("Result")

FIRST_INTERVAL, LONGEST_INTERVAL = 0.05, 5.0
"""The first and the longest interval in seconds after which the state is read without a notification."""


async def wait_until(
    services: Services, seconds: float, topics: Collection[str], check: Callable[[], Awaitable[Result | None]]
) -> Result | None:
    """Call `check` until it returns a result, for these seconds at most, or until the server shuts down.

    It is called at least once, again after every notification of these topics, and after increasing intervals in case
    a notification is lost.
    """
    deadline, interval = time.monotonic() + seconds, FIRST_INTERVAL
    with services.database.notifications.subscribed_on_loop(topics) as woken:
        while (result := await check()) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or services.stopping.is_set():
                return None
            with move_on_after(min(interval, remaining)):
                await woken.wait()
            woken.clear()
            interval = min(LONGEST_INTERVAL, interval * 2)
    return result
