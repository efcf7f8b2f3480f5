"""A tenant's webhook receiver on the loopback interface, whose responses a test chooses."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tarn.model.work.webhook import EVENT_HEADER, SIGNATURE_HEADER, TIME_HEADER, signature

SECRET = "sixteen characters at least"


@dataclass(frozen=True)
class Post:
    """A delivery as received."""

    id: str
    timestamp: str
    signature: str
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(self.body)
        return event

    def is_signed(self, secret: str = SECRET) -> bool:
        return self.signature == signature(secret, self.timestamp, self.body)


@dataclass
class Receiver:
    """The deliveries so far, and the function that returns the response status for each."""

    port: int
    status_of: Callable[[Post], int] = lambda _: 204
    posts: list[Post] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the receiver stops, for responses that wait."""

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
            headers = self.headers
            post = Post(headers[EVENT_HEADER], headers[TIME_HEADER], headers[SIGNATURE_HEADER], body)
            receiver.posts.append(post)
            status = receiver.status_of(post)
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
        receiver.stopping.set()
        server.shutdown()
        server.server_close()
        thread.join()
