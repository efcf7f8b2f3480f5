"""Bodies parsed in child processes, under limits of memory and time.

Parsing is Python's own work, and readers share one interpreter with it; and a body may be made to take all memory and
time there is. So a child does it, and this process never does, but for the smallest bodies of lines
(`tarn.api.http.ingest`).

1. fork server  `tarn.journal.parser_process`, started with the API: it has imported everything, and forks children that
share
                its memory until they write to it. A fork takes some milliseconds, and a child some megabytes
2. children     as many as there are bodies, up to a limit: none waits for the clients of others. A few idle ones are
                kept, with what they have learned of schemata and values
3. a body       parent and child speak in turns over a socket: the child asks for bytes, or gives a chunk, or says how
                it ended; the parent answers each with bytes, with leave to go on, or with word that nobody wants the
                rest any more
4. limits       the kernel holds a child to its memory (RLIMIT_DATA) and to its CPU time, which grows with the body
                (RLIMIT_CPU). The parent waits for no answer longer than a multiple of that, and then kills the child
5. its end      a child that died of its body makes that body's problem: 413 or 400, which trying again does not help.
                Whatever else ends one is a 503
"""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import orjson
import pyarrow as pa
import structlog

from tarn.child_process import exactly
from tarn.errors import BodyTooLarge, Fault, Unavailable, problem_types
from tarn.journal.event_buffer import Chunk, Packed
from tarn.journal.event_chunks import ReadOptions, ReadReport
from tarn.journal.formats.counting import require_equal
from tarn.journal.formats.record import BLOCK, ByteSource, invalid_format

log = structlog.get_logger(__name__)

MEMORY = 1 << 30
"""Bytes that a child may take beyond what it has when it is forked."""

LEAST_CPU, BYTES_PER_CPU = 30, 32 << 10
"""Seconds of CPU time for any body, and the bytes of it that give one more. The slowest real bodies take a tenth."""
CPU_PER_CHUNK = 10
"""Seconds that each chunk of valid rows gives: a few bytes may be many of them."""

WALL_PER_CPU = 8
"""How much longer a child may take by the clock, beside others: more than that is a machine that cannot do its work."""

WAIT = 60.0
"""Seconds that a body waits for a child. It is milliseconds once the fork server has started, which takes some seconds
of CPU time: a minute where the machine is very busy."""

ATTEMPTS = 2
"""How often a fork server is started anew for one body."""

CONTROL_WAIT = 10.0
"""Seconds within which the fork server answers."""

RETIRED_AFTER = 64 << 20
"""Bytes of bodies after which a child is not kept: what it freed is in pieces."""

REQUEST, REPLY = struct.Struct(">BI"), struct.Struct(">Iid")
"""What the fork server is asked: for what, and of which child. And what it answers: which child, how it ended, and its
CPU time."""
FORK, REAP = 1, 2

OUT_OF_MEMORY = 3
"""Exit code of a child that had not even the memory to say so."""

MOST_MESSAGE = 1 << 30

HEAD = struct.Struct(">BIQ")
"""What a message is, and how long its two parts are."""


class MessageType(IntEnum):
    """What a message is. Those of the child come first."""

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
    """A word, what is said with it, and bytes."""

    says: MessageType
    detail: dict[str, Any]
    data: memoryview


def send(
    peer: socket.socket, says: MessageType, detail: dict[str, Any] | None = None, data: "bytes | pa.Buffer" = b""
) -> None:
    """Send one message, in as few steps as can be: after each one this thread has to get hold of Python again."""
    text = orjson.dumps(detail or {})
    peer.sendall(HEAD.pack(says, len(text), len(data)) + text)
    if len(data):
        peer.sendall(data)


def receive(peer: socket.socket) -> Message:
    """Wait for one message. Raises EOFError if the other side is gone."""
    says, text, data = HEAD.unpack(exactly(peer, HEAD.size))
    if text + data > MOST_MESSAGE:
        raise EOFError
    rest = memoryview(exactly(peer, text + data))
    return Message(MessageType(says), orjson.loads(rest[:text]), rest[text:])


