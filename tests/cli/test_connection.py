"""The client: keys it finds, lists it follows, answers it refuses."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tarn.cli.connection import ADMIN_KEY_FILE, Client
from tarn.cli.failures import Misuse, ProblemAnswered, Unreachable
from tarn.cli.paths import at
from tarn.cli.session import DEFAULT_URL
from tarn.settings import Settings

from tests.server import Server

LOCAL, REMOTE = "http://localhost:8000", "http://lake.example:8000"


def key_of(url: str, key: str | None = None) -> str | None:
    with Client(url, key) as client:
        return client.key


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    return tmp_path


@pytest.fixture
def strangers_url() -> Iterator[str]:
    """A server that is not Tarn: a page is HTML, /json an empty object, and /broken breaks off."""

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if self.path == "/missing" else 200)
            self.send_header("Content-Length", "100" if self.path == "/broken" else "2")
            self.end_headers()
            self.wfile.write(b"{}" if self.path.startswith("/json") else b"<>")

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        thread = threading.Thread(target=stranger.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{stranger.server_port}"
        stranger.shutdown()
        thread.join()


def test_defaults_are_those_of_a_server_started_here():
    fields = Settings.model_fields

    assert Path(ADMIN_KEY_FILE) == fields["admin_key_file"].default
    assert f"http://{fields['host'].default}:{fields['port'].default}" == DEFAULT_URL


def test_key_in_the_admin_key_file_is_for_a_server_on_this_machine_alone(here: Path):
    (here / "data" / "admin.key").write_text("from-the-file\n")

    assert (key_of(LOCAL), key_of("http://[::1]:8000")) == ("from-the-file", "from-the-file")
    assert key_of(REMOTE) is None


def test_admin_key_in_the_environment_is_for_a_server_on_this_machine_alone(here, monkeypatch):
    monkeypatch.setenv("TARN_ADMIN_KEY", "from-the-environment")

    assert key_of(LOCAL) == "from-the-environment"
    assert key_of(REMOTE) is None


def test_each_place_of_a_key_goes_before_the_next(here: Path, monkeypatch):
    (here / "data" / "admin.key").write_text("default file")
    found = [key_of(LOCAL)]
    (here / "elsewhere").write_text("named file")
    monkeypatch.setenv("TARN_ADMIN_KEY_FILE", "elsewhere")
    found.append(key_of(LOCAL))
    monkeypatch.setenv("TARN_ADMIN_KEY", "environment")
    found.append(key_of(LOCAL))
    found.append(key_of(LOCAL, "given"))

    assert found == ["default file", "named file", "environment", "given"]


def test_key_file_that_cannot_be_read_is_misuse(here: Path):
    (here / "data" / "admin.key").mkdir()

    with pytest.raises(Misuse, match=r"data/admin.key cannot be read"):
        key_of(LOCAL)


@pytest.mark.parametrize("key", ["two\nlines", "schlüssel"])
def test_key_that_no_header_can_carry_is_misuse_and_not_shown(key: str):
    with pytest.raises(Misuse) as caught:
        Client(LOCAL, key)

    assert key not in str(caught.value)


@pytest.mark.parametrize("url", ["nonsense", "127.0.0.1:8000", "ftp://lake.example", "http://", "http://host:port", ""])
def test_what_is_no_url_of_a_server_is_misuse(url: str):
    with pytest.raises(Misuse, match="is not the URL of a server"):
        Client(url, "key")


def test_proxy_of_the_environment_is_not_asked_for_loopback(server: Server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    with Client(server.url, server.admin_key) as client:
        assert client.document("GET", "/v1/whoami")["tenant"] == "admin"


def test_list_is_followed_over_all_its_pages_and_up_to_a_limit(server: Server, tenant: str):
    path = at("/v1/admin/tenants", tenant, "grants")
    with Client(server.url, server.admin_key) as client:
        for pattern in ("a", "b", "c", "d", "e"):
            client.document("POST", path, {"dataset": pattern, "level": "read"})

        everything = [grant["dataset"] for grant in client.each(path, page=2)]
        first = [grant["dataset"] for grant in client.each(path, limit=3, page=2)]

    assert everything == ["a", "b", "c", "d", "e"]
    assert first == ["a", "b", "c"]


def test_problem_is_raised_with_its_document(server: Server):
    with Client(server.url, server.admin_key) as client, pytest.raises(ProblemAnswered) as caught:
        client.document("GET", "/v1/admin/tenants/nobody")

    assert caught.value.slug == "tenant-not-found"
    assert caught.value.problem["status"] == 404


def test_nothing_that_listens_is_unreachable():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        client = Client(f"http://127.0.0.1:{bound.getsockname()[1]}", "key")
        with client, pytest.raises(Unreachable, match="no server answers at http://127"):
            client.request("GET", "/v1/whoami")


def test_answer_that_breaks_off_is_unreachable(strangers_url: str):
    with Client(strangers_url, "key") as client, pytest.raises(Unreachable, match="gave no whole answer"):
        client.request("GET", "/broken")


@pytest.mark.parametrize("path", ["/missing", "/page"])
def test_answer_of_another_server_is_told_apart(strangers_url: str, path: str):
    with Client(strangers_url, "key") as client, pytest.raises(ProblemAnswered, match="not an answer of Tarn"):
        client.document("GET", path)


def test_list_of_another_server_is_told_apart(strangers_url: str):
    with Client(strangers_url, "key") as client, pytest.raises(ProblemAnswered, match="not an answer of Tarn"):
        list(client.each("/json"))


@pytest.mark.parametrize("body", [{"limit": float("nan")}, {"when": object()}, {"title": "\udcff"}])
def test_body_that_json_does_not_have_is_misuse(server: Server, body):
    with Client(server.url, "key") as client, pytest.raises(Misuse, match="cannot be sent as JSON"):
        client.request("POST", "/v1/datasets", body)


def test_names_stay_in_their_place_of_a_path():
    assert at("/v1/datasets", "a/../b?c=d#e %2e", "versions") == "/v1/datasets/a%2F..%2Fb%3Fc%3Dd%23e%20%252e/versions"


@pytest.mark.parametrize("segment", ["", ".", ".."])
def test_name_that_leads_elsewhere_is_misuse(segment: str):
    with pytest.raises(Misuse, match="is not a name"):
        at("/v1/datasets", segment)
