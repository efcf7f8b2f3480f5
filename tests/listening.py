"""The API on a real socket of this process, for tests that need connections or settings and services of their own."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import uvicorn
from tarn.api.application import create_app
from tarn.api.http.middleware.protocol import Protocol
from tarn.api.http.services.container import Services


class Listening:
    """A server and clients for it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.url = f"http://{address[0]}:{address[1]}"

    def client(self, key: str | None = None) -> httpx.Client:
        """Return a client with this key; the caller closes it."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None)
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, limits=limits)

    def connect(self, timeout: float = 30) -> socket.socket:
        """Open a connection for raw bytes."""
        return socket.create_connection(self.address, timeout=timeout)


@contextmanager
def listening(services: Services) -> Iterator[Listening]:
    """Serve these services with Tarn's protocol class, and close everything that was opened afterwards."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        address = listener.getsockname()
        config = uvicorn.Config(
            create_app(services), http=Protocol, ws="none", log_config=None, timeout_graceful_shutdown=5
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield Listening(address)
        finally:
            server.should_exit = True
            thread.join()
            for service in (services.parsers, services.writer, services.reader, services.denials, services.hub):
                service.close()


def head(method: str, path: str, key: str | None = None, **options: str) -> bytes:
    """Return the head of a request; `_` in the name of a header becomes `-`."""
    headers = {name.replace("_", "-"): value for name, value in options.items()}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def answer_on(connection: socket.socket) -> tuple[int, dict[str, str], dict[str, object]]:
    """Read until the server closes the connection; return status, headers and the JSON body."""
    response = b""
    with suppress(ConnectionResetError):  # the server closed while we were still sending
        while data := connection.recv(65536):
            response += data
    head, _, body = response.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100 "):
        head, _, body = body.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, json.loads(body)
