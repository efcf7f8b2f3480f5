"""Run kernel tasks on Spark and collect their outputs."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import structlog
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from tarn.errors import Backpressure, DatasetNotFound, Internal, QuotaExceeded, StorageFull, TarnError, Unavailable
from tarn.model.ids import new_id
from tarn.model.work.cancellation import current
from tarn.pipeline.executor_timeout import cancel_without_executors
from tarn.pipeline.tasks.kernel import Kernel
from tarn.pipeline.tasks.task import Task

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

TRANSIENT_ERRORS = {
    error.slug: error for error in (StorageFull, Unavailable, Backpressure, QuotaExceeded, DatasetNotFound)
}
"""Errors of a task that are caused by its environment and are passed on as they are; all others become Internal."""


class SparkTaskRunner:
    """Runs tasks on a Spark session."""

    def __init__(self, session: SparkSession, kernel: Kernel, executor_timeout: float) -> None:
        self._session = session
        self._kernel = kernel
        self._executor_timeout = executor_timeout

    @property
    def cores(self) -> int:
        return int(self._session.sparkContext.defaultParallelism)

    def warm_up(self) -> None:
        """Start a Python process for every core, and let each import what tasks use. Raises as `run` does."""
        context = self._session.sparkContext
        prepared = context.parallelize(range(self.cores), self.cores)
        with self._spark_job(context):
            prepared.foreachPartition(_WarmUp(self._kernel))

    def run(self, partitions: list[list[Task[Result]]]) -> Iterator[tuple[int, Result | TarnError]]:
        """Run one Spark job with these partitions. Yields task numbers with their outputs or errors.

        Raises NoExecutor if Spark has no executor for longer than the timeout, and JobStopped if the job that this
        thread runs is cancelled: the driver ends the Spark job at once, and executors kill the Python processes of its
        tasks.
        """
        count = len(partitions)
        # If there are fewer partitions than cores, each task uses several threads to read from the store.
        kernel = replace(self._kernel, threads=max(1, self.cores // count))
        # The job's data are the numbers of the partitions; the tasks are pickled with the function. No DataFrame: there
        # is nothing to optimise, and loading Spark SQL takes longer than the first flush.
        context = self._session.sparkContext
        numbers = context.parallelize(range(count), count).mapPartitions(_RunPartition(kernel, partitions))
        with self._spark_job(context):
            collected = numbers.collect()
        for number, output in collected:
            yield number, _to_error(output) if isinstance(output, _Failure) else output

    @contextmanager
    def _spark_job(self, context: SparkContext) -> Iterator[None]:
        """Run one Spark job that ends when Spark has no executor, or when the job of this thread is cancelled."""
        cancellation, group = current(), new_id()
        cancellation.check()
        # Job group and pool are thread-local: every Python thread has its own thread in the JVM (pinned thread mode).
        context.setJobGroup(group, "tarn", interruptOnCancel=True)
        # Within a pool, jobs run first come, first served; between pools, cores are shared.
        context.setLocalProperty("spark.scheduler.pool", cancellation.pool)
        try:
            with (
                cancellation.interrupting(lambda: context.cancelJobGroup(group)),
                cancel_without_executors(context, self._executor_timeout, group),
            ):
                yield
        except Py4JJavaError:
            cancellation.check()
            raise


class _WarmUp:
    """The function that prepares an executor's Python process. It is pickled with the kernel, and so imports all that
    the kernel does."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __call__(self, _: Iterable[int]) -> None:
        with tempfile.TemporaryDirectory(prefix="tarn-") as scratch:
            self._kernel.warm_up(scratch)


class _Failure(NamedTuple):
    """Error of a task, with a text that may be logged (credentials are redacted)."""

    slug: str
    detail: str


class _RunPartition(Generic[Result]):
    """The function that runs in an executor. It is pickled, so it refers to nothing of this process."""

    def __init__(self, kernel: Kernel, partitions: list[list[Task[Result]]]) -> None:
        self._kernel = kernel
        self._partitions = partitions

    def __call__(self, numbers: Iterable[int]) -> Iterator[tuple[int, Result | _Failure]]:
        with tempfile.TemporaryDirectory(prefix="tarn-") as scratch:
            for number in numbers:
                for task, result in self._kernel.run(self._partitions[number], scratch):
                    yield task.number, self._failure(result) if isinstance(result, Exception) else result

    def _failure(self, error: Exception) -> _Failure:
        slug = error.slug if isinstance(error, TarnError) else Internal.slug
        return _Failure(slug, self._kernel.connection.redact(f"{type(error).__name__}: {error}"))


def _to_error(failure: _Failure) -> TarnError:
    error_type = TRANSIENT_ERRORS.get(failure.slug)
    if error_type is None:
        # The client sees the problem; the text of a library's exception is for the operator's log only.
        log.error("a task failed", detail=failure.detail)
        return Internal("a task failed; see the worker's log for the cause")
    return error_type(failure.detail)
