"""A real server and hostile or broken clients."""

import json
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_serve import tarn
from tests.server import Server, running
from tests.waiting import wait_until

ENTITY = b'{"id": "a", "schema": "Person", "properties": {"name": ["Ada"]}}\n'


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=30)


def send_partial_post(server: Server, path: str, kind: str, body: bytes, request_id: str) -> socket.socket:
    """Open a connection that announces a longer body than it sends."""
    connection = connected(server)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.admin_key}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body) + 100}\r\nX-Request-ID: {request_id}\r\nExpect: 100-continue\r\n\r\n"
    )
    connection.sendall(head.encode())
    assert b"100 Continue" in connection.recv(1000)
    connection.sendall(body)
    return connection


def events_of(server: Server, request_id: str) -> list[dict]:
    """Wait until a request is over, and return its log events."""
    while True:
        lines = [line for line in server.log.read_text().splitlines() if request_id in line and line.endswith("}")]
        events = [json.loads(line) for line in lines]
        if any(event["event"] == "request" for event in events):
            return events


def test_header_that_never_ends_is_cut_off_and_others_are_not_delayed(server: Server):
    sent = 0
    with connected(server) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX-A: ")
        with pytest.raises(OSError):
            while sent < 64 << 20:
                connection.sendall(b"a" * 65536)
                sent += 65536
        answered = httpx.get(f"{server.url}/healthz").elapsed.total_seconds()

    assert sent < 16 << 20
    assert answered < 5


def test_bytes_that_are_not_http_are_answered_with_a_problem(server: Server):
    with connected(server) as connection:
        connection.sendall(b"SHOUT / HTTP/1.1\r\n\r\n")
        answer = connection.recv(65536)

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"application/problem+json" in answer


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/v1/datasets", "application/json", b'{"name"'),
        ("/v1/datasets/gone/entities", "application/x-ndjson", ENTITY),
        ("/v1/datasets/gone/entities", "application/x-ndjson", ENTITY * 50_000),
    ],
    ids=["document", "small", "large"],
)
def test_client_that_disconnects_while_sending_is_not_logged_as_an_error(
    server: Server, request, path: str, kind: str, body: bytes
):
    server.client().post("/v1/datasets", json={"name": "gone"})
    request_id = f"gone-{request.node.callspec.id}"

    send_partial_post(server, path, kind, body, request_id).close()

    events = events_of(server, request_id)
    assert {event["level"] for event in events} == {"info"}
    assert [event["status"] for event in events if event["event"] == "request"] == [499]


def test_waiting_for_a_job_ends_when_the_server_stops(tmp_path: Path):
    assert tarn(tmp_path, "migrate").returncode == 0
    with running(tmp_path, "api") as server:
        client, answers = server.client(), []
        client.post("/v1/datasets", json={"name": "donations"})
        path = "/v1/datasets/donations?confirm=donations&wait=120"
        waiting = threading.Thread(target=lambda: answers.append(client.delete(path)))
        waiting.start()
        # Wait until the job is queued and the request waits for it.
        wait_until(lambda: client.get("/v1/datasets/donations").status_code != 200)
        started = time.monotonic()

        code = server.stop()
        waiting.join()

    assert (code, answers[0].status_code, answers[0].json()["state"]) == (0, 202, "queued")
    assert time.monotonic() - started < 10


def test_request_that_exceeds_the_shutdown_grace_period_is_answered_503(tmp_path: Path):
    with (
        running(tmp_path, TARN_SHUTDOWN_GRACE="1") as server,
        send_partial_post(server, "/v1/datasets", "application/json", b"{", "too-slow") as connection,
    ):
        server.stop()
        answer = connection.recv(65536)

    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"/problems/unavailable" in answer
    assert b"x-request-id: too-slow" in answer
