"""Task kernel: runs tasks one after the other in an executor's process."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import duckdb
from adbc_driver_manager import OperationalError

from tarn.errors import Unavailable
from tarn.pipeline.tasks.data_files import FilePuts
from tarn.pipeline.tasks.journal_slice import Journal
from tarn.pipeline.tasks.task import Task, TaskContext
from tarn.storage.connection import Connection
from tarn.storage.store import Store

Result = TypeVar("Result")

TRANSIENT_ERRORS = (OperationalError, duckdb.IOException, duckdb.HTTPException)
"""Errors that drivers raise while a database or a store is unavailable."""

TASKS_AHEAD = 4
"""Tasks that may run before the files of an earlier one are durable."""


@dataclass(frozen=True)
class Kernel:
    """Runs tasks in the current process. It can be pickled and used in another process."""

    journal: Journal
    connection: Connection
    buckets: dict[str, str]
    memory: str
    threads: int = 1

    def run(self, tasks: Iterable[Task[Result]], scratch: str) -> Iterator[tuple[Task[Result], Result | Exception]]:
        """Run the tasks and yield each with its result, or with the error that it failed with.

        An error of one task does not affect the others: they may be of other datasets. The files of a task are put
        while the next tasks run.
        """
        running: deque[tuple[Task[Result], Callable[[], Result] | Exception]] = deque()
        with FilePuts() as puts, ExitStack() as opened:
            context = TaskContext(
                Store(self.connection), puts, self.journal, self.buckets, self.memory, self.threads, scratch, opened
            )
            for task in tasks:
                running.append((task, _attempt(partial(task.run, context))))
                if len(running) > TASKS_AHEAD:
                    yield _finish(*running.popleft())
            while running:
                yield _finish(*running.popleft())

    def warm_up(self, scratch: str) -> None:
        """Import what flush tasks use, and open what they open first."""
        from tarn.pipeline.tasks import append_only_fold, flush_segment  # noqa: F401 - loaded for the tasks that follow

        with FilePuts() as puts, ExitStack() as opened:
            context = TaskContext(
                Store(self.connection), puts, self.journal, self.buckets, self.memory, self.threads, scratch, opened
            )
            context.fold_connection.execute("SELECT count(*) FROM range(10)").fetchall()


def _attempt(step: Callable[[], Result]) -> Result | Exception:
    """Return what a step of a task returns, or its error."""
    try:
        return step()
    except TRANSIENT_ERRORS as error:
        return Unavailable(f"a task could not read or write: {type(error).__name__}", retry_after=2)
    except Exception as error:  # noqa: BLE001 - passed to the driver
        return error


def _finish(task: Task[Result], finish: Callable[[], Result] | Exception) -> tuple[Task[Result], Result | Exception]:
    return task, finish if isinstance(finish, Exception) else _attempt(finish)
