"""Run `tarn worker` of the version on the path, with its kernels in this process instead of on Spark.

    PYTHONPATH=… python tests/upgrade/worker_without_spark.py PACKAGE

PACKAGE is the version's import package: `app` up to 0.1, `tarn` after it.

A JVM for each version would take most of a test's time. PostgreSQL only: ADBC's SQLite library must not be loaded into
the same process as Python's own.
"""

import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from typing import Any


class InProcessKernels:
    """Runs the tasks of kernels one after the other."""

    cores = 1

    def __init__(self, kernel: Any, errors: Any) -> None:
        self._kernel = kernel
        self._errors = errors

    def run(self, partitions: list[list[Any]]) -> Iterator[tuple[int, Any]]:
        with tempfile.TemporaryDirectory() as scratch:
            for task, output in self._kernel.run([task for partition in partitions for task in partition], scratch):
                unknown = isinstance(output, Exception) and not isinstance(output, self._errors.TarnError)
                yield task.number, self._errors.Internal(repr(output)) if unknown else output

    def run_here(self, task: Any) -> Any:
        """Run one task. Versions up to 0.1 count statistics by this method."""
        ((_, output),) = self.run([[task]])
        return output


if __name__ == "__main__":
    package = sys.argv[1]
    errors, flusher = import_module(f"{package}.errors"), import_module(f"{package}.worker.flusher")
    flusher.SparkFlusher._on_spark = lambda self: InProcessKernels(self._kernel, errors)
    import_module(f"{package}.main").run_worker(import_module(f"{package}.settings").load_settings())
