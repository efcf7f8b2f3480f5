"""Client for DuckDB in a child process: sessions, time limits, interrupts and passing of Arrow tables.

DuckDB's Python client takes the GIL after every piece of its work. When such threads ran in the process of the event
loop, on processors that were busy with queries, every request waited for milliseconds at a time. In a child process
(`tarn.query.engine.duckdb_server`) these threads only wait for each other, and the whole process can have a low
priority.

Each session has a connection, on which the parent sends requests and the child answers. The connection with which the
child was started carries everything else: the start of a session, with its connection; interrupts; and the number of
threads.

Every session has a time limit. The thread that waits for an answer enforces it:

1. limit      no answer by the deadline: interrupt the query, repeatedly, because an interrupt that arrives between two
              queries of a session has no effect
2. grace      an answer within `GRACE_SECONDS`: the query has ended, and the caller gets QueryTimeout
3. kill       none: DuckDB checks for interrupts between chunks of rows only, and a function on long texts can take
              minutes for one chunk. Kill the process. The caller gets QueryTimeout; other sessions of the process get
              Unavailable, which is retryable, and the next session starts another process
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any

import duckdb
import pyarrow as pa
import structlog

from tarn.child_process import PICKLE, ChildProcess, MessageConnection
from tarn.errors import QueryTimeout, TarnError, Unavailable
from tarn.model.ids import new_id
from tarn.query.engine.low_priority import CpuAffinity

log = structlog.get_logger(__name__)

SESSION, INTERRUPT, THREADS = 1, 2, 3
"""Kinds of control messages. Each has a number: of the session, or of threads."""

CACHED_BYTES = 128 << 20
"""Size limit of the cache of Arrow files for tables that are passed to the child repeatedly."""

END_SECONDS = 10
"""How long a session may take to end a query."""

FETCH_ROWS = 2_000
"""Rows fetched by one request."""

START_SECONDS = 60
"""Time limit of a session until another one is set."""

GRACE_SECONDS = 2.0
"""How long an interrupted query may take to end before its process is killed."""

INTERRUPT_EVERY = 0.1
"""Seconds between two interrupts of a query during the grace period."""


Version = Hashable
"""Cache key of a table: two tables of the same version have the same rows."""


def register_table(duck: duckdb.DuckDBPyConnection, name: str, table: pa.Table, version: Version | None) -> None:
    """Register an Arrow table under a name. For a child process, a table with a version is written to a file once."""
    if isinstance(duck, DuckdbSession):
        duck.register_table(name, table, version)
    else:
        duck.register(name, table)


class DuckdbProcess:
    """A child process with one DuckDB instance. Thread-safe. Raises Unavailable if the process does not start."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._process = ChildProcess("tarn.query.engine.duckdb_server", codec=PICKLE, low_priority=True)
        self._control = self._process.connection
        self._lock = Lock()
        self._sessions = 0
        self._is_lost = False
        self._cpu_affinity = CpuAffinity(self.pid)
        self._threads = config["threads"]
        self._tables = ArrowFileCache(Path(config["temp_directory"]))
        try:
            self._control.send(config)
            if not self._control.is_readable(START_SECONDS):
                self._process.kill()
            self._control.receive()
        except (OSError, EOFError) as error:
            self.end()
            raise Unavailable("the query process did not start", retry_after=2) from error
        log.info("query process started", pid=self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._is_lost and self._process.exit_reason is None

    @property
    def exit_reason(self) -> str | None:
        return self._process.exit_reason

    def mark_dead(self) -> Unavailable:
        """Mark the process as dead, and return the error to raise. Its exit is reported only some time later."""
        self._is_lost = True
        return Unavailable("the query process died while it ran the query", retry_after=1)

    def kill(self) -> None:
        """Kill the process, with every query that runs in it."""
        self._is_lost = True
        self._process.kill()
        log.warning("query process killed: a query did not stop when it was interrupted", pid=self.pid)

    def session(self) -> "DuckdbSession":
        """Open a new session. Raises Unavailable if the child process has ended."""
        ours, theirs = MessageConnection.pair(PICKLE)
        with self._lock, theirs:
            self._sessions += 1
            number = self._sessions
            try:
                self._control.send((SESSION, number))
                self._control.send_connection(theirs)
            except OSError as error:
                ours.close()
                raise self.mark_dead() from error
        return DuckdbSession(self, ours, number)

    def interrupt(self, number: int) -> None:
        """Interrupt the running query of a session, if there is one."""
        with self._lock, suppress(OSError):
            self._control.send((INTERRUPT, number))

    def set_cpus_shared(self, is_shared: bool) -> None:
        """Restrict the process to a part of the processors, or let it use all of them.

        The number of threads is limited to that of the processors, because DuckDB's threads busy-wait for the last
        tasks of a query.
        """
        if self._cpu_affinity.set_cpus_shared(is_shared):
            threads = min(self._threads, self._cpu_affinity.count)
            with self._lock, suppress(OSError):
                self._control.send((THREADS, threads))

    def file(self, table: pa.Table, version: Version | None) -> AbstractContextManager[Path]:
        """Provide a table as an Arrow file until the context ends."""
        return self._tables.file(table, version)

    def end(self) -> None:
        """End the process without waiting for running queries: it has no state to save."""
        self._process.end()
        self._tables.clear()


class ArrowFileCache:
    """A cache of tables in Arrow files, which the child maps into memory, instead of sending megabytes per query."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: OrderedDict[Version, Path] = OrderedDict()
        self._lock = Lock()

    @contextmanager
    def file(self, table: pa.Table, version: Version | None) -> Iterator[Path]:
        """Provide a table as an Arrow file while the context is open. With a version, the file is cached."""
        if version is None:
            path = self._write(table)
            try:
                yield path
            finally:
                path.unlink(missing_ok=True)
            return
        with self._lock:
            if version not in self._files:
                self._files[version] = self._write(table)
                self._shrink()
            self._files.move_to_end(version)
            path = self._files[version].with_suffix(f".{new_id()}")
            # Each user gets its own hard link, so that evicting the cached file cannot remove it before it is mapped.
            path.hardlink_to(self._files[version])
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all cached files."""
        with self._lock:
            while self._files:
                self._files.popitem()[1].unlink(missing_ok=True)

    def _write(self, table: pa.Table) -> Path:
        path = self._folder / f"{new_id()}.arrow"
        try:
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise Unavailable(
                "the temporary folder has no space for a table that the query needs", retry_after=5
            ) from error
        return path

    def _shrink(self) -> None:
        """Evict the least recently used files until the cache is within its limit. Keep the newest in any case."""
        size = sum(path.stat().st_size for path in self._files.values())
        while size > CACHED_BYTES and len(self._files) > 1:
            _, oldest = self._files.popitem(last=False)
            size -= oldest.stat().st_size
            oldest.unlink()


class DuckdbSession:
    """The part of DuckDB's connection interface that reads need, with the same methods and errors. Not thread-safe."""

    def __init__(self, process: DuckdbProcess, connection: MessageConnection, number: int) -> None:
        self._process = process
        self._connection = connection
        self._number = number
        self.on_kill: Callable[[], None] | None = None
        """Called when the process had to be killed because of this session."""
        self.limit(START_SECONDS)

    def __enter__(self) -> "DuckdbSession":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def cursor(self) -> "DuckdbSession":
        return self._process.session()

    def interrupt(self) -> None:
        """Interrupt the running query. May be called from another thread."""
        self._process.interrupt(self._number)

    def limit(self, seconds: float) -> None:
        """Restart the time limit: all requests from now on must be answered within this many seconds."""
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    @contextmanager
    def extended(self, seconds: float) -> Iterator[None]:
        """Extend the deadline to at least this many seconds from now, for cleanup after a query."""
        deadline = self._deadline
        self._deadline = max(deadline, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._deadline = deadline

    def execute(self, query: str, parameters: Any = None) -> "DuckdbSession":
        self.request("execute", query, parameters)
        return self

    def fetchall(self) -> list[tuple[Any, ...]]:
        # Not all in one answer: unpickling holds the GIL from the first row to the last.
        rows: list[tuple[Any, ...]] = []
        while batch := self.request("fetchmany", FETCH_ROWS):
            rows += batch
            if len(batch) < FETCH_ROWS:
                break
        return rows

    def fetchone(self) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self.request("fetchone")
        return row

    @property
    def description(self) -> list[tuple[str]]:
        """Return the names of the columns only, each in a tuple as in DB-API."""
        columns: list[tuple[str]] = self.request("description")
        return columns

    def to_arrow_reader(self, rows: int) -> "ArrowBatches":
        return ArrowBatches(self, rows)

    def register_table(self, name: str, table: pa.Table, version: Version | None) -> None:
        with self._process.file(table, version) as file:
            self.request("register", name, str(file))

    def list_filesystems(self) -> list[str]:
        schemes: list[str] = self.request("list_filesystems")
        return schemes

    def register_filesystem(self, files: Any) -> None:
        self.request("register_filesystem", files)

    def request(self, method: str, *arguments: Any) -> Any:
        """Send a request and return its answer.

        Raises what DuckDB raised, QueryTimeout, and Unavailable if the child process has ended.
        """
        return self.request_bytes(method, *arguments)[0]

    def request_bytes(self, method: str, *arguments: Any) -> tuple[Any, bytearray]:
        """Send a request and return its answer and the raw bytes that come with it. Raises as `request` does."""
        if self._connection.is_closed:
            raise duckdb.ConnectionException("Connection Error: the session is closed")
        if time.monotonic() >= self._deadline:
            raise self._timeout()
        try:
            self._connection.send((method, *arguments))
            if not self._connection.is_readable(self._deadline - time.monotonic()):
                self._stop()
                raise self._timeout()
            (done, answer), data = self._connection.receive()
        except (OSError, EOFError) as error:
            unavailable = self._process.mark_dead()
            # Another session whose time is over may have killed the process: then this one has timed out, too.
            raise (self._timeout() if time.monotonic() >= self._deadline else unavailable) from error
        if not done:
            raise _to_exception(*answer)
        return answer, data

    def _stop(self) -> None:
        """Stop the running query: interrupt it, or else kill the process. Raises EOFError if that has ended."""
        end = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < end:
            self.interrupt()
            if self._connection.is_readable(INTERRUPT_EVERY):
                self._connection.receive()
                return
        self._process.kill()
        if self.on_kill is not None:
            self.on_kill()

    def _timeout(self) -> QueryTimeout:
        return QueryTimeout(f"the query was stopped after {self._seconds:g} seconds", seconds=self._seconds)


class ArrowBatches:
    """An iterator over the rows of a started query as Arrow batches, fetched on demand."""

    def __init__(self, session: DuckdbSession, rows: int) -> None:
        self._session = session
        session.request("begin", rows)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while data := self._session.request_bytes("more")[1]:
            yield from pa.ipc.open_stream(data)

    def close(self) -> None:
        # A query that ended with an error, or with the child process, has nothing to close.
        with suppress(TarnError, duckdb.Error, OSError), self._session.extended(END_SECONDS):
            self._session.request("end")


def _to_exception(name: str, text: str) -> Exception:
    """Convert the name and text of an error in the child to an exception."""
    if name == "OSError":
        return OSError(text)
    kind = getattr(duckdb, name, None)
    return kind(text) if isinstance(kind, type) and issubclass(kind, duckdb.Error) else RuntimeError(f"{name}: {text}")
