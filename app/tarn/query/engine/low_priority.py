"""CPU affinity of the low-priority query process, so that queries do not delay short requests.

One query keeps every processor busy for as long as it runs. A small request passes from thread to thread half a dozen
times, and waited for a processor each time. So the query process

1. is nice        (`tarn.child_process`) it gets the processor time that no other process needs
2. leaves a part  of the processors to other work, while there is any: even a nice thread keeps a processor for some
                  milliseconds before another thread gets it

Where this is not permitted, or the system does not support it, both are skipped.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path


class CpuAffinity:
    """The processors on which a process may run: all of ours, or, while they are shared, the second half of them."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._all = os.sched_getaffinity(0) if sys.platform == "linux" else set()
        self._part = set(sorted(self._all)[(len(self._all) + 1) // 2 :]) or self._all
        self._are_shared = False

    @property
    def count(self) -> int:
        """Return on how many processors the process may run now."""
        return max(1, len(self._part if self._are_shared else self._all))

    def set_cpus_shared(self, is_shared: bool) -> bool:
        """Set whether other work needs processors, too. Takes effect at once, also for running threads.

        Return whether the setting changed.
        """
        if is_shared == self._are_shared or sys.platform != "linux":
            return False
        self._are_shared = is_shared
        with suppress(OSError):  # the process has ended
            for thread in Path(f"/proc/{self._pid}/task").iterdir():
                with suppress(OSError):  # the thread has ended
                    os.sched_setaffinity(int(thread.name), self._part if is_shared else self._all)
        return True
