"""Pool of child processes that parse request bodies under memory and CPU limits.

Parsing is CPU-bound Python code that would block the readers of this interpreter (GIL), and a malicious body can
exhaust memory and time. So bodies are parsed in child processes, except the smallest line-based ones
(`tarn.api.http.ingest`).

1. fork server  `tarn.journal.parsing.parser_process`, started with the API: it has imported everything and forks
                children that share its memory copy-on-write. A fork takes some milliseconds, a child some megabytes
2. children     one per body, up to a limit, so that no body waits for a slow client of another. A few idle children
                are kept with their caches of schemata and values
3. protocol     request and response: the child requests bytes (MORE), sends a chunk (CHUNK) or reports an error
                (PROBLEM, FAILURE); the parent answers with bytes (BYTES), GO_ON, or DROP to cancel the body
4. limits       the kernel enforces the child's memory (RLIMIT_DATA) and its CPU time, which grows with the body
                (RLIMIT_CPU). The parent waits for a message at most a multiple of that, then kills the child
5. exit         a child killed by its body is reported as an error of that body: 413 or 400, not retryable. Any other
                exit is a 503
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import structlog

from tarn.child_process import JSON, ChildProcess, MessageConnection
from tarn.errors import BodyTooLarge, FieldError, Unavailable, problem_types
from tarn.journal.formats.counting import require_equal
from tarn.journal.formats.record import BLOCK, ByteSource, invalid_format
from tarn.journal.parsing.event_buffer import Chunk, Packed
from tarn.journal.parsing.event_chunks import ReadOptions, ReadReport

log = structlog.get_logger(__name__)

MEMORY = 1 << 30
"""Bytes that a child may allocate in addition to its memory at fork."""

LEAST_CPU, BYTES_PER_CPU = 30, 32 << 10
"""Base CPU seconds per body, and the body bytes that add one second. The slowest real bodies use a tenth of this."""
CPU_PER_CHUNK = 10
"""CPU seconds added per chunk of valid rows: in columnar formats a few bytes can be many rows."""

WALL_PER_CPU = 8
"""Ratio of allowed wall time to allowed CPU time, as children run concurrently. Beyond it the machine is overloaded."""

WAIT = 60.0
"""Seconds that a body waits for a child. Usually milliseconds once the fork server has started; starting takes some
seconds of CPU time, which can be a minute on a very busy machine."""

ATTEMPTS = 2
"""Attempts to fork a child for one body; each failed attempt restarts the fork server."""

CONTROL_WAIT = 10.0
"""Seconds to wait for a reply of the fork server."""

RETIRED_AFTER = 64 << 20
"""Total body bytes after which a child is not reused, because its heap is fragmented."""

FORK, REAP = 1, 2
"""Requests to the fork server, with a connection or with the pid of a child. Replies: the pid of the new child; the
wait status and CPU seconds of the reaped one."""

ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OPENBLAS_NUM_THREADS": "1"}
"""Of the fork server. Arrow's default allocators and each OpenBLAS thread of numpy reserve more memory than they use,
and reserved memory counts against RLIMIT_DATA."""

OUT_OF_MEMORY = 3
"""Exit code of a child that ran out of memory, and so could not send a message."""


class MessageType(IntEnum):
    """Message types: READY to FAILURE are sent by the child, BODY to DROP by the parent."""

    READY = 1
    MORE = 2
    CHUNK = 3
    PROBLEM = 4
    FAILURE = 5
    BODY = 6
    BYTES = 7
    GO_ON = 8
    DROP = 9


class Message(NamedTuple):
    """A message between parent and child: its type, JSON detail and binary data."""

    type: MessageType
    detail: dict[str, Any]
    data: bytearray


def send(
    connection: MessageConnection,
    kind: MessageType,
    detail: dict[str, Any] | None = None,
    data: "bytes | pa.Buffer" = b"",
) -> None:
    """Send one message."""
    connection.send((kind, detail or {}), data)


def receive(connection: MessageConnection) -> Message:
    """Receive one message. Raises EOFError or OSError if the other side has closed the connection."""
    (kind, detail), data = connection.receive()
    return Message(MessageType(kind), detail, data)


class BodyParser(Protocol):
    """Parser of one body: an iterator of chunks, and the counts and report, which are complete after the last chunk."""

    @property
    def entities(self) -> int: ...
    @property
    def statements(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def report(self) -> ReadReport: ...
    def chunks(self, source: ByteSource) -> Iterator[Chunk]: ...


class ExitStatus(NamedTuple):
    """Exit status of a child: signal or exit code, and its CPU seconds."""

    signal: int
    code: int
    cpu: float


class ForkServer:
    """Parent's handle of the fork server process. Not thread-safe: the caller serializes access."""

    module = "tarn.journal.parsing.parser_process"

    def __init__(self, memory: int, cpu: int) -> None:
        self.cpu = cpu
        self._process = ChildProcess(self.module, str(memory), str(cpu), environment=ENVIRONMENT)
        self._control = self._process.connection
        self._is_ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_reason(self) -> str | None:
        return self._process.exit_reason

    def is_ready(self, deadline: float) -> bool:
        """Return whether the fork server has started, waiting until the deadline.

        Raises EOFError or OSError if it died.
        """
        if not self._is_ready:
            if not self._control.is_readable(deadline - time.monotonic()):
                return False
            self._is_ready = receive(self._control).type is MessageType.READY
            self._control.limit_waits(CONTROL_WAIT)
            log.info("parser fork server started", pid=self.pid)
        return self._is_ready

    def fork(self) -> "ParserProcess":
        """Fork a child. Raises EOFError or OSError if the fork server died or does not reply."""
        parent_end, child_end = MessageConnection.pair(JSON)
        with child_end:
            try:
                self._control.send((FORK, 0))
                self._control.send_connection(child_end)
                pid, _ = self._control.receive()
            except BaseException:
                parent_end.close()
                raise
        return ParserProcess(pid, parent_end, self)

    def reap(self, pid: int) -> ExitStatus:
        """Kill a child that is still running and return its exit status. Raises EOFError or OSError if the fork server
        died."""
        self._control.send((REAP, pid))
        (status, cpu), _ = self._control.receive()
        return ExitStatus(os.WTERMSIG(status), os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0, cpu)

    def kill(self) -> None:
        """Kill the fork server; its children are killed with it. May be called from another thread."""
        self._process.kill()

    def end(self) -> None:
        """Kill the fork server, wait until it has exited, and close the connection."""
        self._process.kill()
        self._process.end()


