"""Large bodies, parsed in processes of their own.

Parsing is Python's own work, and readers share one interpreter with it: a writer beside them got a quarter of its pace.
So a child (`app.journal.parser`) does it. The two speak in turns over a socket: the child asks for bytes, or gives a
chunk, or says how it ended; the parent answers each with bytes, with leave to go on, or with word that nobody wants the
rest any more.
"""

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import orjson
import pyarrow as pa
import structlog

from app.errors import Fault, Unavailable, problem_types
from app.journal.events import Chunk, Packed
from app.journal.formats.record import BLOCK, Source
from app.journal.intake import Intake, Rejected, Terms
from app.model.entity import Exploder
from app.sockets import exactly

log = structlog.get_logger(__name__)

HEAD = struct.Struct(">BIQ")
"""What a message is, and how long its two parts are."""


class Says(IntEnum):
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

    says: Says
    detail: dict[str, Any]
    data: memoryview


def send(
    peer: socket.socket, says: Says, detail: dict[str, Any] | None = None, data: "bytes | pa.Buffer" = b""
) -> None:
    """Send one message, in as few steps as can be: after each one this thread has to get hold of Python again."""
    text = orjson.dumps(detail or {})
    peer.sendall(HEAD.pack(says, len(text), len(data)) + text)
    if len(data):
        peer.sendall(data)


def receive(peer: socket.socket) -> Message:
    """Wait for one message. Raises EOFError if the other side is gone."""
    says, text, data = HEAD.unpack(exactly(peer, HEAD.size))
    rest = memoryview(exactly(peer, text + data))
    return Message(Says(says), orjson.loads(rest[:text]), rest[text:])


class Reading(Protocol):
    """A body being read: its chunks, and what is known of it once they are at their end."""

    @property
    def entities(self) -> int: ...
    @property
    def statements(self) -> int: ...
    @property
    def rejected(self) -> Rejected: ...
    def chunks(self, source: Source) -> Iterator[Chunk]: ...


class Parser:
    """A child, as its parent sees it."""

    def __init__(self) -> None:
        self._peer, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "app.journal.parser"]
            given = theirs.fileno()
            self._process = subprocess.Popen(command, stdin=given, stdout=subprocess.DEVNULL)  # noqa: S603 - ours
        self._begun = False
        self.expects = False
        """Whether the child waits for our word, in the middle of a body."""
        self.sound = True

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_ready(self) -> bool:
        """Whether it has started, without waiting for it. Raises EOFError if it is gone."""
        if self._process.poll() is not None:
            raise EOFError
        if not self._begun:
            try:
                self._peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            self._begun = receive(self._peer).says is Says.READY
            log.info("a parser is ready", pid=self.pid)
        return True

    def ask(self, says: Says, detail: dict[str, Any] | None = None, data: bytes = b"") -> Message:
        """Say something and wait for the answer. Raises Unavailable if the child is gone."""
        self.expects = self.sound = False
        try:
            send(self._peer, says, detail, data)
            answer = receive(self._peer)
        except (OSError, EOFError) as error:
            raise Unavailable("the process that parsed the body died", retry_after=1) from error
        self.sound = True
        return answer

    def settle(self) -> None:
        """Make it ready for the next body, wherever this one ended. Raises EOFError if that cannot be."""
        if not self.sound:
            raise EOFError
        if self.expects:
            send(self._peer, Says.DROP)
            self.expects = False

    def end(self) -> None:
        """End the child. It holds nothing that is worth waiting for."""
        self._peer.close()
        self._process.kill()
        self._process.wait()


class Parsed:
    """A body that a child reads."""

    def __init__(self, terms: Terms, parser: Parser) -> None:
        self._terms = terms
        self._parser = parser
        self.rejected = Rejected()
        self.entities = 0
        self.statements = 0

    def chunks(self, source: Source) -> Iterator[Chunk]:
        """The body's events, as `Intake` makes them. Raises the same, and Unavailable if the child dies."""
        parser = self._parser
        answer = parser.ask(Says.BODY, {"terms": self._terms.model_dump()}, source.read(BLOCK))
        while True:
            parser.expects = answer.says is Says.MORE or (answer.says is Says.CHUNK and not answer.detail["over"])
            if answer.says is Says.MORE:
                answer = parser.ask(Says.BYTES, data=source.read(BLOCK))
                continue
            if answer.says is not Says.CHUNK:
                raise _problem(answer)
            counted = answer.detail
            self.entities += counted["entities"]
            self.statements += counted["statements"]
            if counted["over"]:
                faults = [Fault(**fault) for fault in counted["faults"]]
                self.rejected = Rejected(counted["rejected"], faults)
            if answer.data:
                (rows,) = pa.ipc.open_stream(answer.data)
                yield Packed(rows, counted["entities"], counted["statements"], counted["size"])
                del rows
            if counted["over"]:
                return
            del answer  # whoever writes it has it; it need not be kept while the next one is made
            answer = parser.ask(Says.GO_ON)


class Parsers:
    """The children of one process, at most so many, started when they are needed and kept.

    Nobody waits for one: a body that finds none ready is read by the thread that has it. To wait would be to wait for
    other clients, each of which may take as long as it likes over its body.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._all: set[Parser] = set()
        self._idle: list[Parser] = []
        self._closed = False

    @contextmanager
    def reading(self, terms: Terms) -> Iterator[Reading]:
        """Read a body, in a child if one is ready. Leaving the context gives the child back, however far it came."""
        parser = self._take()
        if parser is None:
            yield Intake(terms, Exploder())
            return
        try:
            yield Parsed(terms, parser)
        finally:
            self._give_back(parser)

    def close(self) -> None:
        """End all children. Who still reads with one gets Unavailable."""
        with self._lock:
            self._closed = True
            for parser in self._all:
                parser.end()
            self._all.clear()
            self._idle.clear()

    def _take(self) -> Parser | None:
        with self._lock:
            for parser in list(self._idle):
                try:
                    if parser.is_ready():
                        self._idle.remove(parser)
                        return parser
                except (OSError, EOFError):
                    self._discard(parser)
            if not self._idle and len(self._all) < self._most and not self._closed:
                parser = Parser()
                self._all.add(parser)
                self._idle.append(parser)
            return None

    def _give_back(self, parser: Parser) -> None:
        with self._lock:
            try:
                parser.settle()
            except (OSError, EOFError):
                self._discard(parser)
            else:
                self._idle.append(parser)

    def _discard(self, parser: Parser) -> None:
        if parser in self._all:
            log.warning("a parser is gone", pid=parser.pid)
            self._all.remove(parser)
            parser.end()
        if parser in self._idle:
            self._idle.remove(parser)


def _problem(answer: Message) -> Exception:
    """What a child could not get over, in the words that it would have had here."""
    if answer.says is Says.PROBLEM:
        members = answer.detail["members"]
        if "errors" in members:
            members["errors"] = [Fault(**fault) for fault in members["errors"]]
        return problem_types()[answer.detail["slug"]](answer.detail["detail"], **members)
    return RuntimeError(f"a parser failed:\n{answer.detail.get('trace')}")