class BodyParser(Protocol):
    """A body being read: its chunks, and what is known of it once they are at their end."""

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
    """How a child ended: by which signal or with which exit code, and the CPU time that it took."""

    signal: int
    code: int
    cpu: float


class ForkServer:
    """The process that forks children, as its parent sees it. One thread at a time speaks to it."""

    module = "tarn.journal.parser_process"

    def __init__(self, memory: int, cpu: int) -> None:
        self.cpu = cpu
        self._control, theirs = socket.socketpair()
        # Arrow's own allocators reserve more than they use, which counts against a limit; each thread of numpy's would.
        environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            command = [sys.executable, "-m", self.module, str(memory), str(cpu)]
            self._process = subprocess.Popen(  # noqa: S603 - ours
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment
            )
        self._ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_ready(self, until: float) -> bool:
        """Whether it has started by then. Raises EOFError or OSError if it is gone."""
        if not self._ready:
            limit_waits(self._control, until - time.monotonic())
            try:
                self._ready = receive(self._control).says is MessageType.READY
            except BlockingIOError:
                return False
            log.info("parsers can be forked", pid=self.pid)
        return self._ready

    def fork(self) -> "ParserProcess":
        """A new child. Raises EOFError or OSError if this process is gone or does not answer."""
        limit_waits(self._control, CONTROL_WAIT)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [REQUEST.pack(FORK, 0)], [theirs.fileno()])
                (pid, *_) = REPLY.unpack(exactly(self._control, REPLY.size))
            except BaseException:
                ours.close()
                raise
        return ParserProcess(pid, ours, self)

    def reap(self, pid: int) -> ExitStatus:
        """End a child if it has not ended, and tell how it did. Raises EOFError or OSError if this process is gone."""
        limit_waits(self._control, CONTROL_WAIT)
        self._control.sendall(REQUEST.pack(REAP, pid))
        _, status, cpu = REPLY.unpack(exactly(self._control, REPLY.size))
        return ExitStatus(os.WTERMSIG(status), os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0, cpu)

    def end(self) -> None:
        """End it; its children end with it."""
        self._control.close()
        self._process.kill()
        self._process.wait()


class ParserProcess:
    """A child, as its parent sees it."""

    def __init__(self, pid: int, peer: socket.socket, server: ForkServer) -> None:
        self.pid = pid
        self.server = server
        self._peer = peer
        self._received = 0
        self.chunks = 0
        """That it gave of this body."""
        self.bytes = 0
        """Of all bodies that it was given."""
        self.expects = False
        """Whether the child waits for our word, in the middle of a body."""
        self.sound = True

    @property
    def allowance(self) -> int:
        """Seconds of CPU time that the child may take over what it was given of this body."""
        return cpu_allowance(self.server.cpu, self._received, self.chunks)

    @property
    def longest_wait(self) -> float:
        """Seconds that its answer may take."""
        return WALL_PER_CPU * max(1, self.allowance)

    def begin(self) -> None:
        self._received = self.chunks = 0

    def is_alive(self) -> bool:
        """Whether it waits for a body."""
        try:
            self._peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # it has nothing to say now: its end is closed

    def ask(self, says: MessageType, detail: dict[str, Any] | None = None, data: bytes = b"") -> Message:
        """Say something and wait for the answer. Raises TimeoutError, and EOFError or OSError if the child is gone."""
        self._received += len(data)
        self.bytes += len(data)
        self.expects = self.sound = False
        limit_waits(self._peer, self.longest_wait)
        try:
            send(self._peer, says, detail, data)
            answer = receive(self._peer)
        except BlockingIOError as error:
            raise TimeoutError from error
        self.sound = True
        return answer

    def settle(self) -> None:
        """Make it ready for the next body, wherever this one ended. Raises EOFError or OSError if that cannot be."""
        if not self.sound:
            raise EOFError
        if self.expects:
            send(self._peer, MessageType.DROP)
            self.expects = False

    def close(self) -> None:
        self._peer.close()


