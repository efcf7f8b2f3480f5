"""HTTP connections: request heads that never end, are malformed, or follow other requests."""

import json
import socket
import threading
from asyncio import sleep
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from tarn.api.http.middleware import protocol
from tarn.api.http.middleware.protocol import LARGEST_HEAD, Protocol

SHORT = 0.3
"""Time limit of a head in seconds, for tests that wait for it."""

START = b"GET / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body, sleep if the request asks for it, and respond with the number of bytes read."""
    request = Request(scope, receive)
    body = await request.body()
    await sleep(SHORT * 3 if scope["path"] == "/slow" else 0)
    await PlainTextResponse(f"{len(body)} bytes")(scope, receive, send)


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    """Open a connection to a server with our protocol class."""
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    config = uvicorn.Config(application, http=Protocol, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    with socket.create_connection(address, timeout=10) as connection:
        yield connection
    server.should_exit = True
    thread.join()


def receive_all(connection: socket.socket) -> bytes:
    """Return what is received until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def assert_refused(response: bytes) -> dict:
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/problem+json" in head
    assert b"x-request-id: " in head
    problem = json.loads(body)
    assert (problem["type"], problem["status"]) == ("/problems/invalid-format", 400)
    return problem


@pytest.mark.parametrize("start", [START + b"X-A: ", START + b"X-A", b"GET /"])
def test_head_over_the_limit_is_refused_before_it_is_complete(connection: socket.socket, start: bytes):
    connection.sendall(start.ljust(LARGEST_HEAD + 1, b"a"))

    assert str(LARGEST_HEAD) in assert_refused(receive_all(connection))["detail"]


def test_trailers_over_the_limit_are_refused_before_they_are_complete(connection: socket.socket):
    connection.sendall(CHUNKED.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
    assert b"100 Continue" in connection.recv(1000)

    connection.sendall(b"0\r\nX-A: ".ljust(LARGEST_HEAD + 1, b"a"))

    assert str(LARGEST_HEAD) in assert_refused(receive_all(connection))["detail"]


def test_head_of_many_small_headers_over_the_limit_is_refused(connection: socket.socket):
    connection.sendall((START + b"a: b\r\n" * LARGEST_HEAD)[: LARGEST_HEAD + 1])

    assert_refused(receive_all(connection))


def test_head_below_the_limit_is_served(connection: socket.socket):
    end = b"\r\nConnection: close\r\n\r\n"

    connection.sendall((START + b"X-A: ").ljust(LARGEST_HEAD - len(end), b"a") + end)

    assert receive_all(connection).startswith(b"HTTP/1.1 200 ")


def test_many_requests_on_one_connection_are_not_counted_as_one_head(connection: socket.socket):
    request = (START + b"X-A: ").ljust(10_000, b"a") + b"\r\n\r\n"

    for _ in range(20):
        connection.sendall(request)
        # Head and body may arrive one after the other.
        response = connection.recv(65536)
        while not response.endswith(b"0 bytes"):
            response += connection.recv(65536)
        assert response.startswith(b"HTTP/1.1 200 ")


def test_body_of_many_small_chunks_is_not_counted_as_head(connection: socket.socket):
    count = LARGEST_HEAD

    connection.sendall(CHUNKED + b"1\r\nx\r\n" * count + b"0\r\n\r\n")

    response = connection.recv(65536)
    while b" bytes" not in response:
        response += connection.recv(65536)
    assert response.endswith(b"%d bytes" % count)


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET / HT", START, START + b"X-A: a"])
def test_connection_without_a_complete_head_is_closed_in_time(sent: bytes, monkeypatch, request):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", SHORT)
    connection: socket.socket = request.getfixturevalue("connection")

    connection.sendall(sent)

    assert receive_all(connection) == b""


def test_second_head_has_its_own_time_limit(monkeypatch, request):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", SHORT)
    connection: socket.socket = request.getfixturevalue("connection")
    connection.sendall(START + b"\r\n")
    assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")

    connection.sendall(b"\r\n")

    assert receive_all(connection) == b""


def test_request_may_take_longer_than_the_time_limit_of_its_head(monkeypatch, request):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", SHORT)
    connection: socket.socket = request.getfixturevalue("connection")

    connection.sendall(START.replace(b"/ ", b"/slow ") + b"\r\n")

    assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00", b"SHOUT / HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", CHUNKED + b"zz\r\n"],
)
def test_malformed_request_is_refused_with_a_problem(connection: socket.socket, sent: bytes):
    connection.sendall(sent)

    assert_refused(receive_all(connection))


def test_refusal_is_not_sent_as_the_response_to_the_previous_request(connection: socket.socket):
    connection.sendall(START.replace(b"/ ", b"/slow ") + b"\r\n" + b"SHOUT / HTTP/1.1\r\n\r\n")

    assert receive_all(connection) == b""
