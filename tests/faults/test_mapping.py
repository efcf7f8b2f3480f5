"""A mapping on Spark whose workers are killed within a task, before and after its commit: other workers complete it,
and readers see either the earlier or the complete result.
"""

import fcntl
import hashlib
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from tarn.db import migrate
from tarn.db.engine import Database

from tests.faults.processes import WORKER, WorkerProcess, start_worker
from tests.server import running

MAPPING = {
    "entities": {
        "person": {
            "schema": "Person",
            "id_column": "id",
            "properties": {
                "name": {"column": "name"},
                "country": {"column": "land"},
                "notes": {"literals": [f"note {number}" for number in range(10)]},
            },
        }
    }
}
STATEMENTS_PER_ROW = 13
"""Enough that a task writes several chunks, between which it can be stopped."""
COUNT = 20_000
NAMES = {f"p{number}": f"Person {number}" for number in range(COUNT)}
HAS_OPEN_BATCH = (
    "SELECT 1 FROM journal_packs p JOIN journal_batches b ON b.id = p.batch WHERE b.state = 'open' AND NOT b.is_stage"
)
"""Selects a row if a batch of a task is open and has events."""
ROWS_BY_STATE = (
    "SELECT b.state, sum(p.rows) FROM journal_packs p LEFT JOIN journal_batches b ON b.id = p.batch GROUP BY 1"
)
"""Counts the events in packs by the state of their batches."""
TIMEOUT = 120
"""Seconds after which the test fails instead of hanging."""


@contextmanager
def worker(folder: Path, *fault: str) -> Iterator[WorkerProcess]:
    """Run a worker process on the lake of the API in this folder, which starts no flush on its own."""
    with start_worker(
        WORKER,
        folder,
        *fault,
        TARN_SPARK_MASTER="local[2]",
        TARN_SPARK_MEMORY="512m",
        TARN_FLUSH_AGE="86400",
        TARN_MAINTENANCE_INTERVAL="86400",
        TARN_WORKER_SILENT_AFTER="3",
    ) as process:
        yield process


def visible_names(client: Any) -> dict[str, str]:
    """Return the name of every visible entity. Fails if an entity is returned twice or has two names."""
    names: dict[str, str] = {}
    for line in client.get("/v1/datasets/test/entities/stream", timeout=TIMEOUT).iter_lines():
        entity = orjson.loads(line)
        (name,) = entity["properties"]["name"]
        assert entity["id"] not in names
        names[entity["id"]] = name
    return names


@contextmanager
def stopped_within_a_task(database: Path) -> Iterator[None]:
    """Let tasks write until one has written a part of its batch, then block all writes during the block."""
    read_only = f"file:{database}?mode=ro"
    with open(f"{database}-turn", "wb") as lock, closing(sqlite3.connect(read_only, uri=True)) as reader:
        while True:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if reader.execute(HAS_OPEN_BATCH).fetchone():
                break
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield


@pytest.mark.xdist_group("spark")
def test_mapping_with_workers_killed_in_a_task_and_around_the_commit_is_complete_and_without_duplicates(
    tmp_path: Path,
):
    data = b"id,name,land\n" + b"".join(b"%s,%s,de\n" % (key.encode(), name.encode()) for key, name in NAMES.items())
    content_hash = hashlib.sha256(data).hexdigest()
    mapping = f"/v1/datasets/test/mappings/{content_hash}"
    with closing(Database(f"sqlite:///{tmp_path}/data/tarn.db")) as database:
        migrate.upgrade(database)
    with running(tmp_path, "api") as server:
        client = server.client()
        client.post("/v1/datasets", json={"name": "test"}).raise_for_status()
        client.put("/v1/datasets/test/files?path=data.csv", content=data).raise_for_status()
        client.put(mapping, json=MAPPING).raise_for_status()
        # The result of an earlier run, which the next run replaces.
        earlier = {"id": "former", "schema": "Person", "properties": {"name": ["Former"]}}
        origin = f"mapping:{content_hash}"
        client.post(f"/v1/datasets/test/entities?origin={origin}", json=[earlier]).raise_for_status()
        job = client.post(f"{mapping}/process").raise_for_status().headers["Location"]

        with worker(tmp_path) as killed, stopped_within_a_task(tmp_path / "data/tarn.db"):
            killed.send(signal.SIGKILL)
            killed.wait_exited()
        in_task = visible_names(client)
        with worker(tmp_path, "mapped", "KILL") as first:
            first.wait_reached("mapped")
            first.wait_exited()
        before_commit = visible_names(client)
        with worker(tmp_path, "committed", "KILL") as second:
            second.wait_reached("committed")
            second.wait_exited()
        after_commit = visible_names(client)
        unfinished = client.get(job).json()
        with worker(tmp_path):
            done = client.get(f"{job}?wait=60", timeout=TIMEOUT).json()
            while done["finished"] is None:
                done = client.get(f"{job}?wait=60", timeout=TIMEOUT).json()

        assert in_task == before_commit == {"former": "Former"}
        assert after_commit == NAMES
        assert unfinished["state"] == "running"
        assert done["state"] == "done", done
        assert (done["result"]["rows"], done["result"]["entities"], done["result"]["rejected"]) == (COUNT, COUNT, 0)
        assert visible_names(client) == NAMES
        # The statements of each row once, the two of the former entity, and the event that erased them.
        assert client.get("/v1/datasets/test/journal").json()["rows"] == STATEMENTS_PER_ROW * COUNT + 3
        with closing(sqlite3.connect(tmp_path / "data/tarn.db")) as database:
            assert database.execute(ROWS_BY_STATE).fetchall() == [("committed", STATEMENTS_PER_ROW * COUNT)]
