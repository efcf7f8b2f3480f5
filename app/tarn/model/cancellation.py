"""Cancellation of running jobs: a signal that one thread sets and the thread that runs the job checks between steps.

A thread that runs a job makes its `Cancellation` the current one. Loops call `check`, or iterate over `checked(...)`.
What blocks in other code (a query of DuckDB, a job of Spark) registers how it is interrupted with `interrupting`. In
a thread or process that runs no job, all of this does nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from threading import Event, Lock
from typing import TypeVar

from tarn.model.job import Stopped

Item = TypeVar("Item")

FLUSH_POOL = "flush"
"""Spark's scheduler pool of everything that is no job of its own thread."""


class Cancellation:
    """The signal of one running job, and what is to be interrupted when it is set."""

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
        """Raise Stopped if the signal is set."""
        if self._event.is_set():
            raise Stopped

    def interrupt(self) -> None:
        """Interrupt whatever is registered now. To be called repeatedly until the job has ended: an interrupt between
        two queries has no effect on the second."""
        with self._lock:
            # Under the lock: what is unregistered may be closed, and is not called any more.
            for interrupt in self._interrupts.values():
                with suppress(Exception):
                    interrupt()

    @contextmanager
    def interrupting(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Register what ends the block's work from another thread."""
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
        """Make this the current one of the thread while the block runs."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)


def current() -> Cancellation:
    """The cancellation of the job that this thread runs; one that is never set where it runs none."""
    return _current.get() or Cancellation()


def check() -> None:
    """Raise Stopped if the job that this thread runs is to end."""
    found = _current.get()
    if found is not None:
        found.check()


def checked(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items, and raise Stopped before the next one if the job that this thread runs is to end.

    Another thread may do the iterating.
    """
    return _checked(iter(items), current())


def _checked(rest: Iterator[Item], cancellation: Cancellation) -> Iterator[Item]:
    try:
        cancellation.check()
        for item in rest:
            yield item
            cancellation.check()
    finally:
        # Whoever makes the items ahead (the map of a pool) stops doing so now, and not when the traceback is freed.
        close = getattr(rest, "close", None)
        if close is not None:
            close()


@contextmanager
def interrupting(interrupt: Callable[[], None]) -> Iterator[None]:
    """Register what ends the block's work, with the job that this thread runs."""
    with current().interrupting(interrupt):
        yield