class ChildBodyParser:
    """A body that a child reads."""

    def __init__(self, terms: ReadOptions, parser: ParserProcess, ended: Callable[[], Exception]) -> None:
        self._terms = terms
        self._parser = parser
        self._ended = ended
        self.report = ReadReport()
        self.entities = 0
        self.statements = 0
        self.rows = 0

    def chunks(self, source: ByteSource) -> Iterator[Chunk]:
        """The body's events, as `Intake` makes them.

        Raises the same, InvalidFormat or BodyTooLarge if the child dies of the body, Unavailable if it dies otherwise.
        """
        parser = self._parser
        parser.begin()
        answer = self._ask(MessageType.BODY, {"terms": self._terms.model_dump()}, source.read(BLOCK))
        while True:
            parser.expects = answer.says is MessageType.MORE or (
                answer.says is MessageType.CHUNK and not answer.detail["over"]
            )
            if answer.says is MessageType.MORE:
                answer = self._ask(MessageType.BYTES, data=source.read(BLOCK))
                continue
            if answer.says is not MessageType.CHUNK:
                raise _reported_error(answer)
            counted = answer.detail
            self.entities += counted["entities"]
            self.statements += counted["statements"]
            if counted["over"]:
                self.report = ReadReport(**counted["report"])
            if answer.data:
                (rows,) = pa.ipc.open_stream(answer.data)
                self.rows += rows.num_rows
                yield Packed(rows, counted["entities"], counted["statements"], counted["size"])
                del rows
            if counted["over"]:
                require_equal(self.rows, counted["rows"], "rows came from the parser", "were read")
                return
            del answer  # whoever writes it has it; it need not be kept while the next one is made
            parser.chunks += 1
            answer = self._ask(MessageType.GO_ON)

    def _ask(self, says: MessageType, detail: dict[str, Any] | None = None, data: bytes = b"") -> Message:
        try:
            return self._parser.ask(says, detail, data)
        except TimeoutError as error:
            wait = f"{self._parser.longest_wait:g} seconds"
            raise Unavailable(f"a part of the body was not parsed within {wait}", retry_after=30) from error
        except (OSError, EOFError) as error:
            raise self._ended() from error


