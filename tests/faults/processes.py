"""Workers in child processes that report each step they reach."""

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.server import clean_environment

WORKER = "tests.faults.worker_process"

ROOT = Path(__file__).parents[2]


class WorkerProcess:
    """A worker in a child process, which prints each step it reaches."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def wait_reached(self, step: str) -> None:
        """Wait until the worker has printed this step. Fails if it ends before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == step:
                return
        raise AssertionError(f"the worker never reached {step!r}: {self._log.read_text()[-2000:]}")

    def wait_exited(self) -> int:
        """Wait until the process has exited; return its exit code."""
        return self._process.wait(60)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self, database: Path) -> None:
        """Suspend all threads of the process at its step, while none of them holds SQLite's write lock."""
        for _ in range(100):
            self.send(signal.SIGSTOP)
            if is_writable(database):
                return
            self.send(signal.SIGCONT)
        raise AssertionError("the worker never releases the write lock of the database")

    def resume(self) -> None:
        """Let a suspended process continue beyond its step."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.send(signal.SIGCONT)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def is_writable(database: Path) -> bool:
    """Return whether no other connection holds the write lock."""
    with closing(sqlite3.connect(database, timeout=0.2, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
    return True


@contextmanager
def start_worker(module: str, folder: Path, *fault: str, **settings: str) -> Iterator[WorkerProcess]:
    """Run a module in a child process, with a fault to inject at a step; kill the process when the block ends."""
    log = folder / "worker.log"
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *fault],
            cwd=folder,
            env=clean_environment(**settings, PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    running = WorkerProcess(process, log)
    try:
        yield running
    finally:
        running.close()
