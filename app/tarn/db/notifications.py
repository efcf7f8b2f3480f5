"""Notifications: a commit wakes those who wait for what it changed, in this process and in others on the same database.

1. publish    a write transaction collects topics: those of its outbox events, and those that its code names
2. send       PostgreSQL sends them with the commit (NOTIFY). On SQLite, the process that committed sends a datagram to
              each process that listens on a socket in the folder `{database}.listeners`
3. wake       the threads and requests that subscribed to one of the topics read the state from SQL

A notification has no data and may be lost, so whoever waits also polls, rarely. When a process begins to listen, or
listens again after an interruption, everyone who waits in it is woken.
"""

import asyncio
import json
import os
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import structlog
from sqlalchemy import Connection, text

log = structlog.get_logger(__name__)

TOPICS = "tarn_topics"
"""The connection's execution option that holds the topics of its transaction."""

EVENTS = "events"
"""Topic of every transaction that records an event."""
JOURNAL = "journal"
"""Topic of the first batch that waits for a flush of its dataset."""
ACCESS = "access"
"""Topic of a change of access rights."""
EVERYTHING = "*"
"""Sent instead of topics that do not fit into one message."""

CHANNEL = "tarn"
"""PostgreSQL's channel."""

MAX_MESSAGE = 4000
"""Maximum bytes of a message. PostgreSQL allows 8 000, a Unix socket more."""

RECONNECT_SECONDS = 1.0
"""Seconds between two attempts to listen."""

CHECK_SECONDS = 30.0
"""Seconds between two checks of a channel without messages: that PostgreSQL answers, that the socket still exists."""


def job_topic(job_id: str) -> str:
    """Return the topic of a job's events."""
    return f"job:{job_id}"


def stream_topic(stream: str) -> str:
    """Return the topic of a stream's events; the stream is a dataset's id, or a job's."""
    return f"stream:{stream}"


def publish(connection: Connection, *topics: str) -> None:
    """Wake those who wait for these topics when the transaction commits, which must be one of `Database.write`."""
    published: set[str] = connection.get_execution_options()[TOPICS]
    published.update(topics)


class Waiter:
    """Lets one thread wait for notifications. `wake` may be called in any thread and in a signal handler."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def wake(self) -> None:
        self._woken.set()

    def wait(self, seconds: float) -> bool:
        """Wait until woken, also before this call, or for these seconds. Returns whether it was woken."""
        is_woken = self._woken.wait(seconds)
        self._woken.clear()
        return is_woken


class Notifications:
    """The notifications of one process. Thread-safe.

    Those of its own commits reach it at once, those of other processes while it listens.
    """

    def __init__(self, channel: "Channel") -> None:
        self._channel = channel
        self._subscribers: dict[str, set[Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def subscribed(self, topics: Collection[str], wake: Callable[[], None]) -> Iterator[None]:
        """Call `wake` for every notification of these topics, in any thread. It must return quickly."""
        with self._lock:
            for topic in topics:
                self._subscribers.setdefault(topic, set()).add(wake)
        try:
            yield
        finally:
            with self._lock:
                for topic in topics:
                    self._subscribers[topic].discard(wake)
                    if not self._subscribers[topic]:
                        del self._subscribers[topic]

    @contextmanager
    def subscribed_on_loop(self, topics: Collection[str]) -> Iterator[asyncio.Event]:
        """Yield an event of the running loop that is set for every notification of these topics."""
        woken, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(woken.set)

        with self.subscribed(topics, wake):
            yield woken

    def send_with_commit(self, connection: Connection, topics: Collection[str]) -> None:
        """Send notifications as part of a transaction, if the database can."""
        self._channel.send_with_commit(connection, _message(topics))

    def send_after_commit(self, topics: Collection[str]) -> None:
        """Wake this process, and other processes unless the database does that."""
        self._channel.send_after_commit(_message(topics))
        self.wake(topics)

    def wake(self, topics: Iterable[str] = (EVERYTHING,)) -> None:
        """Wake those who wait in this process for one of these topics; by default, everyone."""
        named = set(topics)
        with self._lock:
            chosen = self._subscribers.keys() if EVERYTHING in named else named & self._subscribers.keys()
            callbacks = {wake for topic in chosen for wake in self._subscribers[topic]}
        for wake in callbacks:
            wake()

    def listen(self) -> None:
        """Receive the notifications of other processes, in a thread, until `close`."""
        self._thread = threading.Thread(target=self._listen, name="notifications", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        was_lost = False
        while not self._stopping.is_set():
            try:
                with self._channel.receiver() as messages:
                    if was_lost:
                        log.info("notifications of other processes are received again")
                    was_lost = False
                    self.wake()
                    for message in messages:
                        if self._stopping.is_set():
                            return
                        self.wake(json.loads(message) if message else ())
            except (OSError, ValueError, psycopg.Error) as error:
                if not was_lost and not self._stopping.is_set():
                    log.warning("notifications of other processes are lost; polling", error=type(error).__name__)
                was_lost = True
            self._stopping.wait(RECONNECT_SECONDS)

    def close(self) -> None:
        """Stop listening."""
        self._stopping.set()
        self._channel.interrupt()
        if self._thread is not None:
            self._thread.join()


def _message(topics: Collection[str]) -> str:
    message = json.dumps(sorted(topics))
    return message if len(message) <= MAX_MESSAGE else json.dumps([EVERYTHING])


class Channel(ABC):
    """How notifications reach other processes."""

    @abstractmethod
    def send_with_commit(self, connection: Connection, message: str) -> None:
        """Send a message with the commit of a transaction, or do nothing."""

    @abstractmethod
    def send_after_commit(self, message: str) -> None:
        """Send a message, or do nothing if the commit sent it. Raises nothing."""

    @abstractmethod
    @contextmanager
    def receiver(self) -> Iterator[Iterator[str]]:
        """Yield the messages that arrive while the context is open, and now and then an empty one.

        Raises OSError or psycopg.Error when the connection is lost.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """End the receiver's wait."""