class ParserPool:
    """The children of one process."""

    def __init__(self, most: int, memory: int = MEMORY, cpu: int = LEAST_CPU, wait: float = WAIT) -> None:
        self._memory = memory
        self._cpu = cpu
        self._wait = wait
        self._places = threading.BoundedSemaphore(most)
        self._keep = min(most, available_processors())
        self._lock = threading.Lock()
        """Held while the fork server is spoken to, and while the lists below are changed."""
        self._server: ForkServer | None = None
        self._busy: set[ParserProcess] = set()
        self._idle: list[ParserProcess] = []
        self._closed = False

    def start(self) -> None:
        """Start the fork server, without waiting for it. Without this, the first body does."""
        with self._held(self._wait):
            self._serving()

    @contextmanager
    def reading(self, terms: ReadOptions) -> Iterator[ChildBodyParser]:
        """Read a body in a child. Leaving the context gives the child back, however far it came.

        Raises Unavailable if there is no child within some seconds.
        """
        until = time.monotonic() + self._wait
        if not self._places.acquire(timeout=self._wait):
            raise self._none()
        try:
            parser = self._take(until)
            try:
                yield ChildBodyParser(terms, parser, lambda: self._cause(parser))
            finally:
                self._give_back(parser)
        finally:
            self._places.release()

    def close(self) -> None:
        """End all children at once. Who still reads with one gets Unavailable, and so does who asks for one later."""
        self._closed = True
        # Not under the lock, which somebody may hold who waits for this process.
        server = self._server
        if server is not None:
            server.end()
        with self._lock:
            for parser in self._idle:
                parser.close()
            self._idle.clear()

    def _take(self, until: float) -> ParserProcess:
        with self._held(until - time.monotonic()):
            while self._idle:
                parser = self._idle.pop()
                if parser.is_alive():
                    self._busy.add(parser)
                    return parser
                self._reap(parser)
            for _ in range(ATTEMPTS):
                try:
                    server = self._serving()
                    if not server.is_ready(until):
                        break  # it goes on starting, for the next body
                    parser = server.fork()
                except (OSError, EOFError):
                    self._drop_server()
                    continue
                self._busy.add(parser)
                return parser
            raise self._none()

    def _give_back(self, parser: ParserProcess) -> None:
        with self._lock:
            if parser not in self._busy:
                return  # it ended, and was reaped
            self._busy.discard(parser)
            try:
                parser.settle()
            except (OSError, EOFError):
                self._reap(parser)
                return
            if len(self._idle) < self._keep and parser.bytes < RETIRED_AFTER and not self._closed:
                self._idle.append(parser)
            else:
                self._reap(parser)

    def _cause(self, parser: ParserProcess) -> Exception:
        """Why a child is gone, as the problem of the body that it was reading."""
        with self._lock:
            self._busy.discard(parser)
            ending = self._reap(parser)
        if ending is None:
            return Unavailable("the process that parsed the body died", retry_after=1)
        log.warning("a parser died", pid=parser.pid, signal=ending.signal, code=ending.code, cpu=ending.cpu)
        if ending.code == OUT_OF_MEMORY:
            return out_of_memory(self._memory)
        if ending.signal == signal.SIGXCPU:
            return invalid_format(f"it takes more than {parser.allowance} seconds of CPU time to parse")
        if ending.signal in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
            return invalid_format(f"the process that parsed it crashed ({signal.Signals(ending.signal).name})")
        return Unavailable("the process that parsed the body died", retry_after=1)

    def _reap(self, parser: ParserProcess) -> ExitStatus | None:
        """End a child; how it ended, if its parent is there to tell."""
        parser.close()
        if self._server is not parser.server or self._closed:
            return None  # it ended with its parent
        try:
            return self._server.reap(parser.pid)
        except (OSError, EOFError):
            self._drop_server()
            return None

    def _serving(self) -> ForkServer:
        if self._closed:
            raise Unavailable("the server is shutting down", retry_after=1)
        if self._server is None:
            self._server = ForkServer(self._memory, self._cpu)
            if self._closed:  # meanwhile, without having seen it
                self._server.end()
        return self._server

    def _drop_server(self) -> None:
        """End a fork server that does not answer, and with it its children."""
        server, self._server = self._server, None
        if server is not None:
            log.warning("the fork server of parsers is gone", pid=server.pid)
            server.end()
        for parser in self._idle:
            parser.close()
        self._idle.clear()

    @contextmanager
    def _held(self, wait: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=max(0.0, wait)):
            raise self._none()
        try:
            yield
        finally:
            self._lock.release()

    def _none(self) -> Unavailable:
        return Unavailable(f"no process to parse the body within {self._wait:g} seconds", retry_after=2)


def out_of_memory(limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body takes more than {limit} bytes of memory to parse: send it in parts, or with smaller batches",
        limit=limit,
    )


def cpu_allowance(least: int, received: int, chunks: int) -> int:
    """Seconds of CPU time that a child may take over so many bytes of a body, having made so many chunks of them."""
    return least + received // BYTES_PER_CPU + chunks * CPU_PER_CHUNK


def limit_waits(peer: socket.socket, seconds: float) -> None:
    """Let no call on a socket wait longer: BlockingIOError then. It still blocks, so that one call takes everything."""
    value = struct.pack("@ll", int(max(seconds, 0.001)), int(max(seconds, 0.001) % 1 * 1_000_000))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, value)


def available_processors() -> int:
    """Processors that this process may use: by its affinity, and by the CPU quota of its cgroup."""
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(count, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no cgroup, another version of them, or no quota
        return count


def _reported_error(answer: Message) -> Exception:
    """What a child could not get over, in the words that it would have had here."""
    if answer.says is MessageType.PROBLEM:
        members = answer.detail["members"]
        if "errors" in members:
            members["errors"] = [Fault(**fault) for fault in members["errors"]]
        return problem_types()[answer.detail["slug"]](answer.detail["detail"], **members)
    return RuntimeError(f"a parser failed:\n{answer.detail.get('trace')}")