class ParserProcess:
    """Parent's handle of a child process."""

    def __init__(self, pid: int, connection: MessageConnection, server: ForkServer) -> None:
        self.pid = pid
        self.server = server
        self._connection = connection
        self._received = 0
        self.chunks = 0
        """Chunks received of the current body."""
        self.bytes = 0
        """Bytes sent of all bodies."""
        self.awaits_message = False
        """Whether the child waits for a message from the parent, in the middle of a body."""
        self._is_usable = True
        """Whether no request failed."""

    @property
    def allowance(self) -> int:
        """CPU seconds that the child may use for what it has received of the current body."""
        return cpu_allowance(self.server.cpu, self._received, self.chunks)

    @property
    def longest_wait(self) -> float:
        """Seconds to wait for the child's next message."""
        return WALL_PER_CPU * max(1, self.allowance)

    def begin(self) -> None:
        self._received = self.chunks = 0

    def is_alive(self) -> bool:
        """Return whether the child is running and waits for a body."""
        try:
            # An idle child sends nothing, so a connection that is readable was closed.
            return not self._connection.is_readable()
        except OSError:
            return False

    def request(self, kind: MessageType, detail: dict[str, Any] | None = None, data: bytes = b"") -> Message:
        """Send a message and return the response. Raises TimeoutError, and EOFError or OSError if the child died."""
        self._received += len(data)
        self.bytes += len(data)
        self.awaits_message = self._is_usable = False
        self._connection.limit_waits(self.longest_wait)
        send(self._connection, kind, detail, data)
        response = receive(self._connection)
        self._is_usable = True
        return response

    def finish(self) -> None:
        """Prepare the child for the next body, cancelling the current one if necessary.

        Raises EOFError or OSError if the child cannot be reused.
        """
        if not self._is_usable:
            raise EOFError
        if self.awaits_message:
            send(self._connection, MessageType.DROP)
            self.awaits_message = False

    def close(self) -> None:
        self._connection.close()


