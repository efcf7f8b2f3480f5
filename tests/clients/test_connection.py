"""The client's connection: requests, retries, refused arguments, and how responses are read."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from uuid import uuid4

import pytest
from tarn_client import InvalidRequest, Lake, Problem, Unreachable
from tarn_client.connection import Connection
from tarn_client.paths import path_of
from tarn_client.stage import ABORT_SECONDS, Stage

from tests.server import Server

LOCAL = "http://localhost:8000"


@pytest.fixture
def connection(server: Server) -> Iterator[Connection]:
    with Connection(server.url, server.admin_key, retry_timeout=0) as connection:
        yield connection


@pytest.fixture
def other_server_url() -> Iterator[str]:
    """Start a server that is not Tarn: it sends HTML, an empty object for /json, and an incomplete body for /broken."""

    class OtherServer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if self.path == "/missing" else 200)
            self.send_header("Content-Length", "100" if self.path == "/broken" else "2")
            self.end_headers()
            self.wfile.write(b"{}" if self.path.startswith("/json") else b"<>")

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), OtherServer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class ScriptedServer(HTTPServer):
    """A server that sends prepared responses in order: a status, headers and a document, or None to disconnect."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ScriptedHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.responses: list[tuple[int, dict[str, str], Any] | None] = []
        self.received: list[tuple[str | None, bytes]] = []


