"""Fair use of threads and connections: authentication, probes and other tenants are served while one tenant is busy."""

import contextvars
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from sqlalchemy import text
from tarn.access.bootstrap import ensure_admin
from tarn.api.http.limits import tenant_semaphore
from tarn.db.connection_semaphore import TENANT, ConnectionSemaphore
from tarn.db.engine import Database
from tarn.errors import Unavailable
from tarn.main import build_services
from tarn.settings import Settings
from tarn.storage.store import Store

from tests.listening import Listening, head, listening
from tests.waiting import wait_until

THREADS = 40
"""AnyIO's default number of threads."""

REQUESTS = 45
"""Concurrent requests, more than there are threads."""


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
    """Create a tenant that may read the dataset, and return its key."""
    with server.client(admin) as client:
        assert client.post("/v1/admin/tenants", json={"name": name}).status_code == 201
        grant = {"dataset": "shared", "level": "read"}
        assert client.post(f"/v1/admin/tenants/{name}/grants", json=grant).status_code == 201
        return str(client.post(f"/v1/admin/tenants/{name}/keys", json={}).json()["key"])


@contextmanager
def block_tag_writes(database: Database) -> Iterator[None]:
    """Block every write of a tag during the block: on SQLite all writes, on PostgreSQL those."""
    with database.write() as connection:
        if not database.is_sqlite:
            connection.execute(text("LOCK TABLE tags IN ACCESS EXCLUSIVE MODE"))
        yield


def threads_in(function: str) -> int:
    """Return how many threads of this process are in a function, or in what it calls."""
    stacks = [traceback.walk_stack(frame) for frame in sys._current_frames().values()]
    return sum(any(frame.f_code.co_name == function for frame, _ in stack) for stack in stacks)


def test_probes_and_other_tenants_are_answered_while_one_tenant_blocks_every_thread(
    server: Listening, database: Database, key: str, monkeypatch: pytest.MonkeyPatch
):
    # A tenant's next request starts directly after the one before, and not a tenth of a second later.
    monkeypatch.setattr(tenant_semaphore, "REQUEST_SLOT_SECONDS", 0.001)
    busy, other = tenant(server, key, "busy"), tenant(server, key, "other")
    with ExitStack() as stack:
        client = stack.enter_context(server.client())
        with block_tag_writes(database):
            connections = [stack.enter_context(server.connect()) for _ in range(REQUESTS)]
            for number, connection in enumerate(connections):
                path = f"/v1/datasets/shared/tag?key=tag-{number}"
                request = head("PUT", path, busy, Content_Type="application/json", Content_Length="2")
                connection.sendall(request + b"{}")
            wait_until(lambda: threads_in("set_tag") >= THREADS - 1)

            # Nothing is cached of the other tenant and its key: it is authenticated from the database now.
            allowed = client.get("/v1/whoami", headers={"Authorization": f"Bearer {other}"})
            read = client.get("/v1/datasets/shared", headers={"Authorization": f"Bearer {other}"})
            probes = [client.get(path).status_code for path in ("/healthz", "/readyz", "/metrics")]
            assert threads_in("set_tag") == THREADS - 1, "it has all threads except the one that is reserved for others"

        responses = [connection.recv(65536) for connection in connections]

    assert probes == [200, 200, 200]
    assert (allowed.status_code, allowed.json().get("tenant")) == (200, "other")
    assert read.status_code == 200
    # The blocked requests proceed; on a very busy machine they have timed out.
    assert {response[:12] for response in responses} <= {b"HTTP/1.1 200", b"HTTP/1.1 201", b"HTTP/1.1 503"}


@contextmanager
def hold_connections(semaphore: ConnectionSemaphore, tenant: str, times: int) -> Iterator[list[str]]:
    """Start so many threads of a tenant that each request a connection and keep it; return those that have one."""
    holders: list[str] = []
    finish = threading.Event()

    def hold() -> None:
        TENANT.set(tenant)
        with semaphore.slot():
            holders.append(tenant)
            finish.wait()

    threads = [threading.Thread(target=hold) for _ in range(times)]
    for thread in threads:
        thread.start()
    try:
        yield holders
    finally:
        finish.set()
        for thread in threads:
            thread.join()


def gets_connection(semaphore: ConnectionSemaphore, tenant: str) -> bool:
    """Return whether a tenant is given a connection."""

    def try_connection() -> bool:
        TENANT.set(tenant)
        try:
            with semaphore.slot():
                return True
        except Unavailable:
            return False

    return contextvars.copy_context().run(try_connection)


def test_last_connection_is_kept_for_a_tenant_that_has_none():
    semaphore = ConnectionSemaphore(8, timeout=0.05)
    with hold_connections(semaphore, "a", 5) as holders:
        wait_until(lambda: len(holders) == 5)

        assert not gets_connection(semaphore, "a")
        assert gets_connection(semaphore, "b")
        with hold_connections(semaphore, "b", 1) as others:
            wait_until(lambda: len(others) == 1)
            assert not gets_connection(semaphore, "c"), "a quarter is reserved for work without a tenant"
            assert gets_connection(semaphore, "")
    assert gets_connection(semaphore, "a")


def test_connection_that_is_not_free_in_time_is_refused_with_its_own_problem():
    semaphore = ConnectionSemaphore(2, timeout=0.05)
    with hold_connections(semaphore, "a", 1) as holders:
        wait_until(lambda: holders)
        TENANT.set("a")
        with pytest.raises(Unavailable, match="'a' has used its share of the database connections"), semaphore.slot():
            pass
        TENANT.set("")