class ChildBodyParser:
    """Parser of one body that runs in a child process (implements `BodyParser`)."""

    def __init__(self, options: ReadOptions, process: ParserProcess, exit_error: Callable[[], Exception]) -> None:
        self._options = options
        self._process = process
        self._exit_error = exit_error
        self.report = ReadReport()
        self.entities = 0
        self.statements = 0
        self.rows = 0

    def chunks(self, source: ByteSource) -> Iterator[Chunk]:
        """Yield the body's events in chunks, as `BodyReader.chunks` does.

        Raises what `BodyReader.chunks` raises, InvalidFormat or BodyTooLarge if the body killed the child, and
        Unavailable if the child died for another reason.
        """
        process = self._process
        process.begin()
        response = self._request(MessageType.BODY, {"options": self._options.model_dump()}, source.read(BLOCK))
        while True:
            process.awaits_message = response.type is MessageType.MORE or (
                response.type is MessageType.CHUNK and not response.detail["over"]
            )
            if response.type is MessageType.MORE:
                response = self._request(MessageType.BYTES, data=source.read(BLOCK))
                continue
            if response.type is not MessageType.CHUNK:
                raise _reported_error(response)
            counts = response.detail
            self.entities += counts["entities"]
            self.statements += counts["statements"]
            if counts["over"]:
                self.report = ReadReport(**counts["report"])
            if response.data:
                (rows,) = pa.ipc.open_stream(response.data)
                self.rows += rows.num_rows
                yield Packed(rows, counts["entities"], counts["statements"], counts["size"])
                del rows
            if counts["over"]:
                require_equal(self.rows, counts["rows"], "rows came from the parser", "were read")
                return
            del response  # the consumer has the chunk; do not hold its memory while the next one is parsed
            process.chunks += 1
            response = self._request(MessageType.GO_ON)

    def _request(self, kind: MessageType, detail: dict[str, Any] | None = None, data: bytes = b"") -> Message:
        try:
            return self._process.request(kind, detail, data)
        except TimeoutError as error:
            wait = f"{self._process.longest_wait:g} seconds"
            raise Unavailable(f"parsing a part of the body timed out after {wait}", retry_after=30) from error
        except (OSError, EOFError) as error:
            raise self._exit_error() from error


