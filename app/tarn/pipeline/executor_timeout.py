"""Timeout for Spark jobs that have no executor. Spark itself would let them wait forever."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

import structlog
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext

log = structlog.get_logger(__name__)

_POLL_SECONDS = 1.0
"""Seconds between two checks of the number of executors."""

_WARN_AFTER = 15.0
"""Seconds without an executor after which a warning is logged."""


class NoExecutor(Exception):
    """The Spark driver answers, but has had no executor for longer than the timeout."""


@contextmanager
def cancel_without_executors(context: SparkContext, seconds: float, group: str) -> Iterator[None]:
    """Run one Spark job of this job group in this thread; cancel it when Spark has had no executor for `seconds`.

    On a cluster, a job waits for executors without a limit and without a message: another driver may hold all cores, or
    no machine may be left. After the cancellation the job goes back to the queue, where a worker that has executors can
    claim it. Raises NoExecutor then.
    """
    if context._jsc.isLocal():  # this process is the executor
        yield
        return
    over, timed_out = Event(), Event()

    def watch() -> None:
        last_seen, warned = monotonic(), False
        while not over.wait(_POLL_SECONDS):
            try:
                idle = monotonic() - last_seen
                if _executors(context):
                    last_seen, warned = monotonic(), False
                elif idle > seconds:
                    timed_out.set()
                    context.cancelJobGroup(group)
                    return
                elif idle > _WARN_AFTER and not warned:
                    log.warning("Spark has no executor for a job", seconds=round(idle))
                    warned = True
            except (Py4JError, OSError, AttributeError):  # Spark is gone: the thread that runs the job gets the error
                return

    watcher = Thread(target=watch, name="executor timeout", daemon=True)
    watcher.start()
    try:
        yield
    except Py4JJavaError as error:
        if timed_out.is_set():
            raise NoExecutor(f"Spark has had no executor for {seconds:g} seconds") from error
        raise
    finally:
        over.set()
        watcher.join()


def _executors(context: SparkContext) -> int:
    """Return the number of executors. Spark lists the driver among them, so it is subtracted."""
    return int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1
