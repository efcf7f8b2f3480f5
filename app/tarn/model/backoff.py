"""How long to wait before trying again: exponential, capped, with full jitter."""

import random
from collections.abc import Callable, Iterator


def delays(base: float, cap: float, draw: Callable[[float, float], float] = random.uniform) -> Iterator[float]:
    """Seconds to wait before each further try, without end: each drawn from zero to a bound that doubles up to `cap`.

    Full jitter, so that those who collided once do not meet again.
    """
    bound = base
    while True:
        yield draw(0, min(bound, cap))
        bound = min(bound * 2, cap)
