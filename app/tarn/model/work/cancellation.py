"""Cancellation of running jobs: a signal that one thread sets and the thread that runs the job checks between steps.

A thread that runs a job makes its `Cancellation` the current one. Loops call `check`, or iterate over `checked(...)`.
Calls that block (a DuckDB query, a Spark job) register a callback that interrupts them with `interrupting`. In a thread
or process that runs no job, all of this does nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from threading import Event, Lock
from typing import TypeVar

from tarn.model.work.job import JobStopped

Item = TypeVar("Item")

FLUSH_POOL = "flush"
"""Spark scheduler pool of all work that is not part of a job with its own thread."""


class Cancellation:
    """The cancellation signal of one running job, and the callbacks that interrupt its blocking calls."""

    def __init__(self, pool: str = FLUSH_POOL) -> None:
        self.pool = pool
        """The pool of Spark's fair scheduler that the job's tasks run in."""
        self._event = Event()
        self._lock = Lock()
        self._interrupts: dict[object, Callable[[], None]] = {}

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raise JobStopped if the signal is set."""
        if self._event.is_set():
            raise JobStopped

    def interrupt(self) -> None:
        """Call all registered callbacks. To be called repeatedly until the job has ended: an interrupt between two
        queries has no effect on the second."""
        with self._lock:
            # Under the lock: a callback must not be called after it is unregistered, when its connection may be closed.
            for interrupt in self._interrupts.values():
                with suppress(Exception):
                    interrupt()

    @contextmanager
    def interrupting(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Register a callback, called from another thread, that interrupts the block's work."""
        key = object()
        with self._lock:
            self._interrupts[key] = interrupt
        try:
            yield
        finally:
            with self._lock:
                del self._interrupts[key]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the thread's current cancellation while the block runs."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)


def current() -> Cancellation:
    """Return the cancellation of the job that this thread runs; without a job, one that is never set."""
    return _current.get() or Cancellation()


def check() -> None:
    """Raise JobStopped if the job that this thread runs is cancelled."""
    cancellation = _current.get()
    if cancellation is not None:
        cancellation.check()


def checked(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items, and raise JobStopped before the next one if the job that this thread runs is cancelled.

    The result may be iterated in another thread.
    """
    return _checked(iter(items), current())


def _checked(rest: Iterator[Item], cancellation: Cancellation) -> Iterator[Item]:
    try:
        cancellation.check()
        for item in rest:
            yield item
            cancellation.check()
    finally:
        # Stop a producer that works ahead (such as a pool's map) now, not when the traceback is freed.
        close = getattr(rest, "close", None)
        if close is not None:
            close()


@contextmanager
def interrupting(interrupt: Callable[[], None]) -> Iterator[None]:
    """Register a callback that interrupts the block's work if the job that this thread runs is cancelled."""
    with current().interrupting(interrupt):
        yield
