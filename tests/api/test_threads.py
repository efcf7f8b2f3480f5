"""Threads and connections: whatever one tenant keeps busy, admission, probes and other tenants are answered."""

import contextvars
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from sqlalchemy import text
from tarn.access.bootstrap import ensure_admin
from tarn.api.http.limits import tenant_semaphore as places
from tarn.db.connection_shares import TENANT, TenantSemaphore
from tarn.db.engine import Database
from tarn.errors import Unavailable
from tarn.main import build_services
from tarn.settings import Settings
from tarn.storage.store import Store

from tests.listening import Listening, head, listening
from tests.waiting import wait_until

THREADS = 40
"""Threads that AnyIO has by default."""

REQUESTS = 45
"""Requests at once, more than there are threads."""


@pytest.fixture
def key(settings: Settings, database: Database) -> str:
    key = ensure_admin(database, settings)
    assert key is not None
    return key


@pytest.fixture
def server(settings: Settings, database: Database, store: Store, key: str) -> Iterator[Listening]:
    with listening(build_services(settings, database, store)) as server:
        with server.client(key) as client:
            assert client.post("/v1/datasets", json={"name": "shared"}).status_code == 201
        yield server


def tenant(server: Listening, admin: str, name: str) -> str:
    """The key of a new tenant that may read the dataset."""
    with server.client(admin) as client:
        assert client.post("/v1/admin/tenants", json={"name": name}).status_code == 201
        grant = {"dataset": "shared", "level": "read"}
        assert client.post(f"/v1/admin/tenants/{name}/grants", json=grant).status_code == 201
        return str(client.post(f"/v1/admin/tenants/{name}/keys", json={}).json()["key"])


@contextmanager
def writes_wait(database: Database) -> Iterator[None]:
    """Let every write of a tag wait until the end of the block: on SQLite all writes, on PostgreSQL those."""
    with database.write() as connection:
        if not database.is_sqlite:
            connection.execute(text("LOCK TABLE tags IN ACCESS EXCLUSIVE MODE"))
        yield


def threads_in(function: str) -> int:
    """How many threads of this process are in a function, or in what it calls."""
    stacks = [traceback.walk_stack(frame) for frame in sys._current_frames().values()]
    return sum(any(frame.f_code.co_name == function for frame, _ in stack) for stack in stacks)


def test_probes_and_other_tenants_are_answered_while_one_tenant_keeps_every_thread_busy(
    server: Listening, database: Database, key: str, monkeypatch: pytest.MonkeyPatch
):
    # A tenant's next request is begun a moment after the one before, and not a tenth of a second.
    monkeypatch.setattr(places, "REQUEST_SLOT_SECONDS", 0.001)
    busy, other = tenant(server, key, "busy"), tenant(server, key, "other")
    with ExitStack() as stack:
        client = stack.enter_context(server.client())
        with writes_wait(database):
            connections = [stack.enter_context(server.connect()) for _ in range(REQUESTS)]
            for number, connection in enumerate(connections):
                path = f"/v1/datasets/shared/tag?key=tag-{number}"
                request = head("PUT", path, busy, Content_Type="application/json", Content_Length="2")
                connection.sendall(request + b"{}")
            wait_until(lambda: threads_in("set_tag") >= THREADS - 1)

            # Of the other tenant and of the key nothing is remembered: all of the admission is done now.
            allowed = client.get("/v1/whoami", headers={"Authorization": f"Bearer {other}"})
            read = client.get("/v1/datasets/shared", headers={"Authorization": f"Bearer {other}"})
            probes = [client.get(path).status_code for path in ("/healthz", "/readyz", "/metrics")]
            assert threads_in("set_tag") == THREADS - 1, "it has all threads but the one that is kept for others"

        answers = [connection.recv(65536) for connection in connections]

    assert probes == [200, 200, 200]
    assert (allowed.status_code, allowed.json().get("tenant")) == (200, "other")
    assert read.status_code == 200
    # Those that waited go on; on a machine that is very busy they have waited for too long.
    assert {answer[:12] for answer in answers} <= {b"HTTP/1.1 200", b"HTTP/1.1 201", b"HTTP/1.1 503"}


@contextmanager
def held(shares: TenantSemaphore, tenant: str, times: int) -> Iterator[list[str]]:
    """So many threads of a tenant that each ask for a connection and keep it; the names of those that have one."""
    have: list[str] = []
    over = threading.Event()

    def hold() -> None:
        TENANT.set(tenant)
        with shares.one():
            have.append(tenant)
            over.wait()

    threads = [threading.Thread(target=hold) for _ in range(times)]
    for thread in threads:
        thread.start()
    try:
        yield have
    finally:
        over.set()
        for thread in threads:
            thread.join()


def gets_connection(shares: TenantSemaphore, tenant: str) -> bool:
    """Whether a tenant is given a connection."""

    def ask() -> bool:
        TENANT.set(tenant)
        try:
            with shares.one():
                return True
        except Unavailable:
            return False

    return contextvars.copy_context().run(ask)


def test_last_connection_is_kept_for_a_tenant_that_has_none():
    shares = TenantSemaphore(8, timeout=0.05)
    with held(shares, "a", 5) as have:
        wait_until(lambda: len(have) == 5)

        assert not gets_connection(shares, "a")
        assert gets_connection(shares, "b")
        with held(shares, "b", 1) as others:
            wait_until(lambda: len(others) == 1)
            assert not gets_connection(shares, "c"), "a quarter is for work of no tenant"
            assert gets_connection(shares, "")
    assert gets_connection(shares, "a")


def test_connection_that_is_not_free_in_time_is_refused_by_name():
    shares = TenantSemaphore(2, timeout=0.05)
    with held(shares, "a", 1) as have:
        wait_until(lambda: have)
        TENANT.set("a")
        with pytest.raises(Unavailable, match="'a' may have at once"), shares.one():
            pass
        TENANT.set("")
