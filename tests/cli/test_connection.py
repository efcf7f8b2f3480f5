"""The connection of commands: the key they use, and the notes of errors."""

import socket
from pathlib import Path

import pytest
from tarn.cli.connection import ADMIN_KEY_FILE, DEFAULT_URL, connected, find_key
from tarn.cli.failures import Misuse
from tarn.settings import Settings
from tarn_client import InvalidRequest, Unreachable

from tests.cli.conftest import Tarn
from tests.server import Server

LOCAL, REMOTE = "http://localhost:8000", "http://lake.example:8000"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    return tmp_path


def test_defaults_are_those_of_a_server_started_here():
    fields = Settings.model_fields

    assert Path(ADMIN_KEY_FILE) == fields["admin_key_file"].default
    assert f"http://{fields['host'].default}:{fields['port'].default}" == DEFAULT_URL


def test_key_in_the_admin_key_file_is_for_a_server_on_this_machine_alone(here: Path):
    (here / "data" / "admin.key").write_text("from-the-file\n")

    assert (find_key(LOCAL, None), find_key("http://[::1]:8000", None)) == ("from-the-file", "from-the-file")
    assert find_key(REMOTE, None) is None


def test_admin_key_in_the_environment_is_for_a_server_on_this_machine_alone(here, monkeypatch):
    monkeypatch.setenv("TARN_ADMIN_KEY", "from-the-environment")

    assert find_key(LOCAL, None) == "from-the-environment"
    assert find_key(REMOTE, None) is None


def test_sources_of_a_key_are_tried_in_order(here: Path, monkeypatch):
    (here / "data" / "admin.key").write_text("default file")
    keys = [find_key(LOCAL, None)]
    (here / "elsewhere").write_text("named file")
    monkeypatch.setenv("TARN_ADMIN_KEY_FILE", "elsewhere")
    keys.append(find_key(LOCAL, None))
    monkeypatch.setenv("TARN_ADMIN_KEY", "environment")
    keys.append(find_key(LOCAL, None))
    keys.append(find_key(LOCAL, "given"))

    assert keys == ["default file", "named file", "environment", "given"]


def test_key_file_that_cannot_be_read_is_misuse(here: Path):
    (here / "data" / "admin.key").mkdir()

    with pytest.raises(Misuse, match=r"data/admin.key cannot be read"):
        find_key(LOCAL, None)


def test_url_that_is_none_of_a_server_is_wrong_usage():
    refused = Tarn("nonsense", "key")("whoami", code=2)

    assert "tarn: 'nonsense' is not the URL of a server" in refused.stderr


def test_connection_of_a_command_sends_the_key_that_was_found(server: Server):
    with connected(server.url, server.admin_key) as connection:
        assert connection.read("/v1/whoami")["tenant"] == "admin"


def test_no_server_is_reported_at_once_with_what_to_do():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        failed = Tarn(f"http://127.0.0.1:{bound.getsockname()[1]}", "key")("whoami", code=3)

    assert "tarn: no server answers at http://127" in failed.stderr
    assert "    start a server with make run or tarn serve, or name another one with --url" in failed.stderr


def test_write_of_a_command_is_sent_once_and_without_an_idempotency_key(tarn: Tarn, tenant: str):
    # This route refuses requests with an idempotency key: its response is not stored.
    assert tarn("keys", "create", tenant, "--quiet").stdout.strip()


def test_errors_are_raised_unchanged():
    with pytest.raises(InvalidRequest), connected(LOCAL, "two\nlines"):
        pass
    with pytest.raises(Unreachable), connected("http://127.0.0.1:1", "key") as connection:
        connection.read("/v1/whoami")
