"""Waiting for what others do, without holding a thread: looking again, quick at first, then seldom."""

import time
from collections.abc import AsyncIterator

from anyio import sleep

from tarn.api.http.services.container import Services

FIRST_LOOK, LAST_LOOK = 0.02, 0.5
"""Seconds between two looks."""


async def poll_intervals(house: Services, seconds: float) -> AsyncIterator[None]:
    """Goes round whenever it is time to look again; ends when the time is up, or when the server stops."""
    deadline, pause = time.monotonic() + seconds, FIRST_LOOK
    while (left := deadline - time.monotonic()) > 0 and not house.stopping.is_set():
        await sleep(min(pause, left))
        pause = min(LAST_LOOK, pause * 1.5)
        yield
