"""Polling with increasing intervals, on the event loop: a waiting request holds no thread."""

import time
from collections.abc import AsyncIterator

from anyio import sleep

from tarn.api.http.services.container import Services

FIRST_INTERVAL, LONGEST_INTERVAL = 0.02, 0.5
"""The first and the longest interval between two polls, in seconds."""


async def poll_intervals(services: Services, seconds: float) -> AsyncIterator[None]:
    """Yield whenever it is time to poll again. Ends after these seconds, or when the server shuts down."""
    deadline, pause = time.monotonic() + seconds, FIRST_INTERVAL
    while (seconds_left := deadline - time.monotonic()) > 0 and not services.stopping.is_set():
        await sleep(min(pause, seconds_left))
        pause = min(LONGEST_INTERVAL, pause * 1.5)
        yield
