"""A proxy on loopback that breaks connections off where a test says."""

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
    """How many bytes a connection carries to the server, and back, before it is broken off; what is over is lost."""

    up: float = math.inf
    down: float = math.inf


@dataclass
class Proxy:
    """Carries bytes to a server: each connection by the next plan, and all of it when there are no more."""

    target: tuple[str, int]
    plans: deque[Cut]
    url: str = ""
    broken: int = 0
    connections: list[socket.socket] = field(default_factory=list)

    def serve(self, listener: socket.socket) -> None:
        with suppress(OSError):  # which is how closing the listener ends this
            while True:
                client, _ = listener.accept()
                cut = self.plans.popleft() if self.plans else Cut()
                server = socket.create_connection(self.target)
                self.connections += [client, server]
                for source, sink, most in ((client, server, cut.up), (server, client, cut.down)):
                    threading.Thread(target=self._carry, args=(source, sink, most), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, most: float) -> None:
        left = most
        with suppress(OSError):
            while piece := source.recv(CHUNK_BYTES):
                if len(piece) > left:
                    sink.sendall(piece[: int(left)])
                    self.broken += 1
                    break
                sink.sendall(piece)
                left -= len(piece)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutting(url: str, plans: Iterable[Cut]) -> Iterator[Proxy]:
    """A proxy before the server at this URL, as long as the context is open."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    proxy = Proxy((parts.hostname, parts.port), deque(plans))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=proxy.serve, args=(listener,), daemon=True).start()
        yield proxy
        listener.shutdown(socket.SHUT_RDWR)
    for connection in proxy.connections:
        connection.close()
