"""Polling for a condition, without occupying the CPU that the tested code needs."""

import time
from collections.abc import Callable

PAUSE = 0.005
"""Seconds between two checks. Without a pause a test would occupy a core, and its own threads would compete for the
GIL.
"""


def wait_until(condition: Callable[[], object], seconds: float = 60) -> float:
    """Poll until the condition holds; return how long that took. Fails after this many seconds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, "the condition was not met in time"
        time.sleep(PAUSE)
    return time.monotonic() - began
