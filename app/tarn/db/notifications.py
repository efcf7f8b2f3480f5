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
import re
import secrets
import selectors
import socket
import stat
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import psycopg
import structlog
from sqlalchemy import Connection, text

log = structlog.get_logger(__name__)

TOPICS = "tarn_topics"
"""The connection's execution option that holds the topics of its transaction."""

EVENTS = "events"
"""Topic of every transaction that records an event, or changes which events are delivered."""
JOURNAL = "journal"
"""Topic of the first batch that waits for a flush of its dataset."""
ACCESS = "access"
"""Topic of a change of access rights."""
EVERYTHING = "*"
"""Sent instead of topics that do not fit into one message."""

CHANNEL = "tarn"
"""PostgreSQL's channel."""

MAX_MESSAGE = 4000
"""Maximum bytes of a message. PostgreSQL allows 8 000."""

DATAGRAMS = 10
"""Datagrams after which Linux may discard further ones for a socket that nobody reads (`max_dgram_qlen`)."""

RECONNECT_SECONDS = 1.0
"""Seconds between two attempts to listen."""

CHECK_SECONDS = 30.0
"""Seconds between two checks of a channel without messages: that PostgreSQL answers, that the socket still exists."""

CONNECT_SECONDS, STOP_SECONDS = 5, 2.0
"""Seconds for connecting to PostgreSQL, and for the end of the listening thread."""


def job_topic(job_id: str) -> str:
    """Return the topic of the states of a job."""
    return f"job:{job_id}"


def snapshot_topic(dataset_id: str) -> str:
    """Return the topic of a dataset's new snapshots."""
    return f"snapshot:{dataset_id}"


def publish(connection: Connection, *topics: str) -> None:
    """Wake those who wait for these topics when the transaction commits, which must be one of `Database.write`."""
    published: set[str] = connection.get_execution_options()[TOPICS]
    published.update(topics)


class Waiter:
    """Lets one thread wait for notifications. `wake` may be called in any thread, and in a signal handler."""

    def __init__(self) -> None:
        # `threading.Event` may not be set in a signal handler of the thread that waits for it.
        self._woken: SimpleQueue[None] = SimpleQueue()

    def wake(self) -> None:
        if self._woken.empty():
            self._woken.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait until woken, also before this call, or for these seconds. Returns whether it was woken."""
        try:
            self._woken.get(timeout=max(0.0, seconds))
        except Empty:
            return False
        with suppress(Empty):
            while True:
                self._woken.get_nowait()
        return True


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
        self._interrupt: socket.socket | None = None
        """Closing it ends the wait of the listening thread."""
        self._is_sending_broken = False

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
        """Wake this process, and other processes unless the database does that. Raises nothing: it is committed."""
        try:
            self.wake(topics)
            self._channel.send_after_commit(_message(topics))
        except Exception as error:  # noqa: BLE001 - whoever waits also polls
            if not self._is_sending_broken:
                log.warning("notifications cannot be sent; others poll", error=f"{type(error).__name__}: {error}"[:300])
            self._is_sending_broken = True
        else:
            self._is_sending_broken = False

    def wake(self, topics: Iterable[str] = (EVERYTHING,)) -> None:
        """Wake those who wait in this process for one of these topics; by default, everyone."""
        named = set(topics)
        with self._lock:
            chosen = [*self._subscribers] if EVERYTHING in named else named & self._subscribers.keys()
            callbacks = {wake for topic in chosen for wake in self._subscribers[topic]}
        for wake in callbacks:
            wake()

    def listen(self) -> None:
        """Receive the notifications of other processes, in a thread, until `close`."""
        self._interrupt, interrupted = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, args=[interrupted], name="notifications", daemon=True)
        self._thread.start()

    def _listen(self, interrupted: socket.socket) -> None:
        was_lost = False
        with interrupted:
            while not self._stopping.is_set():
                try:
                    with self._channel.receiver() as receiver:
                        if was_lost:
                            log.info("notifications of other processes are received again")
                        was_lost = False
                        self.wake()
                        self._receive(receiver, interrupted)
                except Exception as error:  # noqa: BLE001 - the thread goes on, and whoever waits polls meanwhile
                    if not was_lost:
                        log.warning(
                            "no notifications of other processes are received; polling",
                            error=f"{type(error).__name__}: {error}"[:300],
                        )
                    was_lost = True
                self._stopping.wait(RECONNECT_SECONDS)

    def _receive(self, receiver: "Receiver", interrupted: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(receiver, selectors.EVENT_READ)
            selector.register(interrupted, selectors.EVENT_READ)
            while not self._stopping.is_set():
                if not selector.select(CHECK_SECONDS):
                    receiver.check()
                self.wake({topic for message in receiver.read() for topic in _topics(message)})

    def close(self) -> None:
        """Stop listening."""
        self._stopping.set()
        if self._interrupt is not None:
            self._interrupt.close()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)


def _message(topics: Collection[str]) -> str:
    message = json.dumps(sorted(topics))
    return message if len(message) <= MAX_MESSAGE else json.dumps([EVERYTHING])


def _topics(message: str) -> set[str]:
    """Return the topics of a message; everything for one that this version does not understand."""
    try:
        topics = json.loads(message)
        return {topic for topic in topics if isinstance(topic, str)} if isinstance(topics, list) else {EVERYTHING}
    except (ValueError, RecursionError):
        return {EVERYTHING}


class Receiver(ABC):
    """The receiving end of a channel. Its methods raise an exception when the channel is lost."""

    @abstractmethod
    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when there are messages."""

    @abstractmethod
    def read(self) -> list[str]:
        """Return the messages that have arrived, without waiting."""

    @abstractmethod
    def check(self) -> None:
        """Raise an exception if no message can arrive any more."""


