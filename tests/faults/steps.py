"""Report the steps that a process reaches, and inject a fault at one of them."""

import os
import signal
import sys
from collections.abc import Callable


def step_reporter(step: str | None, fault: str) -> Callable[[str], None]:
    """Return a callback that prints each step and, when `step` is first reached, kills the process or waits."""
    pending = [step]

    def reached(name: str) -> None:
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
        if name == pending[0]:
            pending.clear()
            pending.append(None)
            if fault == "KILL":
                os.kill(os.getpid(), signal.SIGKILL)
            sys.stdin.read()

    return reached
