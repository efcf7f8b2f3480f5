"""Active reads of this process, and the heartbeat that reports them so that a vacuum keeps the files they need.

`app/tarn/lake/active_readers.py` has the protocol, and why no read loses a file under it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Lock, Thread
from types import TracebackType

import structlog

from tarn.db import migrate, reader_heartbeats
from tarn.db.engine import Database
from tarn.db.reader_heartbeats import ReaderHeartbeat
from tarn.errors import TarnError
from tarn.lake.active_readers import UNKNOWN
from tarn.model.ids import new_id

log = structlog.get_logger(__name__)


class ActiveRead:
    """A dataset state in use by a read; `seq` is UNKNOWN until the read has resolved its snapshot."""

    __slots__ = ("dataset_id", "seq")

    def __init__(self, dataset_id: str) -> None:
        self.dataset_id = dataset_id
        self.seq = UNKNOWN


class ActiveReads:
    """The registry of active reads of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._active: set[ActiveRead] = set()

    def begin(self, dataset_id: str) -> ActiveRead:
        """Register a read. Call this before resolving the snapshot that it will read."""
        read = ActiveRead(dataset_id)
        with self._lock:
            self._active.add(read)
        return read

    def end(self, read: ActiveRead) -> None:
        """Unregister a read that no longer needs its files."""
        with self._lock:
            self._active.discard(read)

    def oldest(self) -> dict[str, int]:
        """Return the sequence number of the oldest snapshot being read, by dataset id."""
        oldest: dict[str, int] = {}
        with self._lock:
            for read in self._active:
                oldest[read.dataset_id] = min(read.seq, oldest.get(read.dataset_id, read.seq))
        return oldest


@contextmanager
def hold_snapshots(database: Database, every: float) -> Iterator[Callable[[Iterable[str]], None]]:
    """Hold every snapshot of some datasets while the block runs, like a read of all of them at once.

    Yields a function that takes dataset ids. Once it has returned, no vacuum deletes a file of these datasets, except
    files that the vacuum had already expired by then.
    """
    reads = ActiveReads()
    registered: list[ActiveRead] = []
    with ActiveReadReporter(database, reads, every) as reporter:

        def hold(ids: Iterable[str]) -> None:
            registered.extend(reads.begin(dataset_id) for dataset_id in ids)
            reporter.report()

        try:
            yield hold
        finally:
            for read in registered:
                reads.end(read)


class ActiveReadReporter:
    """The heartbeat thread that reports active reads, from before the first read until the block ends."""

    def __init__(self, database: Database, reads: ActiveReads, every: float) -> None:
        self.id = new_id()
        self._database = database
        self._reads = reads
        self._every = every
        self._beat = 0
        self._stop = Event()
        self._thread = Thread(target=self._run, name="active-reads", daemon=True)

    def __enter__(self) -> "ActiveReadReporter":
        """Send the first report and start the thread.

        Raises StartRefused if the database has just stopped serving this version.
        """
        self._beat += 1
        with self._database.write() as connection:
            reader_heartbeats.beat(connection, self.id, ReaderHeartbeat(self._beat, self._reads.oldest()))
            # Report first, check second: a process that enables a format this version cannot read either sees this
            # report, or we wait for its transaction here (`tarn.db.format_versions`).
            migrate.require(migrate.served(connection, wait=True))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        # Threads may still be reading for clients that have gone: then keep the report, which expires by itself.
        if not self._reads.oldest():
            try:
                with self._database.write() as connection:
                    reader_heartbeats.forget(connection, [self.id])
            except TarnError as problem:
                log.warning("reader heartbeat not deleted; vacuum waits until it expires", problem=problem.slug)

    def report(self) -> Mapping[str, int]:
        """Report the active reads now, and return them.

        Not for concurrent calls: the content of a report must have been collected after the previous report.
        """
        self._beat += 1
        oldest = self._reads.oldest()
        with self._database.write() as connection:
            reader_heartbeats.beat(connection, self.id, ReaderHeartbeat(self._beat, oldest))
        return oldest

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self.report()
            except Exception:  # if this thread ended, a vacuum would take this process for dead
                log.exception("active reads could not be reported; retrying at the next heartbeat")