class ParserPool:
    """Pool of parser child processes, one per API process. Thread-safe."""

    def __init__(self, most: int, memory: int = MEMORY, cpu: int = LEAST_CPU, wait: float = WAIT) -> None:
        self._memory = memory
        self._cpu = cpu
        self._wait = wait
        self._slots = threading.BoundedSemaphore(most)
        self._max_idle = min(most, available_processors())
        self._lock = threading.Lock()
        """Guards the connection to the fork server and the fields below."""
        self._server: ForkServer | None = None
        self._busy: set[ParserProcess] = set()
        self._idle: list[ParserProcess] = []
        self._closed = False

    def start(self) -> None:
        """Start the fork server without waiting until it is ready. Otherwise the first body starts it."""
        with self._locked(self._wait):
            self._running_server()

    @contextmanager
    def parser(self, options: ReadOptions) -> Iterator[ChildBodyParser]:
        """Provide a child process that parses one body. Leaving the context releases it, even in mid-body.

        Raises Unavailable if no child is available within the timeout.
        """
        deadline = time.monotonic() + self._wait
        if not self._slots.acquire(timeout=self._wait):
            raise self._none_available()
        try:
            process = self._acquire(deadline)
            try:
                yield ChildBodyParser(options, process, lambda: self._exit_error(process))
            finally:
                self._release(process)
        finally:
            self._slots.release()

    def close(self) -> None:
        """Kill all children. Callers that use one, or request one later, get Unavailable."""
        self._closed = True
        # Without the lock: a thread that waits for the fork server may hold it.
        server = self._server
        if server is not None:
            server.kill()
        with self._lock:
            if server is not None:
                server.end()
            for process in self._idle:
                process.close()
            self._idle.clear()

    def _acquire(self, deadline: float) -> ParserProcess:
        with self._locked(deadline - time.monotonic()):
            while self._idle:
                process = self._idle.pop()
                if process.is_alive():
                    self._busy.add(process)
                    return process
                self._reap(process)
            for _ in range(ATTEMPTS):
                try:
                    server = self._running_server()
                    if not server.is_ready(deadline):
                        break  # it continues to start, for the next body
                    process = server.fork()
                except (OSError, EOFError):
                    self._drop_server()
                    continue
                self._busy.add(process)
                return process
            raise self._none_available()

    def _release(self, process: ParserProcess) -> None:
        with self._lock:
            if process not in self._busy:
                return  # it exited and was reaped
            self._busy.discard(process)
            try:
                process.finish()
            except (OSError, EOFError):
                self._reap(process)
                return
            if len(self._idle) < self._max_idle and process.bytes < RETIRED_AFTER and not self._closed:
                self._idle.append(process)
            else:
                self._reap(process)

    def _exit_error(self, process: ParserProcess) -> Exception:
        """Reap a child that died and return the error to raise for the body that it was parsing."""
        with self._lock:
            self._busy.discard(process)
            exit_status = self._reap(process)
        if exit_status is None:
            return Unavailable("the process that parsed the body died", retry_after=1)
        log.warning("parser process died", pid=process.pid, **exit_status._asdict())
        if exit_status.code == OUT_OF_MEMORY:
            return out_of_memory(self._memory)
        if exit_status.signal == signal.SIGXCPU:
            return invalid_format(f"parsing it takes more than {process.allowance} seconds of CPU time")
        if exit_status.signal in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
            return invalid_format(f"the process that parsed it crashed ({signal.Signals(exit_status.signal).name})")
        return Unavailable("the process that parsed the body died", retry_after=1)

    def _reap(self, process: ParserProcess) -> ExitStatus | None:
        """Kill a child and return its exit status; None if its fork server is gone."""
        process.close()
        if self._server is not process.server or self._closed:
            return None  # it was killed with its fork server
        try:
            return self._server.reap(process.pid)
        except (OSError, EOFError):
            self._drop_server()
            return None

    def _running_server(self) -> ForkServer:
        if self._closed:
            raise Unavailable("the server is shutting down", retry_after=1)
        if self._server is None:
            self._server = ForkServer(self._memory, self._cpu)
            if self._closed:  # `close` ran concurrently and did not see the new server
                self._server.end()
        return self._server

    def _drop_server(self) -> None:
        """Kill a fork server that does not reply, and its children."""
        server, self._server = self._server, None
        if server is not None:
            server.end()
            log.warning("parser fork server died", pid=server.pid, reason=server.exit_reason)
        for process in self._idle:
            process.close()
        self._idle.clear()

    @contextmanager
    def _locked(self, wait: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=max(0.0, wait)):
            raise self._none_available()
        try:
            yield
        finally:
            self._lock.release()

    def _none_available(self) -> Unavailable:
        return Unavailable(f"no parser process became available within {self._wait:g} seconds", retry_after=2)


def out_of_memory(limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body takes more than {limit} bytes of memory to parse: send it in parts, or with smaller batches",
        limit=limit,
    )


def cpu_allowance(least: int, received: int, chunks: int) -> int:
    """Return the CPU seconds allowed for a body after this many received bytes and produced chunks."""
    return least + received // BYTES_PER_CPU + chunks * CPU_PER_CHUNK


def available_processors() -> int:
    """Return the number of CPUs this process may use, by its affinity and the CPU quota of its cgroup."""
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(count, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no cgroup, cgroup v1, or no quota
        return count


def _reported_error(response: Message) -> Exception:
    """Rebuild the exception that a child reported."""
    if response.type is MessageType.PROBLEM:
        members = response.detail["members"]
        if "errors" in members:
            members["errors"] = [FieldError(**fault) for fault in members["errors"]]
        return problem_types()[response.detail["slug"]](response.detail["detail"], **members)
    return RuntimeError(f"parser process failed:\n{response.detail.get('trace')}")
