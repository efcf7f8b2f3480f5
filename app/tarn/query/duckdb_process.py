"""DuckDB in a process of its own, as the process that asks it sees it.

DuckDB's client for Python takes hold of Python after every piece of its work. Threads that did so beside an event loop,
on processors that were busy with their own queries, kept everybody waiting for milliseconds at a time. In a child
(`tarn.query.duckdb_server`) they wait for each other alone, and the whole of it can be made to stand back.

A session has a socket, on which the parent asks and the child answers. One more socket has what is said beside those:
that a session begins, with its socket, that a query is to be interrupted, and how many threads there are to be.

Every session has a time limit. The thread that waits for an answer enforces it:

1. limit      no answer by the deadline: interrupt the query, repeatedly, because an interrupt that arrives between two
              queries of a session has no effect
2. grace      an answer within `GRACE_SECONDS`: the query has ended, and the caller gets QueryTimeout
3. kill       none: DuckDB looks for interrupts between chunks of rows only, and a function on long texts can take
              minutes for one chunk. Kill the process. The caller gets QueryTimeout; other sessions of the process get
              Unavailable, which is retryable, and the next session starts another process
"""

import pickle
import select
import socket
import struct
import subprocess
import sys
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

from tarn.child_process import exactly
from tarn.errors import QueryTimeout, TarnError, Unavailable
from tarn.model.ids import new_id
from tarn.query.low_priority import Processors, stand_back

log = structlog.get_logger(__name__)

HEAD = struct.Struct(">QQ")
"""How long a thing is that is said, and the bytes that follow it."""

WORD = struct.Struct(">BQ")
"""What is said beside the sessions: of which one, or how many threads."""

SESSION, INTERRUPT, THREADS = 1, 2, 3

CACHED_BYTES = 128 << 20
"""Of tables that were handed over, what is kept for whoever hands them over again."""

END_SECONDS = 10
"""How long a child that was told to end may take over it, and a session to end a query."""

FETCH_ROWS = 2_000
"""Rows that are sent at once."""

START_SECONDS = 60
"""Time limit of a session until it is given another one."""

GRACE_SECONDS = 2.0
"""How long a query that is interrupted may take to end before its process is killed."""

INTERRUPT_EVERY = 0.1
"""Seconds between two interrupts of a query within that time."""


Version = Hashable
"""What says of a table that it has the same rows as another of this version."""


def hand_over(duck: duckdb.DuckDBPyConnection, name: str, table: pa.Table, version: Version | None) -> None:
    """Let a connection read a table of ours by a name. What has a version is written for another process once."""
    if isinstance(duck, DuckdbSession):
        duck.hand_over(name, table, version)
    else:
        duck.register(name, table)


def send(peer: socket.socket, said: Any, data: "bytes | pa.Buffer" = b"") -> None:
    """Send one thing, and bytes as they are. Both sides are this program: it may be anything that Python can write."""
    text = pickle.dumps(said, protocol=pickle.HIGHEST_PROTOCOL)
    peer.sendall(HEAD.pack(len(text), len(data)) + text)
    if len(data):
        peer.sendall(data)


def receive(peer: socket.socket) -> tuple[Any, bytearray]:
    """Wait for one thing and its bytes. Raises EOFError if the other side is gone."""
    text, data = HEAD.unpack(exactly(peer, HEAD.size))
    return pickle.loads(exactly(peer, text)), exactly(peer, data)  # noqa: S301 - see `send`


