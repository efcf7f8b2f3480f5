"""Jobs of Spark for which there is no executor: nothing in Spark would ever end them."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

import structlog
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext

log = structlog.get_logger(__name__)

_POLL_SECONDS = 1.0
"""Seconds between two looks at how many executors there are."""

_WARN_AFTER = 15.0
"""Seconds without an executor after which the log says so."""


class NoExecutor(Exception):
    """Spark answers, and has nobody to work."""


@contextmanager
def patiently(context: SparkContext, seconds: float, group: str) -> Iterator[None]:
    """Run one Spark job of this group in this thread, and give it up when there has been no executor for so long.

    On a cluster, a job waits for executors without an end and without a word: all cores may be another driver's, or no
    machine may be left. Given up, it goes back to where another worker finds it, which may have executors. Raises
    NoExecutor then.
    """
    if context._jsc.isLocal():  # this process is the executor
        yield
        return
    over, given_up = Event(), Event()

    def watch() -> None:
        seen, told = monotonic(), False
        while not over.wait(_POLL_SECONDS):
            try:
                alone = monotonic() - seen
                if _executors(context):
                    seen, told = monotonic(), False
                elif alone > seconds:
                    given_up.set()
                    context.cancelJobGroup(group)
                    return
                elif alone > _WARN_AFTER and not told:
                    log.warning("Spark has no executor for a job", seconds=round(alone))
                    told = True
            except (Py4JError, OSError, AttributeError):  # Spark is gone, as whoever waits for the job hears by itself
                return

    watching = Thread(target=watch, name="patience", daemon=True)
    watching.start()
    try:
        yield
    except Py4JJavaError as error:
        if given_up.is_set():
            raise NoExecutor(f"Spark has had no executor for {seconds:g} seconds") from error
        raise
    finally:
        over.set()
        watching.join()


def _executors(context: SparkContext) -> int:
    """How many there are. The driver is listed among them."""
    return int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1
