"""Start child processes of this program, exchange messages with them, and end them.

1. start    `python -P -m MODULE`: the child imports what its parent does, whatever the current folder holds
2. connect  the child's standard input is one end of a Unix socket pair. Both sides send messages on it
3. end      closing the connection ends the child. The kernel closes it when the parent dies, even by SIGKILL

Messages are framed by `multiprocessing.connection`. Binary data that belongs to a message follows its frame, because a
connection copies what it receives twice (docs/decisions/044-child-processes.md).
"""

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

END_SECONDS = 10.0
"""How long a child may take to exit after its connection was closed."""

LOW_PRIORITY = 10
"""Increase of the nice value: the process gets a tenth of a processor that another one keeps busy. Not less, so that
reads make progress while a flush uses every processor."""

MAX_MESSAGE = 1 << 30


class Codec(NamedTuple):
    """How messages are converted to bytes and back."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    max_bytes: int | None = None
    """Size limit of a received message, and of its data."""


PICKLE = Codec(lambda message: pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL), pickle.loads)
"""For any Python object. Only for a child that runs no code or parser on input that may take it over. Without a size
limit: the rows of a query may be as large as the values of a dataset."""
JSON = Codec(orjson.dumps, orjson.loads, MAX_MESSAGE)


class MessageConnection:
    """One end of a connection between two processes of this program. One thread may send or receive at a time.

    All methods raise OSError, or EOFError if the other side has closed the connection or died. `receive` also raises
    them for a message above the size limit.
    """

    def __init__(self, connection: Connection, codec: Codec) -> None:
        self._connection = connection
        self._codec = codec

    @classmethod
    def pair(cls, codec: Codec) -> tuple["MessageConnection", "MessageConnection"]:
        """Create two connected ends."""
        one, other = socket.socketpair()
        return cls(Connection(one.detach()), codec), cls(Connection(other.detach()), codec)

    @property
    def is_closed(self) -> bool:
        return self._connection.closed

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> "MessageConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: Any, data: "bytes | pa.Buffer" = b"") -> None:
        """Send a message and binary data, in as few system calls as possible: each one gives up the GIL."""
        view = memoryview(data)
        with _as_timeout():
            self._connection.send_bytes(self._codec.encode((message, view.nbytes)))
            if view.nbytes:
                with self._socket() as sock:
                    sock.sendall(view)

    def receive(self) -> tuple[Any, bytearray]:
        """Wait for a message, and return it and its data."""
        with _as_timeout():
            limit = self._codec.max_bytes
            message, size = self._codec.decode(self._connection.recv_bytes(limit))
            if limit is not None and size > limit:
                raise EOFError
            return message, self._receive_data(size)

    def _receive_data(self, size: int) -> bytearray:
        data, filled = bytearray(size), 0
        if size:
            with self._socket() as sock, memoryview(data) as view:
                while filled < size:
                    # One call reads everything, unless a signal interrupts it.
                    received = sock.recv_into(view[filled:], 0, socket.MSG_WAITALL)
                    if not received:
                        raise EOFError
                    filled += received
        return data

    def is_readable(self, seconds: float = 0.0) -> bool:
        """Wait until the other side has sent data or closed the connection. Return False on timeout."""
        return self._connection.poll(max(0.0, seconds))

    def limit_waits(self, seconds: float) -> None:
        """Let `send` and `receive` raise TimeoutError if the other side does nothing for this long.

        The kernel enforces it, so that the socket stays in blocking mode. The connection cannot be used after a
        timeout: a part of a message may have been sent.
        """
        value = struct.pack("@ll", int(max(seconds, 0.001)), int(max(seconds, 0.001) % 1 * 1_000_000))
        with self._socket() as sock:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, value)

    def send_connection(self, other: "MessageConnection") -> None:
        """Send the file descriptor of a connection, after a message that announces it."""
        reduction.send_handle(self._connection, other.fileno(), None)

    def receive_connection(self) -> "MessageConnection":
        """Receive the connection that a message has announced."""
        return MessageConnection(Connection(reduction.recv_handle(self._connection)), self._codec)

    @contextmanager
    def _socket(self) -> Iterator[socket.socket]:
        """Provide the socket, which `Connection` does not. It stays open."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=self._connection.fileno())
        try:
            yield sock
        finally:
            sock.detach()


class ChildProcess:
    """A child process and the connection to it. Thread-safe, except for the connection."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        codec: Codec = JSON,
        environment: Mapping[str, str] | None = None,
        low_priority: bool = False,
        output: int | None = subprocess.DEVNULL,
    ) -> None:
        self.connection, child_end = MessageConnection.pair(codec)
        with child_end:
            # -P: the current folder may contain modules with the names of ours.
            command = [sys.executable, "-P", "-m", module, *arguments]
            environment = os.environ | (environment or {})
            self._process = subprocess.Popen(command, stdin=child_end.fileno(), stdout=output, env=environment)  # noqa: S603 - ours
        if low_priority:
            # Before it starts any thread: threads inherit the priority of the thread that starts them.
            lower_priority(self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_reason(self) -> str | None:
        """Return how the process ended (`exit code 1`, `SIGKILL`), or None if it runs.

        Its connection may be closed some milliseconds earlier.
        """
        code = self._process.poll()
        if code is None:
            return None
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def wait(self) -> None:
        """Wait until the process has exited."""
        self._process.wait()

    def terminate(self) -> None:
        """Ask the process to end its work and exit."""
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def end(self, seconds: float = END_SECONDS) -> None:
        """Close the connection, wait until the process has exited, and kill it if that takes too long."""
        self.connection.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def _as_timeout() -> Iterator[None]:
    """Convert the error of a system call that reached its timeout."""
    try:
        yield
    except BlockingIOError as error:
        raise TimeoutError from error


def lower_priority(pid: int) -> None:
    """Lower the priority of a running process. This is permanent: raising it again takes a privilege."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid) + LOW_PRIORITY)


def connect_to_parent(codec: Codec = JSON) -> MessageConnection:
    """Return the connection to the parent. To be called in a child process.

    Ctrl-C is sent to the whole process group; this process ignores it, and ends only when its parent closes the
    connection.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stdin = sys.stdin.fileno()
    connection = Connection(os.dup(stdin))
    # No library may read a message by mistake, and no child of this process may keep the connection open.
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), stdin)
    return MessageConnection(connection, codec)


def run_when_parent_dies(act: Callable[[], None]) -> None:
    """Call `act` once standard input is closed, which is the connection to the parent. For child processes that get no
    messages."""

    def watch() -> None:
        with suppress(OSError):  # the connection was reset
            while os.read(sys.stdin.fileno(), 1024):
                pass
        act()

    threading.Thread(target=watch, name="parent", daemon=True).start()
