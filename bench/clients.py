"""Clients that cost so little that the server is what is measured."""

import selectors
import socket
import time
from collections.abc import Iterable, Iterator
from types import TracebackType

from tests.server import Server

QUIET = {"TARN_FLUSH_AGE": "86400", "TARN_FLUSH_ROWS": "1000000000", "TARN_FLUSH_BYTES": "1" + "0" * 15}
"""Settings of a server that flushes only what it is asked to."""


class Requests:
    """Connections that each ask for one path after the other, as soon as they have their answer."""

    def __init__(self, url: str, key: str, connections: int, paths: Iterator[str]) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._paths = paths
        self._tail = f" HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n\r\n"
        self._ready = selectors.DefaultSelector()
        self._begun: dict[socket.socket, float] = {}
        self._held: dict[socket.socket, bytes] = {}
        self.answered = 0
        self.times: list[float] = []
        for _ in range(connections):
            one = socket.create_connection((host, int(port)))
            self._ready.register(one, selectors.EVENT_READ)
            self._ask(one)

    def turn(self) -> None:
        """Take what has arrived, and ask again for what is complete."""
        for key, _ in self._ready.select(1):
            one = key.fileobj
            assert isinstance(one, socket.socket)
            self._held[one] += one.recv(1 << 20)
            if _is_complete(self._held[one]):
                self.answered += 1
                self.times.append(time.perf_counter() - self._begun[one])
                self._ask(one)

    def _ask(self, one: socket.socket) -> None:
        self._held[one] = b""
        self._begun[one] = time.perf_counter()
        one.sendall(f"GET {next(self._paths)}{self._tail}".encode())

    def __enter__(self) -> "Requests":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._held:
            one.close()
        self._ready.close()


def request_sequentially(server: Server, paths: Iterable[str]) -> list[float]:
    """The seconds that each of these paths took one client."""
    wanted = [*paths]
    with Requests(server.url, server.admin_key, 1, iter([*wanted, "/healthz"])) as client:
        while client.answered < len(wanted):
            client.turn()
        return client.times


def _is_complete(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return False
    assert head.startswith(b"HTTP/1.1 200"), answer
    return len(body) == int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
