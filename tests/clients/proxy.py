"""A proxy on loopback that cuts connections after a given number of bytes."""

import math
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

CHUNK_BYTES = 65536


@dataclass(frozen=True)
class Cut:
    """The number of bytes that a connection forwards to the server and back before it is cut; the rest is dropped."""

    up: float = math.inf
    down: float = math.inf


@dataclass
class Proxy:
    """Forwards bytes to a server: each connection up to the next cut, and without a limit when no cuts are left."""

    target: tuple[str, int]
    cuts: deque[Cut]
    url: str = ""
    cut_count: int = 0
    connections: list[socket.socket] = field(default_factory=list)

    def serve(self, listener: socket.socket) -> None:
        with suppress(OSError):  # raised when the listener is closed
            while True:
                client, _ = listener.accept()
                cut = self.cuts.popleft() if self.cuts else Cut()
                server = socket.create_connection(self.target)
                self.connections += [client, server]
                for source, sink, limit in ((client, server, cut.up), (server, client, cut.down)):
                    threading.Thread(target=self._forward, args=(source, sink, limit), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, limit: float) -> None:
        remaining = limit
        with suppress(OSError):
            while chunk := source.recv(CHUNK_BYTES):
                if len(chunk) > remaining:
                    sink.sendall(chunk[: int(remaining)])
                    self.cut_count += 1
                    break
                sink.sendall(chunk)
                remaining -= len(chunk)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutting_proxy(url: str, cuts: Iterable[Cut]) -> Iterator[Proxy]:
    """Run a proxy in front of the server at this URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    proxy = Proxy((parts.hostname, parts.port), deque(cuts))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=proxy.serve, args=(listener,), daemon=True).start()
        yield proxy
        listener.shutdown(socket.SHUT_RDWR)
    for connection in proxy.connections:
        connection.close()
