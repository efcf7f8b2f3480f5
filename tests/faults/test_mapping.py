"""A mapping on Spark, whose worker is killed within a task, and before and after its commit: others go on, and nobody
sees the difference."""

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

from tests.faults.processes import WORKER, WorkerProcess, started
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
A_ROW = 13
"""Statements of a row: a task writes several chunks, between which it can be stopped."""
COUNT = 20_000
NAMES = {f"p{number}": f"Person {number}" for number in range(COUNT)}
WRITTEN_IN_PART = (
    "SELECT 1 FROM journal_packs p JOIN journal_batches b ON b.id = p.batch WHERE b.state = 'open' AND NOT b.is_stage"
)
"""A part that is not closed, and holds something."""
HELD = "SELECT b.state, sum(p.rows) FROM journal_packs p LEFT JOIN journal_batches b ON b.id = p.batch GROUP BY 1"
"""What is in packs, by what became of their batches."""
PATIENCE = 120
"""Seconds after which the test fails instead of hanging."""


@contextmanager
def worker(folder: Path, *fault: str) -> Iterator[WorkerProcess]:
    """A worker beside the API in this folder, which flushes nothing by itself."""
    with started(
        WORKER,
        folder,
        *fault,
        TARN_SPARK_MASTER="local[2]",
        TARN_SPARK_MEMORY="512m",
        TARN_FLUSH_AGE="86400",
        TARN_UPKEEP_EVERY="86400",
        TARN_WORKER_SILENT_AFTER="3",
    ) as found:
        yield found


def names(client: Any) -> dict[str, str]:
    """Every entity that is seen, and its name; of one that is seen twice, or has two, this would fail."""
    found: dict[str, str] = {}
    for line in client.get("/v1/datasets/test/entities/stream", timeout=PATIENCE).iter_lines():
        entity = orjson.loads(line)
        (name,) = entity["properties"]["name"]
        assert entity["id"] not in found
        found[entity["id"]] = name
    return found


@contextmanager
def stopped_within_a_task(database: Path) -> Iterator[None]:
    """Let tasks write until one has written some of its part, and none any more from then on."""
    with open(f"{database}-turn", "wb") as turn, closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as look:
        while True:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if look.execute(WRITTEN_IN_PART).fetchone():
                break
            fcntl.flock(turn, fcntl.LOCK_UN)
        yield


@pytest.mark.xdist_group("spark")
def test_workers_killed_within_a_task_and_around_the_commit_of_a_mapping_lose_double_and_half_show_nothing(
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
        # What an earlier run said, which the next replaces.
        earlier = {"id": "former", "schema": "Person", "properties": {"name": ["Former"]}}
        origin = f"mapping:{content_hash}"
        client.post(f"/v1/datasets/test/entities?origin={origin}", json=[earlier]).raise_for_status()
        job = client.post(f"{mapping}/process").raise_for_status().headers["Location"]

        with worker(tmp_path) as killed, stopped_within_a_task(tmp_path / "data/tarn.db"):
            killed.send(signal.SIGKILL)
            killed.wait_dead()
        within = names(client)
        with worker(tmp_path, "mapped", "KILL") as first:
            first.wait_reached("mapped")
            first.wait_dead()
        halfway = names(client)
        with worker(tmp_path, "committed", "KILL") as second:
            second.wait_reached("committed")
            second.wait_dead()
        committed = names(client)
        unfinished = client.get(job).json()
        with worker(tmp_path):
            done = client.get(f"{job}?wait=60", timeout=PATIENCE).json()
            while done["finished"] is None:
                done = client.get(f"{job}?wait=60", timeout=PATIENCE).json()

        assert within == halfway == {"former": "Former"}
        assert committed == NAMES
        assert unfinished["state"] == "running"
        assert done["state"] == "done", done
        assert (done["result"]["rows"], done["result"]["entities"], done["result"]["rejected"]) == (COUNT, COUNT, 0)
        assert names(client) == NAMES
        # What each row says, once; the two of the former one, and what ended them.
        assert client.get("/v1/datasets/test/journal").json()["rows"] == A_ROW * COUNT + 3
        with closing(sqlite3.connect(tmp_path / "data/tarn.db")) as database:
            assert database.execute(HELD).fetchall() == [("committed", A_ROW * COUNT)]
