"""Low-overhead HTTP clients, so that benchmarks measure the server and not the client."""

import selectors
import socket
import time
from collections.abc import Iterable, Iterator
from types import TracebackType

from tests.server import Server

QUIET = {"TARN_FLUSH_AGE": "86400", "TARN_FLUSH_ROWS": "1000000000", "TARN_FLUSH_BYTES": "1" + "0" * 15}
"""Settings of a server that flushes only on request."""


class Requests:
    """Connections that each send GET requests in sequence, the next as soon as the previous response is complete."""

    def __init__(self, url: str, key: str, connections: int, paths: Iterator[str]) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._paths = paths
        self._tail = f" HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n\r\n"
        self._ready = selectors.DefaultSelector()
        self._begun: dict[socket.socket, float] = {}
        self._received: dict[socket.socket, bytes] = {}
        self.answered = 0
        self.times: list[float] = []
        for _ in range(connections):
            connection = socket.create_connection((host, int(port)))
            self._ready.register(connection, selectors.EVENT_READ)
            self._send(connection)

    def poll(self) -> None:
        """Receive available data; send the next request on connections whose response is complete."""
        for key, _ in self._ready.select(1):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            self._received[connection] += connection.recv(1 << 20)
            if _is_complete(self._received[connection]):
                self.answered += 1
                self.times.append(time.perf_counter() - self._begun[connection])
                self._send(connection)

    def _send(self, connection: socket.socket) -> None:
        self._received[connection] = b""
        self._begun[connection] = time.perf_counter()
        connection.sendall(f"GET {next(self._paths)}{self._tail}".encode())

    def __enter__(self) -> "Requests":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._received:
            connection.close()
        self._ready.close()


def request_sequentially(server: Server, paths: Iterable[str]) -> list[float]:
    """Request paths one after the other with one client; return the seconds that each took."""
    requested = [*paths]
    with Requests(server.url, server.admin_key, 1, iter([*requested, "/healthz"])) as client:
        while client.answered < len(requested):
            client.poll()
        return client.times


def _is_complete(response: bytes) -> bool:
    head, separator, body = response.partition(b"\r\n\r\n")
    if not separator:
        return False
    assert head.startswith(b"HTTP/1.1 200"), response
    return len(body) == int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