class Channel(ABC):
    """How notifications reach other processes."""

    @abstractmethod
    def send_with_commit(self, connection: Connection, message: str) -> None:
        """Send a message with the commit of a transaction, or do nothing."""

    @abstractmethod
    def send_after_commit(self, message: str) -> None:
        """Send a message without waiting, or do nothing if the commit sent it."""

    @abstractmethod
    @contextmanager
    def receiver(self) -> Iterator[Receiver]:
        """Yield a receiver of the messages that are sent while the context is open."""


class PostgresChannel(Channel):
    """LISTEN and NOTIFY, on one connection per process."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def send_with_commit(self, connection: Connection, message: str) -> None:
        connection.execute(text("SELECT pg_notify(:channel, :message)"), {"channel": CHANNEL, "message": message})

    def send_after_commit(self, message: str) -> None:
        """Do nothing: the commit has sent it, also to this process."""

    @contextmanager
    def receiver(self) -> Iterator[Receiver]:
        with psycopg.connect(self._uri, autocommit=True, connect_timeout=CONNECT_SECONDS) as connection:
            connection.execute(f"LISTEN {CHANNEL}")
            yield _PostgresReceiver(connection)


class _PostgresReceiver(Receiver):
    def __init__(self, connection: "psycopg.Connection[tuple[object, ...]]") -> None:
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def read(self) -> list[str]:
        # Completely, because the generator holds the connection's lock until its end.
        return [notification.payload for notification in self._connection.notifies(timeout=0)]

    def check(self) -> None:
        self._connection.execute("SELECT 1")


class SqliteChannel(Channel):
    """Datagrams between processes of one user on one machine: each listens on a Unix socket in a folder beside the
    database, which only that user can open."""

    SOCKET_NAME = re.compile(r"[0-9]+-[0-9a-f]{8}")

    def __init__(self, path: Path) -> None:
        path = path.resolve()
        self._folder = path.with_name(f"{path.name}.listeners")
        self._own: str | None = None
        """The name of this process's socket."""

    def send_with_commit(self, connection: Connection, message: str) -> None:
        """Do nothing: the message is sent after the commit."""

    def send_after_commit(self, message: str) -> None:
        try:
            with self._opened() as folder:
                for name in os.listdir(folder):
                    if name != self._own and self.SOCKET_NAME.fullmatch(name):
                        self._send(folder, name, message.encode())
        except FileNotFoundError:  # no process has listened yet
            pass

    def _send(self, folder: int, name: str, message: bytes) -> None:
        # A socket for each receiver: what one receiver has not read counts against the sender's buffer.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            try:
                sender.sendto(message, self._address(folder, name))
            except ConnectionRefusedError:  # its process is dead
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)
            except OSError:  # it has messages that it has not read, so it will wake everyone
                pass

    @contextmanager
    def receiver(self) -> Iterator[Receiver]:
        with suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        with self._opened() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
            bound.setblocking(False)
            bound.bind(self._address(folder, name))
            self._own = name
            try:
                yield _DatagramReceiver(bound, self._folder / name)
            finally:
                self._own = None
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the folder. Raises OSError, also if it does not belong to this user alone."""
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(folder)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise PermissionError(f"{self._folder} must belong to this user and have mode 0700")
            yield folder
        finally:
            os.close(folder)

    def _address(self, folder: int, name: str) -> str:
        """Return the socket's address. The path of the folder itself may be too long for one."""
        return f"/proc/self/fd/{folder}/{name}" if sys.platform == "linux" else str(self._folder / name)


class _DatagramReceiver(Receiver):
    def __init__(self, bound: socket.socket, path: Path) -> None:
        self._bound = bound
        self._path = path

    def fileno(self) -> int:
        return self._bound.fileno()

    def read(self) -> list[str]:
        messages: list[str] = []
        with suppress(BlockingIOError):
            while len(messages) < DATAGRAMS:
                messages.append(self._bound.recv(MAX_MESSAGE).decode(errors="replace"))
        # If the queue was full, others may have been discarded.
        return messages if len(messages) < DATAGRAMS else [json.dumps([EVERYTHING])]

    def check(self) -> None:
        self._path.stat()
