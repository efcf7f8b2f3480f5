"""`tarn serve` as a process: start, stop, kill, restart and refused starts."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server import clean_environment, running
from tests.waiting import wait_until

IN_USE = os.strerror(errno.EADDRINUSE)


def tarn(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tarn.cli", *arguments],
        cwd=folder,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_first_start_shows_the_key_once_and_writes_only_below_the_data_folder(tmp_path: Path):
    with running(tmp_path) as first:
        shown = [line.strip() for line in first.greeting]
        tenant = first.client().get("/v1/whoami").json()["tenant"]
        key = first.admin_key
    with running(tmp_path) as second:
        again = second.greeting
        still = second.client(key).get("/v1/whoami").json()["tenant"]

    assert key in shown
    assert len(again) == 1
    assert (tenant, still) == ("admin", "admin")
    assert {path.name for path in tmp_path.iterdir()} == {"data", "serve.log"}
    assert {path.name for path in (tmp_path / "data").iterdir()} >= {"tarn.db", "lake", "admin.key"}


def test_stop_finishes_running_work_and_leaves_no_process(tmp_path: Path):
    with running(tmp_path) as server:
        with server.client() as client:
            assert client.post("/v1/datasets", json={"name": "donations"}).status_code == 201
            worker = _worker_of(server.process.pid)
        code = server.stop()

    assert code == 0
    assert not psutil.pid_exists(worker.pid) or worker.status() == psutil.STATUS_ZOMBIE


def test_worker_exits_when_its_parent_is_killed(tmp_path: Path):
    with running(tmp_path) as server:
        worker = _worker_of(server.process.pid)

        server.stop(signal.SIGKILL)

        assert worker.wait(20) in (0, None)


def test_worker_that_dies_is_restarted(tmp_path: Path):
    with running(tmp_path, TARN_WORKER_SILENT_AFTER="1", TARN_WORKER_HEARTBEAT="0.2") as server:
        first = _worker_of(server.process.pid)
        first.kill()
        first.wait(10)
        with server.client() as client:
            client.post("/v1/datasets", json={"name": "donations"})
            job = client.delete("/v1/datasets/donations?confirm=donations&wait=30").json()
        second = _worker_of(server.process.pid)

    assert job["state"] == "done"
    assert second.pid != first.pid


def test_request_in_progress_is_answered_before_the_server_stops(tmp_path: Path):
    with running(tmp_path) as server:
        port = int(server.url.rsplit(":", 1)[1])
        body = b'{"name": "donations"}'
        head = (
            f"POST /v1/datasets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.admin_key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head.encode())
            # The server has requested the body, so the request is being handled.
            assert b"100 Continue" in connection.recv(1000)
            stopped = threading.Thread(target=server.stop)
            stopped.start()
            _wait_until_refused(port)
            connection.sendall(body)
            answer = connection.recv(100_000)
        stopped.join(30)

    assert answer.startswith(b"HTTP/1.1 201")
    assert server.process.returncode == 0


def test_killed_server_keeps_acknowledged_writes(tmp_path: Path):
    with running(tmp_path) as server:
        key = server.admin_key
        with server.client() as client:
            for number in range(20):
                assert client.post("/v1/datasets", json={"name": f"d{number}"}).status_code == 201
        server.stop(signal.SIGKILL)
    with running(tmp_path) as again, again.client(key) as client:
        names = {dataset["name"] for dataset in client.get("/v1/datasets").json()["results"]}

    assert names == {f"d{number}" for number in range(20)}


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"TARN_PORT": "x"}, "tarn: TARN_PORT: "),
        pytest.param({"TARN_LAKE": "x"}, "tarn: TARN_LAKE is not a setting of Tarn", marks=pytest.mark.long),
        pytest.param({"TARN_LAKE_URI": "s3://"}, "tarn: ", marks=pytest.mark.long),
        ({"TARN_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none"}, "tarn: the database does not answer"),
        pytest.param(
            {"TARN_HOST": "no.such.host.invalid"},
            "tarn: TARN_HOST=no.such.host.invalid and TARN_PORT=8000 cannot be",
            marks=pytest.mark.long,
        ),
        pytest.param({"TARN_HOST": "x" * 100}, "tarn: TARN_HOST=xxx", marks=pytest.mark.long),
    ],
)
def test_server_that_cannot_start_prints_the_reason_in_one_sentence(tmp_path: Path, environment, sentence: str):
    result = tarn(tmp_path, "serve", **environment)

    assert result.returncode == 2
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1


def test_deprecated_setting_is_reported_at_start(tmp_path: Path):
    result = tarn(tmp_path, "migrate", TARN_STREAM_PATIENCE="5")

    assert result.returncode == 0
    assert result.stderr.startswith("tarn: TARN_STREAM_PATIENCE is deprecated: use TARN_STREAM_TIMEOUT\n")


@pytest.mark.long
@pytest.mark.parametrize("variable", ["TARN_PORT", "TARN_METRICS_PORT"])
def test_port_in_use_is_refused_in_one_sentence(tmp_path: Path, variable: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = tarn(tmp_path, "serve", **{"TARN_PORT": "0"} | {variable: str(port)})

    assert result.returncode == 2
    assert result.stderr == f"tarn: TARN_HOST=127.0.0.1 and {variable}={port} cannot be listened on: {IN_USE}\n"


@pytest.mark.long
def test_folder_that_is_not_a_lake_is_refused_and_not_changed(tmp_path: Path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")

    result = tarn(tmp_path, "serve", TARN_LAKE_URI=str(tmp_path / "home"))

    assert result.returncode == 2
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["letter.txt"]


@pytest.mark.long
def test_lake_of_another_version_is_refused(tmp_path: Path):
    with running(tmp_path) as server:
        assert server.client().get("/readyz").status_code == 200
    path = tmp_path / "data" / "lake" / "lake.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))

    result = tarn(tmp_path, "serve")

    assert result.returncode == 2
    assert "99" in result.stderr


@pytest.mark.long
def test_database_of_another_lake_is_refused(tmp_path: Path):
    with running(tmp_path) as server:
        assert server.client().get("/readyz").status_code == 200

    result = tarn(tmp_path, "serve", TARN_LAKE_URI="data/other")

    assert result.returncode == 2
    assert "the database belongs to the lake" in result.stderr


def test_api_without_migration_is_refused_and_starts_after_it(tmp_path: Path):
    refused = tarn(tmp_path, "api")
    migrated = tarn(tmp_path, "migrate")
    with running(tmp_path, "api") as server:
        readiness = httpx.get(f"{server.url}/readyz").json()
        status = tarn(tmp_path, "status", TARN_URL=server.url)

    assert (refused.returncode, migrated.returncode) == (2, 0)
    assert "run `tarn migrate`" in refused.stderr
    assert (readiness["status"], readiness["worker"]) == ("degraded", "silent")
    assert (status.returncode, status.stderr.startswith("no worker has sent a heartbeat")) == (0, True)


@pytest.mark.long
def test_metrics_are_served_on_their_own_port_when_configured(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running(tmp_path, TARN_METRICS_PORT=str(port)) as server:
        own = httpx.get(f"http://127.0.0.1:{port}/metrics")
        shared = httpx.get(f"{server.url}/metrics")

    assert "tarn_http_requests" in own.text
    assert shared.status_code == 404


def test_secrets_appear_in_no_log(tmp_path: Path):
    with running(tmp_path, TARN_LOG_LEVEL="debug") as server:
        admin = server.admin_key
        with server.client() as client:
            client.post("/v1/admin/tenants", json={"name": "alice"})
            key = client.post("/v1/admin/tenants/alice/keys", json={}).json()["key"]
            client.get("/v1/whoami", headers={"Authorization": f"ApiKey {key}"})
            client.get("/v1/whoami", headers={"Authorization": "Bearer canary-of-a-wrong-key"})
            client.get("/v1/datasets?token=canary-in-a-query")
    text = server.log.read_text()

    assert "whoami" in {json.loads(line).get("action") for line in text.splitlines()}
    for secret in (admin, key, "canary-of-a-wrong-key", "canary-in-a-query"):
        assert secret not in text


@pytest.mark.long
def test_every_log_line_of_a_request_has_its_id(tmp_path: Path):
    with running(tmp_path) as server:
        httpx.get(f"{server.url}/v1/whoami", headers={"X-Request-ID": "the-request-id"})
    events = [json.loads(line) for line in server.log.read_text().splitlines()]

    of_request = {event["event"] for event in events if event.get("request") == "the-request-id"}
    assert of_request == {"request denied", "request"}


def _worker_of(pid: int) -> psutil.Process:
    """Wait until the server has a worker child, and return it."""
    workers: list[psutil.Process] = []

    def is_there() -> bool:
        workers[:] = [child for child in psutil.Process(pid).children() if "worker" in child.cmdline()]
        return workers != []

    wait_until(is_there)
    return workers[0]


def _wait_until_refused(port: int) -> None:
    def is_refused() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:
            return False  # the server was closing the socket
        return False

    wait_until(is_refused)
