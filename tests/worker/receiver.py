"""A tenant's own server on the loopback, that takes events as a test tells it to."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tarn.model.webhook import EVENT_HEADER, SIGNATURE_HEADER, TIME_HEADER, signature

SECRET = "sixteen characters at least"


@dataclass(frozen=True)
class Post:
    """What arrived."""

    id: str
    timestamp: str
    signature: str
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    def is_signed(self, secret: str = SECRET) -> bool:
        return self.signature == signature(secret, self.timestamp, self.body)


@dataclass
class Receiver:
    """What it was sent, and what it answers: a status, decided with each post."""

    port: int
    answer: Callable[[Post], int] = lambda _: 204
    posts: list[Post] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    """Set at the end, for answers that wait."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def numbers(self) -> list[int]:
        return [post.event["id"] for post in self.posts]


@contextmanager
def receiving() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            given = self.headers
            post = Post(given[EVENT_HEADER], given[TIME_HEADER], given[SIGNATURE_HEADER], body)
            receiver.posts.append(post)
            status = receiver.answer(post)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.send_header("Location", f"{receiver.url}/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver = Receiver(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield receiver
    finally:
        receiver.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
