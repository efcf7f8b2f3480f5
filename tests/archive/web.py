"""Servers on the loopback that send exactly what a test scripts, and canaries that must not be connected to."""

import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

Script = Callable[[], Iterable[bytes]]


def answer(body: bytes = b"", status: str = "200 OK", **headers: str) -> Script:
    """Return a response with its length, and headers with `_` for `-`."""
    given = {"Content-Length": str(len(body))} | {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return lambda: [f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body]


def page(*links: str) -> Script:
    text = "".join(f'<li><a href="{link}">{link}</a>' for link in links)
    return answer(text.encode(), Content_Type="text/html; charset=utf-8")


def redirect(location: str, status: str = "302 Found") -> Script:
    return answer(status=status, Location=location)


@dataclass
class Scripted:
    """A server that responds to each path with the bytes of its script, one request per connection."""

    listener: socket.socket
    tls: ssl.SSLContext | None = None
    scripts: dict[str, Script] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """The head of each request."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set at the end, for scripts that wait."""

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            # A client may disconnect at any time.
            with connection, suppress(OSError):
                self._answer(self.tls.wrap_socket(connection, server_side=True) if self.tls else connection)

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(65536)
            self.requests.append(head.decode())
            path = head.split()[1].decode()
            for piece in self.scripts.get(path, answer(status="404 Not Found"))():
                connection.sendall(piece)


@contextmanager
def scripted(address: str = "127.0.0.1", tls: ssl.SSLContext | None = None, port: int = 0) -> Iterator[Scripted]:
    with listening(address, port) as listener:
        server = Scripted(listener, tls)
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextmanager
def listening(address: str = "127.0.0.1", port: int = 0) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(100)
        yield listener


@dataclass(frozen=True)
class Canary:
    """Sockets that must not be connected to.

    A connection is pending before its client knows, so one poll is sufficient.
    """

    listeners: tuple[socket.socket, ...]

    @property
    def port(self) -> int:
        return int(self.listeners[0].getsockname()[1])

    def touched(self) -> bool:
        return bool(select.select(self.listeners, [], [], 0)[0])