class DuckdbProcess:
    """A process with one instance of DuckDB. Safe to share between threads. Raises Unavailable if it does not start."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tarn.query.duckdb_server"]
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)  # noqa: S603 - ours
        # From its first moment on: all its threads are as nice as the one that starts them.
        stand_back(self.pid)
        self._lock = Lock()
        self._sessions = 0
        self._is_lost = False
        self._processors = Processors(self.pid)
        self._threads = config["threads"]
        self._handed = ArrowFileCache(Path(config["temp_directory"]))
        try:
            send(self._control, config)
            if not _is_readable(self._control, START_SECONDS):
                self._process.kill()
            receive(self._control)
        except (OSError, EOFError) as error:
            self.end()
            raise Unavailable("the process that answers queries did not start", retry_after=2) from error
        log.info("queries have a process", pid=self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._is_lost and self._process.poll() is None

    def lose(self) -> Unavailable:
        """Say that it does not answer any more: it takes a moment until the system says that it has ended."""
        self._is_lost = True
        return Unavailable("the process that answered the query died", retry_after=1)

    def kill(self) -> None:
        """End it at once, with every query that runs in it."""
        self._is_lost = True
        self._process.kill()
        log.warning("query process killed: a query did not stop when it was interrupted", pid=self.pid)

    def session(self) -> "DuckdbSession":
        """A connection of its own. Raises Unavailable if the child is gone."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            self._sessions += 1
            number = self._sessions
            try:
                socket.send_fds(self._control, [WORD.pack(SESSION, number)], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise self.lose() from error
        return DuckdbSession(self, ours, number)

    def interrupt(self, number: int) -> None:
        """End what a session does now, if it does anything."""
        with self._lock, suppress(OSError):
            self._control.sendall(WORD.pack(INTERRUPT, number))

    def share(self, shared: bool) -> None:
        """Let it leave a part of the processors to others, or have all of them.

        It has no more threads then than processors: those that wait for the last of a query's work do it by asking
        again and again.
        """
        if self._processors.share(shared):
            threads = min(self._threads, self._processors.count)
            with self._lock, suppress(OSError):
                self._control.sendall(WORD.pack(THREADS, threads))

    def file(self, table: pa.Table, version: Version | None) -> AbstractContextManager[Path]:
        """A file that has a table, until the context ends."""
        return self._handed.file(table, version)

    def end(self) -> None:
        """End it, whatever it does. It holds nothing that is worth waiting for."""
        self._control.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._handed.forget()


class ArrowFileCache:
    """Tables in files, which the other process maps into its memory. They were megabytes to be sent for each query."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: OrderedDict[Version, Path] = OrderedDict()
        self._lock = Lock()

    @contextmanager
    def file(self, table: pa.Table, version: Version | None) -> Iterator[Path]:
        """A file that has a table, for as long as the context is open; if it has a version, perhaps for longer."""
        if version is None:
            path = self._written(table)
            try:
                yield path
            finally:
                path.unlink(missing_ok=True)
            return
        with self._lock:
            if version not in self._kept:
                self._kept[version] = self._written(table)
                self._shrink()
            self._kept.move_to_end(version)
            path = self._kept[version].with_suffix(f".{new_id()}")
            # Whoever maps it has a name of its own for it, which lasts until it has done so.
            path.hardlink_to(self._kept[version])
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove what is kept."""
        with self._lock:
            while self._kept:
                self._kept.popitem()[1].unlink(missing_ok=True)

    def _written(self, table: pa.Table) -> Path:
        path = self._folder / f"{new_id()}.arrow"
        try:
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise Unavailable("there is no room for what the query is about", retry_after=5) from error
        return path

    def _shrink(self) -> None:
        """Forget what was not asked for for the longest time, but for the last one."""
        size = sum(path.stat().st_size for path in self._kept.values())
        while size > CACHED_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            size -= oldest.stat().st_size
            oldest.unlink()


class DuckdbSession:
    """As much of a connection of DuckDB's as reads need: the same names, the same errors. Of one thread at a time."""

    def __init__(self, child: DuckdbProcess, peer: socket.socket, number: int) -> None:
        self._child = child
        self._peer = peer
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
        self._peer.close()

    def cursor(self) -> "DuckdbSession":
        return self._child.session()

    def interrupt(self) -> None:
        """End what it does now, from another thread."""
        self._child.interrupt(self._number)

    def limit(self, seconds: float) -> None:
        """Start the time limit anew: everything asked for from now on must be answered within so many seconds."""
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    @contextmanager
    def extended(self, seconds: float) -> Iterator[None]:
        """Have so much time left at least, for what must be done after a query."""
        kept = self._deadline
        self._deadline = max(kept, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._deadline = kept

    def execute(self, query: str, parameters: Any = None) -> "DuckdbSession":
        self.ask("execute", query, parameters)
        return self

    def fetchall(self) -> list[tuple[Any, ...]]:
        # Not all in one answer: unpickling holds Python's lock from its first row to its last.
        rows: list[tuple[Any, ...]] = []
        while some := self.ask("fetchmany", FETCH_ROWS):
            rows += some
            if len(some) < FETCH_ROWS:
                break
        return rows

    def fetchone(self) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self.ask("fetchone")
        return row

    @property
    def description(self) -> list[tuple[str]]:
        """The names of the columns, and nothing else of them."""
        columns: list[tuple[str]] = self.ask("description")
        return columns

    def to_arrow_reader(self, rows: int) -> "ArrowBatches":
        return ArrowBatches(self, rows)

    def hand_over(self, name: str, table: pa.Table, version: Version | None) -> None:
        with self._child.file(table, version) as file:
            self.ask("register", name, str(file))

    def list_filesystems(self) -> list[str]:
        schemes: list[str] = self.ask("list_filesystems")
        return schemes

    def register_filesystem(self, files: Any) -> None:
        self.ask("register_filesystem", files)

    def ask(self, what: str, *given: Any) -> Any:
        """Have something done. Raises what DuckDB raised, QueryTimeout, and Unavailable if the child is gone."""
        return self.ask_for_bytes(what, *given)[0]

    def ask_for_bytes(self, what: str, *given: Any) -> tuple[Any, bytearray]:
        """The same, with the bytes that were answered."""
        if self._peer.fileno() < 0:
            raise duckdb.ConnectionException("Connection Error: the session is over")
        if time.monotonic() >= self._deadline:
            raise self._timeout()
        try:
            send(self._peer, (what, *given))
            if not _is_readable(self._peer, self._deadline - time.monotonic()):
                self._stop()
                raise self._timeout()
            (done, answer), found = receive(self._peer)
        except (OSError, EOFError) as error:
            lost = self._child.lose()
            # Of several sessions whose time is over, one kills the process.
            raise (self._timeout() if time.monotonic() >= self._deadline else lost) from error
        if not done:
            raise _to_exception(*answer)
        return answer, found

    def _stop(self) -> None:
        """End what is running: by an interrupt, or else with its process. Raises EOFError if that is gone."""
        end = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < end:
            self.interrupt()
            if _is_readable(self._peer, INTERRUPT_EVERY):
                receive(self._peer)
                return
        self._child.kill()
        if self.on_kill is not None:
            self.on_kill()

    def _timeout(self) -> QueryTimeout:
        return QueryTimeout(f"the query was stopped after {self._seconds:g} seconds", seconds=self._seconds)


class ArrowBatches:
    """Rows of a query that was begun, as Arrow has them, no more at a time than are asked for."""

    def __init__(self, session: DuckdbSession, rows: int) -> None:
        self._session = session
        session.ask("begin", rows)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while found := self._session.ask_for_bytes("more")[1]:
            yield from pa.ipc.open_stream(found)

    def close(self) -> None:
        # What ended with an error, or with the child, has nothing to close.
        with suppress(TarnError, duckdb.Error, OSError), self._session.extended(END_SECONDS):
            self._session.ask("end")


def _is_readable(peer: socket.socket, seconds: float) -> bool:
    """Wait until the other side has sent something, or is gone; False if the time is over before."""
    waiting = select.poll()
    waiting.register(peer, select.POLLIN)
    return bool(waiting.poll(max(0.0, seconds) * 1000))


def _to_exception(name: str, text: str) -> Exception:
    """An error of the child's as it would be raised here."""
    if name == "OSError":
        return OSError(text)
    kind = getattr(duckdb, name, None)
    return kind(text) if isinstance(kind, type) and issubclass(kind, duckdb.Error) else RuntimeError(f"{name}: {text}")
