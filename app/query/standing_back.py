"""Threads that stand back: whoever has something brief to do gets a processor before them.

One query keeps every processor busy for as long as it runs, and a small request, which passes from thread to thread
half a dozen times, waited behind it each time. So threads that work on queries

1. are nice       they get what nobody else wants of a processor, which is everything where they are alone
2. leave a part   of the processors to others altogether, while there are others: a nice thread, too, keeps a processor
                  for some milliseconds before anybody else is given it

Only Linux has priorities of threads. Elsewhere, and where it is not permitted, nothing of this happens.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from threading import get_native_id

LOWER = 10
"""How much nicer such a thread is: it gets a tenth of a processor that another is busy on. Not less, as it may hold
what others wait for: Python, or a lock of DuckDB's."""


def stand_back() -> None:
    """Lower the priority of this thread, and of those that it starts, for good: the way back takes a privilege."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), _priority(get_native_id()) + LOWER)


class Processors:
    """The processors on which threads that stand back may run: all, or while they are shared the latter half.

    Made by a thread that does not stand back itself.
    """

    def __init__(self) -> None:
        self._all = os.sched_getaffinity(0) if sys.platform == "linux" else set()
        self._part = set(sorted(self._all)[(len(self._all) + 1) // 2 :]) or self._all
        self._usual = _priority(0)
        self.are_shared = False

    def share(self, shared: bool) -> None:
        """Say whether others need processors, too. It holds at once, for queries that are running as well."""
        if shared != self.are_shared:
            self.are_shared = shared
            for thread in self._standing_back():
                self._keep_to(thread)

    def stand_back(self) -> None:
        """Let this thread stand back from now on, and keep to its part."""
        stand_back()
        self._keep_to(get_native_id())

    def _standing_back(self) -> Iterator[int]:
        """Threads that are nicer than usual, which are ours and those that they started: DuckDB's, for one."""
        for name in os.listdir("/proc/self/task") if sys.platform == "linux" else ():
            with suppress(OSError):  # it has ended
                if _priority(int(name)) > self._usual:
                    yield int(name)

    def _keep_to(self, thread: int) -> None:
        if sys.platform == "linux":
            with suppress(OSError):
                os.sched_setaffinity(thread, self._part if self.are_shared else self._all)


def _priority(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)
