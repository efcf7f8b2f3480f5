"""Exponential back-off with a cap and full jitter."""

import random
from collections.abc import Callable, Iterator


def delays(base: float, cap: float, draw: Callable[[float, float], float] = random.uniform) -> Iterator[float]:
    """Yield the seconds to wait before each retry, endlessly: random between zero and a bound that doubles up to `cap`.

    Full jitter, so that writers that collided once do not collide again.
    """
    bound = base
    while True:
        yield draw(0, min(bound, cap))
        bound = min(bound * 2, cap)
