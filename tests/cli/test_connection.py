"""The connection of commands: where their key comes from, and how errors are reported."""

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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    return tmp_path


def test_defaults_equal_those_of_the_server():
    fields = Settings.model_fields

    assert Path(ADMIN_KEY_FILE) == fields["admin_key_file"].default
    assert f"http://{fields['host'].default}:{fields['port'].default}" == DEFAULT_URL


def test_key_of_the_admin_key_file_is_sent_to_a_local_server_only(folder: Path):
    (folder / "data" / "admin.key").write_text("from-the-file\n")

    assert (find_key(LOCAL, None), find_key("http://[::1]:8000", None)) == ("from-the-file", "from-the-file")
    assert find_key(REMOTE, None) is None


def test_admin_key_of_the_environment_is_sent_to_a_local_server_only(folder, monkeypatch):
    monkeypatch.setenv("TARN_ADMIN_KEY", "from-the-environment")

    assert find_key(LOCAL, None) == "from-the-environment"
    assert find_key(REMOTE, None) is None


def test_sources_of_a_key_are_tried_in_order(folder: Path, monkeypatch):
    (folder / "data" / "admin.key").write_text("default file")
    keys = [find_key(LOCAL, None)]
    (folder / "elsewhere").write_text("named file")
    monkeypatch.setenv("TARN_ADMIN_KEY_FILE", "elsewhere")
    keys.append(find_key(LOCAL, None))
    monkeypatch.setenv("TARN_ADMIN_KEY", "environment")
    keys.append(find_key(LOCAL, None))
    keys.append(find_key(LOCAL, "given"))

    assert keys == ["default file", "named file", "environment", "given"]


def test_unreadable_key_file_is_misuse(folder: Path):
    (folder / "data" / "admin.key").mkdir()

    with pytest.raises(Misuse, match=r"data/admin.key cannot be read"):
        find_key(LOCAL, None)


def test_invalid_url_is_misuse():
    refused = Tarn("nonsense", "key")("whoami", code=2)

    assert "tarn: 'nonsense' is not the URL of a server" in refused.stderr


def test_connection_sends_its_key(server: Server):
    with connected(server.url, server.admin_key) as connection:
        assert connection.read("/v1/whoami")["tenant"] == "admin"


def test_refused_connection_is_reported_without_retries_and_with_what_to_do():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        failed = Tarn(f"http://127.0.0.1:{bound.getsockname()[1]}", "key")("whoami", code=3)

    assert "tarn: no server answers at http://127" in failed.stderr
    assert "    start a server with make run or tarn serve, or name another one with --url" in failed.stderr


def test_write_of_a_command_is_sent_once_and_without_an_idempotency_key(tarn: Tarn, tenant: str):
    # This route refuses requests with an idempotency key: its response is not stored.
    assert tarn("keys", "create", tenant, "--quiet").stdout.strip()


def test_errors_of_the_client_are_raised_unchanged():
    with pytest.raises(InvalidRequest), connected(LOCAL, "two\nlines"):
        pass
    with pytest.raises(Unreachable), connected("http://127.0.0.1:1", "key") as connection:
        connection.read("/v1/whoami")
