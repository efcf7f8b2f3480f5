"""Steps that a process says it has reached, and what befalls it at one of them."""

import os
import signal
import sys
from collections.abc import Callable


def saying(step: str | None, fault: str) -> Callable[[str], None]:
    """Say each step; at this one, the first time, die or wait."""
    left = [step]

    def reached(name: str) -> None:
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
        if name == left[0]:
            left.clear()
            left.append(None)
            if fault == "KILL":
                os.kill(os.getpid(), signal.SIGKILL)
            sys.stdin.read()

    return reached
