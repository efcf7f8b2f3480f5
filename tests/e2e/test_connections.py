"""The connection budget of docs/postgresql.md: an API and a worker under every kind of request at that limit."""

import json
import secrets
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import create_engine, make_url, text
from tarn.db import migrate
from tarn.db.engine import TASK, Database
from tarn.journal.bulk import CONNECTIONS
from tarn.pipeline.tasks.crawl_files import POOL as TASK_POOL

from tests.server import clean_environment, running
from tests.ship.connection_budget import LISTENER, max_connections

pytestmark = pytest.mark.long

WORKER = Path(__file__).parents[1] / "upgrade" / "worker_without_spark.py"
POOL = 4
FLUSH_WAITS = 18
"""Number of ten-second waits for the flush."""
KEY = "an-administrator-of-a-budget"
BODIES, ENTITIES = 20, 700
"""Concurrent large bodies, more than are read at once; and the entities of each, enough for the bulk path."""


@pytest.fixture
def limited(postgresql: str) -> Iterator[tuple[str, str]]:
    """Create a database whose owner has a connection limit of the budget's sum plus one for this test; return its
    name.
    """
    name = f"limited_{secrets.token_hex(6)}"
    # Connection limits do not apply to superusers.
    sql = create_engine(postgresql, isolation_level="AUTOCOMMIT")
    with sql.connect() as connection:
        connection.execute(text(f"CREATE ROLE {name} LOGIN"))
        allowed = max_connections(POOL, apis=1, workers=1, tasks=1)
        connection.execute(text(f"CREATE DATABASE {name} OWNER {name} TEMPLATE template0 CONNECTION LIMIT {allowed}"))
        yield make_url(postgresql).set(username=name, database=name).render_as_string(hide_password=False), name
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
        connection.execute(text(f"DROP ROLE {name}"))
    sql.dispose()


@contextmanager
def count_connections(server: str, name: str) -> Iterator[dict[str, int]]:
    """Count the maximum of simultaneous connections by application name during the block."""
    maximum: Counter[str] = Counter()
    stop = threading.Event()
    # A connection that has just been opened has no name yet; PostgreSQL's own limit counts it as well.
    query = text(
        "SELECT application_name, count(*) FROM pg_stat_activity "
        "WHERE datname = :name AND backend_type = 'client backend' AND application_name <> '' GROUP BY 1"
    )
    sql = create_engine(server, isolation_level="AUTOCOMMIT")

    def poll() -> None:
        with sql.connect() as connection:
            while not stop.wait(0.02):
                for application, count in connection.execute(query, {"name": name}):
                    maximum[application] = max(maximum[application], count)

    polling = threading.Thread(target=poll)
    polling.start()
    try:
        yield maximum
    finally:
        stop.set()
        polling.join()
        sql.dispose()


@contextmanager
def running_worker(folder: Path, **settings: str) -> Iterator[None]:
    with (folder / "worker.log").open("ab") as log:
        worker = subprocess.Popen([sys.executable, str(WORKER), "tarn"], env=clean_environment(**settings), stderr=log)
    try:
        yield
    finally:
        worker.terminate()
        worker.wait(60)


def entity(name: str) -> dict[str, object]:
    return {"id": name, "schema": "Person", "properties": {"name": [f"{name} Doe"], "nationality": ["us"]}}


def test_api_and_worker_under_every_request_stay_within_the_connection_budget(
    limited: tuple[str, str], postgresql: str, tmp_path: Path
):
    url, name = limited
    database = Database(url, pool=1, name="tarn-migrate")
    migrate.upgrade(database)
    database.close()
    settings = {
        "TARN_DATABASE_URL": url,
        "TARN_DATABASE_POOL": str(POOL),
        "TARN_LAKE_URI": str(tmp_path / "lake"),
        "TARN_ADMIN_KEY": KEY,
        "TARN_FLUSH_AGE": "1",
    }
    with (
        running(tmp_path, "api", **settings) as server,
        running_worker(tmp_path, **settings),
        count_connections(postgresql, name) as maximum,
        ThreadPoolExecutor(60) as pool,
        ThreadPoolExecutor(8) as listening,
    ):
        client = server.client(KEY)
        client.timeout = httpx.Timeout(300)
        assert client.post("/v1/datasets", json={"name": "busy"}).status_code == 201
        listeners = [listening.submit(wait_for_snapshot_event, server.url) for _ in range(8)]

        def requests(number: int) -> Iterator[Callable[[], httpx.Response]]:
            body = "".join(f"{json.dumps(entity(f'large-{number}-{each}'))}\n" for each in range(ENTITIES))
            ndjson = {"Content-Type": "application/x-ndjson"}
            entities = "/v1/datasets/busy/entities"
            yield lambda: client.post(f"{entities}?origin=large", content=body, headers=ndjson)
            yield lambda: client.post(entities, json=[entity(f"small-{number}")])
            yield lambda: client.get(f"{entities}?limit=10")
            yield lambda: client.get(f"{entities}/stream")
            yield lambda: client.put("/v1/datasets/busy/tag", params={"key": f"tag/{number}"}, json={})
            yield lambda: client.put("/v1/datasets/busy/files", params={"path": f"{number}.txt"}, content=str(number))
            yield lambda: client.get("/v1/jobs")
            yield lambda: client.get("/metrics")

        futures = [pool.submit(request) for number in range(BODIES) for request in requests(number)]
        responses = [future.result() for future in futures]
        job = client.post("/v1/datasets/busy/operations/flush", json={}).json()
        for _ in range(FLUSH_WAITS):
            if job["state"] not in ("queued", "running"):
                break
            job = client.get(f"/v1/jobs/{job['id']}?wait=10").json()
        stored = client.get("/v1/datasets/busy/entities/stream").text.splitlines()

    refused = [(each.status_code, each.text) for each in responses if each.status_code >= 300]
    assert refused == []
    assert job["state"] == "done", job
    assert all(one.result() for one in listeners)
    people = [line for line in stored if json.loads(line)["schema"] == "Person"]
    assert len(people) == BODIES * (ENTITIES + 1)
    budget = {
        "tarn-api": 2 * POOL + LISTENER,
        "tarn-api-bulk": CONNECTIONS,
        "tarn-worker": 2 * POOL + LISTENER,
        TASK: 2 * TASK_POOL,
    }
    assert maximum.keys() == budget.keys()
    assert {name: count for name, count in maximum.items() if count > budget[name]} == {}
    assert maximum["tarn-api-bulk"] > 1


def wait_for_snapshot_event(url: str) -> bool:
    """Follow the dataset's events until one reports a snapshot."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("GET", f"{url}/v1/datasets/busy/events?since=0", headers=headers, timeout=300) as stream:
        return any(line.startswith("event: snapshot") for line in stream.iter_lines())
