"""A worker as a child process: started, started again when it dies, and never outliving its parent."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import TracebackType

import structlog

from tarn.model.backoff import delays

log = structlog.get_logger(__name__)

COMMAND = (sys.executable, "-m", "tarn.cli", "worker", "--until-stdin-closes")
STOP_SECONDS = 20
"""Seconds that the child gets to hand its work back."""


class WorkerProcess:
    """Keeps one worker running while the context is open.

    The child holds the reading end of a pipe: when this process dies, however it dies, the pipe closes and the
    child stops by itself.
    """

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep_running, name="supervisor", daemon=True)

    def __enter__(self) -> "WorkerProcess":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        with self._lock:
            if self._process is not None:
                self._process.terminate()
        self._thread.join(STOP_SECONDS)
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                log.warning("worker did not stop in time and is killed", pid=self._process.pid)
                self._process.kill()

    def _keep_running(self) -> None:
        for delay in delays(base=1.0, cap=30.0):
            with self._lock:
                if self._stopping.is_set():
                    return
                self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE)  # noqa: S603 - our own command
            code = self._process.wait()
            if self._stopping.is_set():
                return
            log.error("worker died and is started again", code=code, wait=round(delay, 1))
            self._stopping.wait(delay)


def when_parent_dies(act: Callable[[], None]) -> None:
    """In the child: call `act` once the parent's end of the pipe is closed."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        act()

    threading.Thread(target=watch, name="parent", daemon=True).start()