class PostgresChannel(Channel):
    """LISTEN and NOTIFY, on one connection per process."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._connection: psycopg.Connection | None = None

    def send_with_commit(self, connection: Connection, message: str) -> None:
        connection.execute(text("SELECT pg_notify(:channel, :message)"), {"channel": CHANNEL, "message": message})

    def send_after_commit(self, message: str) -> None:
        pass

    @contextmanager
    def receiver(self) -> Iterator[Iterator[str]]:
        with psycopg.connect(self._uri, autocommit=True) as connection:
            connection.execute(f"LISTEN {CHANNEL}")
            self._connection = connection
            try:
                yield self._messages(connection)
            finally:
                self._connection = None

    @staticmethod
    def _messages(connection: psycopg.Connection) -> Iterator[str]:
        while True:
            for notification in connection.notifies(timeout=CHECK_SECONDS):
                yield notification.payload
            connection.execute("SELECT 1")
            yield ""

    def interrupt(self) -> None:
        connection = self._connection
        if connection is None:
            return
        # The receiving thread waits for the socket to become readable, which it does at its end.
        with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as sock:
            sock.shutdown(socket.SHUT_RDWR)


class SqliteChannel(Channel):
    """Datagrams between processes of one machine: each listens on a Unix socket in a folder beside the database."""

    def __init__(self, path: Path) -> None:
        self._folder = path.with_name(f"{path.name}.listeners")
        self._name: str | None = None
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sender.setblocking(False)

    def send_with_commit(self, connection: Connection, message: str) -> None:
        pass

    def send_after_commit(self, message: str) -> None:
        try:
            names = os.listdir(self._folder)
        except OSError:  # no process has listened yet
            return
        for name in names:
            if name != self._name:
                self._send(name, message)

    def _send(self, name: str, message: str) -> None:
        try:
            with self._address(name) as address:
                self._sender.sendto(message.encode(), address)
        except ConnectionRefusedError:  # its process is dead
            with suppress(OSError):
                (self._folder / name).unlink()
        except OSError:  # its buffer is full: it is about to wake, and polls as well
            pass

    @contextmanager
    def receiver(self) -> Iterator[Iterator[str]]:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
            with self._address(name) as address:
                receiver.bind(address)
            self._name = name
            try:
                yield self._messages(receiver, self._folder / name)
            finally:
                (self._folder / name).unlink(missing_ok=True)
                self._name = None

    @staticmethod
    def _messages(receiver: socket.socket, path: Path) -> Iterator[str]:
        receiver.settimeout(CHECK_SECONDS)
        while True:
            try:
                yield receiver.recv(2 * MAX_MESSAGE).decode()
            except TimeoutError:
                path.stat()
                yield ""

    @contextmanager
    def _address(self, name: str) -> Iterator[str]:
        """Yield the socket's path, in a form that is short enough for a socket: paths of folders may be longer."""
        path = str(self._folder / name)
        if len(path.encode()) < 100 or not Path("/proc/self/fd").exists():
            yield path
            return
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            yield f"/proc/self/fd/{folder}/{name}"
        finally:
            os.close(folder)

    def interrupt(self) -> None:
        if (name := self._name) is not None:
            self._send(name, "")
