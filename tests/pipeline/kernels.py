"""Kernels without Spark: the same code in a child process, as ADBC's SQLite must not share a process with Python's."""

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from tarn.errors import Internal, TarnError
from tarn.model.ftm.schema_buckets import buckets
from tarn.pipeline.tasks.journal_slice import Journal, JournalSlice
from tarn.pipeline.tasks.kernel import Kernel
from tarn.pipeline.tasks.merge_files import FoldRange
from tarn.pipeline.tasks.task import Task
from tarn.settings import Settings
from tarn.storage.connection import Connection

Result = TypeVar("Result")


class DirectKernels:
    """Runs tasks one after the other in a child process."""

    cores = 2

    def __init__(self, settings: Settings, pool: ProcessPoolExecutor) -> None:
        self._settings = settings
        self._pool = pool

    def run(self, partitions: list[list[Task[Result]]]) -> Iterator[tuple[int, Result | TarnError]]:
        tasks = [task for partition in partitions for task in partition]
        connection = Connection.from_settings(self._settings)
        kernel = Kernel(Journal.at(self._settings.database_url), connection, buckets(), "256m")
        yield from self._pool.submit(run_tasks, kernel, tasks).result()


@dataclass(frozen=True)
class DyingKernel(Kernel):
    """A kernel whose process is killed in its first task, after the task's files were written but before they are
    reported.
    """

    died: str = ""
    """Path of a file that is created when the process dies."""

    def run(self, tasks: Iterable[Task[Result]], scratch: str) -> Iterator[tuple[Task[Result], Result | Exception]]:
        for result in super().run(tasks, scratch):
            if not Path(self.died).exists():
                Path(self.died).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield result


@dataclass(frozen=True)
class BusyKernel(Kernel):
    """A kernel whose compactions loop forever in pure Python while a file exists."""

    busy: str = ""

    def run(self, tasks: Iterable[Task[Result]], scratch: str) -> Iterator[tuple[Task[Result], Result | Exception]]:
        tasks = list(tasks)
        if any(isinstance(task, FoldRange) for task in tasks) and Path(self.busy).exists():
            Path(f"{self.busy}-{os.getpid()}").touch()
            while True:
                pass
        yield from super().run(tasks, scratch)


def child() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def run_tasks(kernel: Kernel, tasks: list[Task[Result]]) -> list[tuple[int, Result | TarnError]]:
    with tempfile.TemporaryDirectory() as scratch:
        return [
            (task.number, _known(output) if isinstance(output, Exception) else output)
            for task, output in kernel.run(tasks, scratch)
        ]


def read_both_ways(journal: Journal, journal_slice: JournalSlice) -> tuple[pa.Table, pa.Table]:
    """Return the events of a slice in order, read as a task reads them and by the slower way for unreadable rows."""
    with journal.open_reader() as opened:
        with opened.events(journal_slice) as incoming:
            events = incoming.read_all()
        readable = opened.readable_events(journal_slice)
    real = (table.filter(pc.not_equal(table.column("ord"), 0)).sort_by("ord") for table in (events, readable))
    quickly, one_by_one = real
    return quickly, one_by_one


def _known(error: Exception) -> TarnError:
    return error if isinstance(error, TarnError) else Internal(f"{type(error).__name__}: {error}")
