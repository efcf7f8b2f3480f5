"""Reads that are under way in this process, and the reports on them by which a vacuum knows what to leave alone.

`app/tarn/lake/active_readers.py` says what they must hold to, and why no read loses a file then.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Lock, Thread
from types import TracebackType

import structlog

from tarn.db import migrate
from tarn.db import reader_heartbeats as readers
from tarn.db.engine import Database
from tarn.db.reader_heartbeats import ReaderHeartbeat
from tarn.errors import TarnError
from tarn.lake.active_readers import UNKNOWN
from tarn.model.ids import new_id

log = structlog.get_logger(__name__)


class ActiveRead:
    """One state of a dataset that a read is about to resolve, or has resolved."""

    __slots__ = ("dataset_id", "seq")

    def __init__(self, dataset_id: str) -> None:
        self.dataset_id = dataset_id
        self.seq = UNKNOWN


class ActiveReads:
    """The reads of this process. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._holds: set[ActiveRead] = set()

    def begin(self, dataset_id: str) -> ActiveRead:
        """Say that a read begins, before it looks which snapshot it will read."""
        hold = ActiveRead(dataset_id)
        with self._lock:
            self._holds.add(hold)
        return hold

    def end(self, hold: ActiveRead) -> None:
        """Say that a read needs its files no more."""
        with self._lock:
            self._holds.discard(hold)

    def oldest(self) -> dict[str, int]:
        """By dataset, the oldest snapshot that anybody reads."""
        found: dict[str, int] = {}
        with self._lock:
            for hold in self._holds:
                found[hold.dataset_id] = min(hold.seq, found.get(hold.dataset_id, hold.seq))
        return found


@contextmanager
def holding(database: Database, every: float) -> Iterator[Callable[[Iterable[str]], None]]:
    """Hold every snapshot of datasets while the block runs, as somebody does who reads all of them at once.

    What is given here takes their ids; once it has returned, no vacuum deletes what it has not given up by then.
    """
    running = ActiveReads()
    holds: list[ActiveRead] = []
    with ActiveReadReporter(database, running, every) as reporter:

        def hold(ids: Iterable[str]) -> None:
            holds.extend(running.begin(each) for each in ids)
            reporter.report()

        try:
            yield hold
        finally:
            for each in holds:
                running.end(each)


class ActiveReadReporter:
    """Reports what is read, from before the first read on, until the block ends."""

    def __init__(self, database: Database, running: ActiveReads, every: float) -> None:
        self.id = new_id()
        self._database = database
        self._running = running
        self._every = every
        self._beat = 0
        self._stop = Event()
        self._thread = Thread(target=self._run, name="reports on reads", daemon=True)

    def __enter__(self) -> "ActiveReadReporter":
        """Raises StartRefused if the database has just stopped to serve this version."""
        self._beat += 1
        with self._database.write() as connection:
            readers.tell(connection, self.id, ReaderHeartbeat(self._beat, self._running.oldest()))
            # Told first, asked then: whoever lets a form be written that we cannot read sees this report, or is waited
            # for (`tarn.db.format_versions`).
            migrate.require(migrate.served(connection, wait=True))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        # Threads may still read for clients that nobody waits for: then silence says when they are over.
        if not self._running.oldest():
            try:
                with self._database.write() as connection:
                    readers.forget(connection, [self.id])
            except TarnError as problem:
                log.warning("this process is taken for a reader a while longer", problem=problem.slug)

    def report(self) -> Mapping[str, int]:
        """Tell what is read now. One at a time, so that what a report says was collected after the one before."""
        self._beat += 1
        oldest = self._running.oldest()
        with self._database.write() as connection:
            readers.tell(connection, self.id, ReaderHeartbeat(self._beat, oldest))
        return oldest

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self.report()
            except Exception:  # a thread that ended here would let a vacuum take this process for dead
                log.exception("what is read could not be reported")
