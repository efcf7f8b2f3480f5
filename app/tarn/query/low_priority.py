"""A process that stands back: whoever has something brief to do gets a processor before it.

One query keeps every processor busy for as long as it runs, and a small request, which passes from thread to thread
half a dozen times, waited behind it each time. So the process that answers queries

1. is nice        it gets what nobody else wants of a processor, which is everything where it is alone
2. leaves a part  of the processors to others altogether, while there are others: a nice thread, too, keeps a processor
                  for some milliseconds before anybody else is given it

Where it is not permitted, or the system has no such thing, nothing of this happens.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

LOWER = 10
"""How much nicer it is: it gets a tenth of a processor that another is busy on. Not less, as no read is to wait for a
flush that takes every processor there is."""


def stand_back(pid: int) -> None:
    """Lower the priority of a process that has begun, for good: the way back takes a privilege."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid) + LOWER)


class Processors:
    """The processors on which a process may run: all that we have, or while they are shared the latter half."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._all = os.sched_getaffinity(0) if sys.platform == "linux" else set()
        self._part = set(sorted(self._all)[(len(self._all) + 1) // 2 :]) or self._all
        self._are_shared = False

    @property
    def count(self) -> int:
        """On how many it may run now."""
        return max(1, len(self._part if self._are_shared else self._all))

    def share(self, shared: bool) -> bool:
        """Say whether others need processors, too. It holds at once, for what is running as well.

        Tells whether that is new.
        """
        if shared == self._are_shared or sys.platform != "linux":
            return False
        self._are_shared = shared
        with suppress(OSError):  # it has ended
            for thread in Path(f"/proc/{self._pid}/task").iterdir():
                with suppress(OSError):  # the thread has
                    os.sched_setaffinity(int(thread.name), self._part if shared else self._all)
        return True
