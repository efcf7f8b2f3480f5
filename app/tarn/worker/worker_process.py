"""Worker as a child process: started, restarted when it dies, and stopped when its parent dies."""

import threading
from types import TracebackType

import structlog

from tarn.child_process import ChildProcess
from tarn.model.work.backoff import delays

log = structlog.get_logger(__name__)

STOP_SECONDS = 20
"""How long the child may take to return its jobs to the queue before it is killed."""


class WorkerProcess:
    """Supervisor that keeps one worker process running while the context is open.

    When this process dies, even by SIGKILL, the child's standard input closes and it stops
    (`tarn.child_process.run_when_parent_dies`).
    """

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._process: ChildProcess | None = None
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
            if self._process is not None and self._process.exit_reason is None:
                log.warning("worker did not stop in time and is killed", pid=self._process.pid, seconds=STOP_SECONDS)
                self._process.kill()

    def _keep_running(self) -> None:
        for delay in delays(base=1.0, cap=30.0):
            with self._lock:
                if self._stopping.is_set():
                    return
                self._process = ChildProcess("tarn.cli", "worker", "--until-stdin-closes", output=None)
            self._process.wait()
            self._process.end()
            if self._stopping.is_set():
                return
            log.error("worker process died and is restarted", reason=self._process.exit_reason, wait=round(delay, 1))
            self._stopping.wait(delay)
