"""Reads during concurrent writes and flushes: every reader sees every acknowledged write exactly once.

`READ_TRIALS=10000` sets how many writes are read back, each immediately by its writer.
"""

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import orjson
from tarn.datasets.registry import Dataset
from tarn.lake.commit import SnapshotPublisher
from tarn.pipeline.jobs.flush import Flush

from tests.in_process_api import InProcessApi
from tests.lake.manifests import dataset_of
from tests.pipeline.kernels import DirectKernels

# Without the prefix of Tarn's settings: no process starts with an unknown setting.
TRIALS = int(os.environ.get("READ_TRIALS", "200"))
TRIALS_PER_DATASET = 200
"""Every flush adds files that each later read opens, so datasets are kept small."""
CLIENTS = 4
OWN_ENTITIES = 5
"""Entities that only one client writes to, per client."""
WRITES_PER_FULL_READ = 8
"""A client reads all entities once per this many writes."""


@dataclass
class Client:
    """A client that reads every write back immediately. Its entities and its origin are written by no other client."""

    api: InProcessApi
    base: str
    number: int
    draw: random.Random
    names: dict[str, set[str]] = field(default_factory=dict)
    """The names of each existing entity."""
    versions: Counter[str] = field(default_factory=Counter)
    """A counter for each entity: it is odd while a write is in progress."""
    trials: int = 0
    """The number of writes that were read back."""
    checked: Counter[str] = field(default_factory=Counter)
    """The number of entities that were compared with a full read, by the method of the read."""

    @property
    def origin(self) -> str:
        return f"client-{self.number}"

    def work(self, trials: int, clients: list["Client"]) -> None:
        """Write to random entities of this client, and assert after each write that a read returns its result."""
        writes = (self.add, self.add, self.put, self.put, self.delete, self.delete_statement, self.move)
        for number in count():
            if self.trials >= trials:
                break
            if number % WRITES_PER_FULL_READ == WRITES_PER_FULL_READ - 1:
                for read in (self.streamed, self.listed):
                    self.checked[read.__name__] += compare_all(clients, read)
            entity = self.draw.choice(own_entities(self))
            self.versions[entity] += 1
            self.draw.choice(writes)(entity)
            self.versions[entity] += 1
            self.check(entity, entity)
            self.write_shared()

    def add(self, entity: str) -> None:
        name = self.name()
        self.send("POST", "/entities", json=person(entity, name))
        self.names.setdefault(entity, set()).add(name)

    def put(self, entity: str) -> None:
        name = self.name()
        self.send("PUT", f"/entities/{entity}", json=person(entity, name))
        self.names[entity] = {name}

    def delete(self, entity: str) -> None:
        exists = entity in self.names
        assert (self.send("DELETE", f"/entities/{entity}")["tombstones"] > 0) == exists
        self.names.pop(entity, None)

    def delete_statement(self, entity: str) -> None:
        """Delete the statement of one name, which may leave the entity without names."""
        name = self.draw.choice(sorted(self.names.get(entity, {"nothing"})))
        self.add(entity)
        rows = self.api.admin.get(f"{self.base}/statements", params={"id": entity, "prop": "name"}).json()["results"]
        for row in rows:
            if row["value"] == name:
                assert self.send("DELETE", f"/statements/{row['id']}")["tombstones"] == 1
        self.names[entity].discard(name)

    def move(self, entity: str) -> None:
        """Move the statements to another canonical id and back: the entity is found by its own id all the time."""
        self.add(entity)
        for canonical in (f"{entity}-canonical", entity):
            path = f"{self.base}/statements"
            rows = self.api.admin.get(path, params={"id": entity, "limit": 1000}).json()["results"]
            body = b"\n".join(orjson.dumps(row | {"canonical_id": canonical}) for row in rows)
            self.send("POST", "/statements", content=body, headers={"Content-Type": "application/x-ndjson"})
            self.check(entity, canonical)

    def write_shared(self) -> None:
        """Write to and delete from an entity that all clients write to, under the origin of this client."""
        name = self.name()
        self.send("PUT", "/entities/shared", json=person("shared", name))
        response = self.api.admin.get(f"{self.base}/entities/shared", params={"origin": self.origin})
        assert response.json()["properties"] == {"name": [name]}, response.text
        assert self.send("DELETE", "/entities/shared")["tombstones"] == 2
        deleted = self.api.admin.get(f"{self.base}/entities/shared", params={"origin": self.origin})
        assert deleted.status_code == 404, deleted.text
        self.trials += 2

    def check(self, entity: str, canonical: str) -> None:
        """Assert that an entity has the state of the last write, under this canonical id."""
        response = self.api.admin.get(f"{self.base}/entities/{entity}")
        names = self.names.get(entity)
        self.trials += 1
        if names is None:
            assert response.status_code == 404, response.text
        else:
            assert response.status_code == 200, response.text
            found = response.json()
            assert (found["id"], set(found["properties"].get("name", ()))) == (canonical, names), found

    def streamed(self) -> list[str]:
        response = self.api.admin.get(f"{self.base}/entities/stream", params={"end": "true"})
        lines = [orjson.loads(line) for line in response.content.splitlines()]
        assert lines[-1]["$end"]["count"] == len(lines) - 1
        return [line["id"] for line in lines[:-1]]

    def listed(self) -> list[str]:
        response = self.api.admin.get(f"{self.base}/entities", params={"limit": 1000, "sort": "-last_seen"})
        assert response.status_code == 200, response.text
        return [entity["id"] for entity in response.json()["results"]]

    def send(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        response = self.api.admin(method, self.base + path, params={"origin": self.origin}, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def name(self) -> str:
        return f"name {self.draw.randrange(10**9)}"


def person(entity: str, name: str) -> dict[str, Any]:
    return {"id": entity, "schema": "Person", "properties": {"name": [name]}}


@contextmanager
def flushing(api: InProcessApi, dataset: Dataset, kernels: DirectKernels) -> Iterator[list[int]]:
    """Flush continuously in a thread during the block; yield the numbers of the snapshots made so far."""
    services = api.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    flush = Flush(services.database, services.store, publisher, lambda: kernels)
    stop = threading.Event()
    snapshots: list[int] = []

    def run() -> None:
        while not stop.is_set():
            done = flush.run([dataset], lambda: None)[dataset.id]
            assert done.error is None, repr(done.error)
            snapshots.extend(snapshot.seq for snapshot in done.snapshots)

    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(run)
        try:
            yield snapshots
        finally:
            stop.set()
        worker.result(60)


def compare_all(clients: list[Client], read: Callable[[], list[str]]) -> int:
    """Compare a full read with all entities that were not written to meanwhile; return how many these were."""
    before = [(client, entity, client.versions[entity]) for client in clients for entity in own_entities(client)]
    idle = {
        (client.number, entity, entity in client.names): (client, version)
        for client, entity, version in before
        if version % 2 == 0
    }
    found = Counter(read())
    assert not [name for name, times in found.items() if times > 1]
    checked = 0
    for (_, entity, exists), (client, version) in idle.items():
        if client.versions[entity] == version:
            assert found[entity] == exists, entity
            checked += 1
    return checked


def own_entities(client: Client) -> list[str]:
    return [f"{client.number}-{number}" for number in range(OWN_ENTITIES)]


def test_readers_see_own_writes_at_once_and_every_entity_once_while_a_worker_flushes(
    api: InProcessApi, kernels: DirectKernels
):
    for number in range(-(-TRIALS // TRIALS_PER_DATASET)):
        api.dataset(f"test{number}")
        dataset = dataset_of(api.services.database, f"test{number}")
        base = f"/v1/datasets/{dataset.name}"
        clients = [Client(api, base, one, random.Random(f"{number} {one}")) for one in range(CLIENTS)]

        with flushing(api, dataset, kernels) as snapshots, ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(client.work, TRIALS_PER_DATASET // CLIENTS, clients) for client in clients]:
                done.result()

        assert len(snapshots) > 1
        assert sum(client.trials for client in clients) >= TRIALS_PER_DATASET
        for read in ("streamed", "listed"):
            assert sum(client.checked[read] for client in clients) > 0
        for client in clients:
            for entity in own_entities(client):
                client.check(entity, entity)