class ScriptedHandler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.headers["Idempotency-Key"], body))
        response = self.server.responses.pop(0)
        if response is None:
            self.close_connection = True
            return
        status, headers, document = response
        content = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    """Start a server without responses."""
    with ScriptedServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the seconds between the attempts of a connection, without waiting."""
    waits: list[float] = []
    monkeypatch.setattr("tarn_client.connection.time.sleep", waits.append)
    return waits


def refusal(slug: str, retryable: bool = True) -> dict[str, Any]:
    return {"type": f"/problems/{slug}", "detail": slug, "status": 429, "retryable": retryable}


def test_write_is_retried_with_the_same_key_and_body_after_the_requested_delay(
    scripted: ScriptedServer, waits: list[float]
):
    scripted.responses = [None, (429, {"Retry-After": "7"}, refusal("backpressure")), (200, {}, {"done": True})]

    with Connection(scripted.url, "key") as connection:
        result = connection.write("POST", "/any", {"a": 1})

    assert result == {"done": True}
    assert len({key for key, _ in scripted.received}) == 1
    assert [body for _, body in scripted.received] == [b'{"a": 1}'] * 3
    assert 0 < waits[0] < 1
    assert waits[1:] == [7]


def test_streamed_body_is_produced_again_for_each_attempt(scripted: ScriptedServer, waits: list[float]):
    scripted.responses = [(429, {}, refusal("backpressure")), (200, {}, {})]

    def chunks() -> Iterator[bytes]:
        yield b"one, "
        yield b"two"

    with Connection(scripted.url, "key") as connection:
        connection.request("POST", "/any", content=chunks, headers={"Content-Length": "8"})

    assert [body for _, body in scripted.received] == [b"one, two"] * 2


@pytest.mark.parametrize("refused", [refusal("quota-exceeded"), refusal("schema-violation", retryable=False)])
def test_permanent_refusal_is_not_retried(scripted: ScriptedServer, waits: list[float], refused: Any):
    scripted.responses = [(429, {}, refused)]

    with Connection(scripted.url, "key") as connection, pytest.raises(Problem) as caught:
        connection.write("POST", "/any")

    assert (caught.value.slug, waits) == (refused["detail"], [])


def test_connection_without_retries_sends_a_request_once_and_without_a_key(
    scripted: ScriptedServer, waits: list[float]
):
    scripted.responses = [(429, {}, refusal("backpressure")), (429, {}, refusal("backpressure")), (200, {}, {})]

    with Connection(scripted.url, "key", retry_timeout=0) as connection:
        with pytest.raises(Problem):
            connection.write("POST", "/any")
        assert scripted.received == [(None, b"")]
        connection.with_retries(60).write("POST", "/any")

    assert (len(scripted.received), len(waits)) == (3, 1)


@pytest.mark.parametrize("key", ["two\nlines", "schlüssel"])
def test_key_that_is_invalid_in_a_header_is_refused_and_not_shown(key: str):
    with pytest.raises(InvalidRequest) as caught:
        Lake(LOCAL, key)

    assert key not in str(caught.value)


@pytest.mark.parametrize("url", ["nonsense", "127.0.0.1:8000", "ftp://lake.example", "http://", "http://host:port", ""])
def test_invalid_url_of_a_server_is_refused(url: str):
    with pytest.raises(InvalidRequest, match="is not the URL of a server"):
        Lake(url, "key")


def test_proxy_of_the_environment_is_not_used_for_loopback(server: Server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    with Lake(server.url, server.admin_key, retry_timeout=0) as lake:
        assert lake.whoami()["tenant"] == "admin"


def test_list_is_read_over_all_its_pages_or_up_to_a_limit(connection: Connection, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tarn_client.connection.LARGEST_PAGE", 2)
    tenant = f"t{uuid4().hex[:12]}"
    connection.write("POST", "/v1/admin/tenants", {"name": tenant})
    path = path_of("/v1/admin/tenants", tenant, "grants")
    for pattern in ("a", "b", "c", "d", "e"):
        connection.write("POST", path, {"dataset": pattern, "level": "read"})

    all_grants = [grant["dataset"] for grant in connection.each(path)]
    first_grants = [grant["dataset"] for grant in connection.each(path, limit=3)]

    assert all_grants == ["a", "b", "c", "d", "e"]
    assert first_grants == ["a", "b", "c"]


def test_problem_is_raised_with_its_document(connection: Connection):
    with pytest.raises(Problem) as caught:
        connection.read("/v1/admin/tenants/nobody")

    assert caught.value.slug == "tenant-not-found"
    assert caught.value.document["status"] == 404


def test_truncated_response_raises_unreachable(other_server_url: str):
    with Connection(other_server_url, "key", retry_timeout=0) as connection, pytest.raises(Unreachable) as caught:
        connection.read("/broken")

    assert caught.value.connected
    assert str(caught.value).startswith(f"no complete response from {other_server_url}: ")


@pytest.mark.parametrize("path", ["/missing", "/page"])
def test_response_of_another_server_is_a_problem(other_server_url: str, path: str):
    with Connection(other_server_url, "key") as connection, pytest.raises(Problem, match="not a response of Tarn"):
        connection.read(path)


def test_etag_of_a_document_is_returned_with_it_and_another_servers_page_is_a_problem(
    connection: Connection, other_server_url: str
):
    name = f"c{uuid4().hex[:12]}"
    connection.write("POST", "/v1/datasets", {"name": name})

    document, etag = connection.read_with_etag(path_of("/v1/datasets", name))

    assert (document["name"], etag[:1], etag[-1:]) == (name, '"', '"')
    with Connection(other_server_url, "key") as other, pytest.raises(Problem, match="not a response of Tarn"):
        other.read_with_etag("/page")


def test_failed_tls_handshake_is_reported_as_such():
    def refuse(listener: socket.socket) -> None:
        with listener.accept()[0] as accepted:
            accepted.recv(65536)
            accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=refuse, args=(listener,), daemon=True).start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with Connection(url, "key", retry_timeout=0) as connection, pytest.raises(Unreachable) as caught:
            connection.read("/any")

    assert str(caught.value).startswith(f"the TLS connection to {url} failed: ")


def test_abort_of_a_stage_is_not_retried_for_long(scripted: ScriptedServer, waits: list[float]):
    scripted.responses = [(200, {}, {"id": "stage"})]
    with Connection(scripted.url, "key") as connection, Connection("http://127.0.0.1:1", "key") as unreachable:
        stage = Stage(connection, "/v1/datasets/any", None)
        stage._connection = unreachable

        stage.abort()

    assert 0 < sum(waits) < 2 * ABORT_SECONDS


def test_list_of_another_server_is_a_problem(other_server_url: str):
    with Connection(other_server_url, "key") as connection, pytest.raises(Problem, match="not a response of Tarn"):
        list(connection.each("/json"))


def test_stream_of_another_media_type_is_a_problem(other_server_url: str):
    with (
        Connection(other_server_url, "key") as connection,
        pytest.raises(Problem, match="not a response of Tarn"),
        connection.stream("/page", "text/csv"),
    ):
        pass


@pytest.mark.parametrize("body", [{"limit": float("nan")}, {"when": object()}, {"title": "\udcff"}])
def test_body_that_json_cannot_express_is_refused(connection: Connection, body: Any):
    with pytest.raises(InvalidRequest, match="cannot be sent as JSON"):
        connection.write("POST", "/v1/datasets", body)


def test_name_is_escaped_into_one_segment_of_a_path():
    path = path_of("/v1/datasets", "a/../b?c=d#e %2e", "versions")

    assert path == "/v1/datasets/a%2F..%2Fb%3Fc%3Dd%23e%20%252e/versions"


@pytest.mark.parametrize("name", ["", ".", ".."])
@pytest.mark.parametrize("use", [lambda name: path_of("/v1/datasets", name), Lake(LOCAL, "key").dataset])
def test_name_that_would_change_the_path_is_refused(use: Callable[[str], Any], name: str):
    with pytest.raises(InvalidRequest, match="is not a name"):
        use(name)
