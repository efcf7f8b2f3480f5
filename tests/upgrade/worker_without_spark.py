"""`tarn worker` of whichever version is on the path, whose kernels run in this process and not on Spark.

    PYTHONPATH=… python tests/upgrade/worker_without_spark.py

A JVM for each version would be most of the time that a test takes. PostgreSQL only: ADBC's SQLite must not live beside
Python's own.
"""

import tempfile
from collections.abc import Iterator
from typing import Any

from tarn.errors import Internal, TarnError
from tarn.main import run_worker
from tarn.settings import load_settings
from tarn.worker.flusher import SparkFlusher


class Here:
    """Runs tasks one after the other."""

    cores = 1

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def run(self, slots: list[list[Any]]) -> Iterator[tuple[int, Any]]:
        with tempfile.TemporaryDirectory() as scratch:
            for task, output in self._kernel.run([task for slot in slots for task in slot], scratch):
                unknown = isinstance(output, Exception) and not isinstance(output, TarnError)
                yield task.number, Internal(repr(output)) if unknown else output

    def run_here(self, task: Any) -> Any:
        ((_, output),) = self.run([[task]])
        return output


if __name__ == "__main__":
    SparkFlusher._on_spark = lambda self: Here(self._kernel)  # type: ignore[method-assign,assignment,return-value]
    run_worker(load_settings())
