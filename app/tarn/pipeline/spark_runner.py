"""Kernels on Spark: slots of tasks out, what they made back."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import structlog
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from tarn.errors import Backpressure, DatasetNotFound, Internal, QuotaExceeded, StorageFull, TarnError, Unavailable
from tarn.model.cancellation import current
from tarn.model.ids import new_id
from tarn.pipeline.executor_timeout import patiently
from tarn.pipeline.tasks.kernel import AnyTask, Kernel, Output

log = structlog.get_logger(__name__)

TRANSIENT_ERRORS = {
    error.slug: error for error in (StorageFull, Unavailable, Backpressure, QuotaExceeded, DatasetNotFound)
}
"""Failures that a task may have through no fault of its own."""


class SparkKernels:
    """Runs tasks on a Spark session."""

    def __init__(self, session: SparkSession, kernel: Kernel, patience: float) -> None:
        self._session = session
        self._kernel = kernel
        self._patience = patience

    @property
    def cores(self) -> int:
        return int(self._session.sparkContext.defaultParallelism)

    def run(self, slots: list[list[AnyTask]]) -> Iterator[tuple[int, Output | TarnError]]:
        """One Spark job for all slots, each a partition of its own. Task numbers with what became of them.

        Raises NoExecutor if it has none for as long as the worker's patience lasts, and Stopped if the job that this
        thread runs is cancelled: the driver ends its job at once, and executors kill the Python processes of its tasks.
        """
        count = len(slots)
        # Where there are fewer slots than cores, those that would stand idle help to look things up in the store.
        kernel = replace(self._kernel, threads=max(1, self.cores // count))
        # Partitions are numbers, and what they mean travels with the function. Not by way of a DataFrame: there is
        # nothing to optimise, and loading Spark SQL takes longer than the first flush.
        context = self._session.sparkContext
        numbers = context.parallelize(range(count), count).mapPartitions(_Slots(kernel, slots))
        cancellation, group = current(), new_id()
        cancellation.check()
        # Both are the thread's own: every thread of this process has one of its own in the JVM, too.
        context.setJobGroup(group, "tarn", interruptOnCancel=True)
        # In one pool, jobs are done first come, first served; between pools, cores are shared.
        context.setLocalProperty("spark.scheduler.pool", cancellation.pool)
        try:
            with (
                cancellation.interrupting(lambda: context.cancelJobGroup(group)),
                patiently(context, self._patience, group),
            ):
                collected = numbers.collect()
        except Py4JJavaError:
            cancellation.check()
            raise
        for number, made in collected:
            yield number, _to_error(made) if isinstance(made, _Failure) else made

    def run_here(self, task: AnyTask) -> Output | TarnError:
        """One task in this process, with as many cores as it has."""
        kernel = replace(self._kernel, threads=min(self.cores, os.cpu_count() or 1))
        ((_, made),) = _Slots(kernel, [[task]])([0])
        return _to_error(made) if isinstance(made, _Failure) else made


class _Failure(NamedTuple):
    """Why a task made nothing, in words that are fit for a log."""

    slug: str
    detail: str


class _Slots:
    """What runs in an executor; pickled, it means the same there."""

    def __init__(self, kernel: Kernel, slots: list[list[AnyTask]]) -> None:
        self._kernel = kernel
        self._slots = slots

    def __call__(self, numbers: Iterable[int]) -> Iterator[tuple[int, Output | _Failure]]:
        with tempfile.TemporaryDirectory(prefix="tarn-") as scratch:
            for number in numbers:
                for task, output in self._kernel.run(self._slots[number], scratch):
                    yield task.number, self._failure(output) if isinstance(output, Exception) else output

    def _failure(self, error: Exception) -> _Failure:
        slug = error.slug if isinstance(error, TarnError) else Internal.slug
        return _Failure(slug, self._kernel.connection.redact(f"{type(error).__name__}: {error}"))


def _to_error(failure: _Failure) -> TarnError:
    known = TRANSIENT_ERRORS.get(failure.slug)
    if known is None:
        # Whoever asked for the flush reads the problem; a library's words are for the operator.
        log.error("a task failed", detail=failure.detail)
        return Internal("a task failed; the worker's log says why")
    return known(failure.detail)
