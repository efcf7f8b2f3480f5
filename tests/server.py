"""A real server process, started on a free port and stopped reliably."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

import httpx

READY = "Tarn listens on "

WITHOUT_SPARK = {
    "tarn": {"TARN_MAINTENANCE_INTERVAL": "86400", "TARN_SPARK_WARM_UP": "false"},
    "app": {"TARN_UPKEEP_EVERY": "86400"},
}
"""Settings with which no job starts Spark unless a test requests it, by the import package of the version: `app` up to
0.1."""


class Server:
    """A running `tarn serve` or `tarn api`, and clients for it."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, greeting: list[str], log: Path) -> None:
        self.process = process
        self.folder = folder
        self.greeting = greeting
        self.log = log
        self.url = greeting[-1].removeprefix(READY).strip()
        self._clients: list[httpx.Client] = []

    @property
    def admin_key(self) -> str:
        return (self.folder / "data" / "admin.key").read_text().strip()

    def client(self, key: str | None = None) -> httpx.Client:
        """Return a client with this key, or the administrator's; it is closed with the server."""
        headers = {"Authorization": f"Bearer {key or self.admin_key}"}
        self._clients.append(httpx.Client(base_url=self.url, headers=headers, timeout=30))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


@contextmanager
def running(
    folder: Path, command: str = "serve", package: str = "tarn", program: Sequence[str] = (), **environment: str
) -> Iterator[Server]:
    """Start a server with `./data` in this folder. Raises with its output if it does not start."""
    log = folder / f"{command}.log"
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [*(program or (sys.executable, "-m", f"{package}.cli")), command],
            cwd=folder,
            env=clean_environment(
                **({"TARN_PORT": "0", "TARN_FLUSH_AGE": "86400"} | WITHOUT_SPARK[package] | environment)
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    try:
        server = Server(process, folder, _greeting(process.stdout, log), log)
        with closing(server):
            yield server
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
        process.stdout.close()


def clean_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without Tarn's settings, plus these variables."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith("TARN_")} | variables


def _greeting(stdout: IO[str], log: Path) -> list[str]:
    lines = []
    for line in stdout:
        lines.append(line)
        if line.startswith(READY):
            return lines
    raise AssertionError(f"the server did not start: {''.join(lines)}{log.read_text()}")
