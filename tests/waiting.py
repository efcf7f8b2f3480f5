"""Waiting for something to hold, without taking the processor from those who are to bring it about."""

import time
from collections.abc import Callable

PAUSE = 0.005
"""Seconds between two looks. Without it a test takes a core for itself, and Python's lock from its own threads."""


def wait_until(holds: Callable[[], object], seconds: float = 60) -> float:
    """Look again and again until this holds; how long that took. Fails if it does not in so many seconds."""
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() < begun + seconds, "what was waited for never came"
        time.sleep(PAUSE)
    return time.monotonic() - begun
