"""Reads while others write and a worker flushes all the time: everybody sees what was acknowledged, and sees it once.

`READ_TRIALS=10000` has as many writes looked at, each at once, by those who made them.
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

# No name of a setting: an unknown one of those refuses every start.
TRIALS = int(os.environ.get("READ_TRIALS", "200"))
AT_ONCE = 200
"""Trials on one dataset: every flush adds files to it, and so to what each read of it opens."""
CLIENTS = 4
OWN = 5
"""Entities that each client has to itself."""
SELDOM = 8
"""A client looks at everything after as many writes."""


@dataclass
class Client:
    """Somebody who writes and looks at once. Nobody else writes to its entities, or under its origin."""

    api: InProcessApi
    base: str
    number: int
    draw: random.Random
    names: dict[str, set[str]] = field(default_factory=dict)
    """What each entity that is there is called."""
    versions: Counter[str] = field(default_factory=Counter)
    """How often each entity was written to: odd while a write is under way."""
    trials: int = 0
    """Writes that were looked at."""
    checked: Counter[str] = field(default_factory=Counter)
    """Entities that were looked for in everything, by how it was read."""

    @property
    def origin(self) -> str:
        return f"client-{self.number}"

    def work(self, trials: int, clients: list["Client"]) -> None:
        """Write something to one entity, and see that a read shows just that; again and again."""
        ways = (self.add, self.add, self.put, self.put, self.delete, self.delete_statement, self.move)
        for turn in count():
            if self.trials >= trials:
                break
            if turn % SELDOM == SELDOM - 1:
                for read in (self.streamed, self.listed):
                    self.checked[read.__name__] += looked_over(clients, read)
            entity = self.draw.choice(own(self))
            self.versions[entity] += 1
            self.draw.choice(ways)(entity)
            self.versions[entity] += 1
            self.look(entity, entity)
            self.share()

    def add(self, entity: str) -> None:
        name = self.name()
        self.told("POST", "/entities", json=person(entity, name))
        self.names.setdefault(entity, set()).add(name)

    def put(self, entity: str) -> None:
        name = self.name()
        self.told("PUT", f"/entities/{entity}", json=person(entity, name))
        self.names[entity] = {name}

    def delete(self, entity: str) -> None:
        there = entity in self.names
        assert (self.told("DELETE", f"/entities/{entity}")["tombstones"] > 0) == there
        self.names.pop(entity, None)

    def delete_statement(self, entity: str) -> None:
        """One of its names is gone. What is left may be BASE alone, which names nothing."""
        name = self.draw.choice(sorted(self.names.get(entity, {"nothing"})))
        self.add(entity)
        rows = self.api.admin.get(f"{self.base}/statements", params={"id": entity, "prop": "name"}).json()["results"]
        for row in rows:
            if row["value"] == name:
                assert self.told("DELETE", f"/statements/{row['id']}")["tombstones"] == 1
        self.names[entity].discard(name)

    def move(self, entity: str) -> None:
        """CaptionCandidate again as part of an entity of another id, and back: by its own id it is always found."""
        self.add(entity)
        for canonical in (f"{entity}-canonical", entity):
            path = f"{self.base}/statements"
            rows = self.api.admin.get(path, params={"id": entity, "limit": 1000}).json()["results"]
            body = b"\n".join(orjson.dumps(row | {"canonical_id": canonical}) for row in rows)
            self.told("POST", "/statements", content=body, headers={"Content-Type": "application/x-ndjson"})
            self.look(entity, canonical)

    def share(self) -> None:
        """What this client says of an entity that all speak of."""
        name = self.name()
        self.told("PUT", "/entities/shared", json=person("shared", name))
        found = self.api.admin.get(f"{self.base}/entities/shared", params={"origin": self.origin})
        assert found.json()["properties"] == {"name": [name]}, found.text
        assert self.told("DELETE", "/entities/shared")["tombstones"] == 2
        gone = self.api.admin.get(f"{self.base}/entities/shared", params={"origin": self.origin})
        assert gone.status_code == 404, gone.text
        self.trials += 2

    def look(self, entity: str, canonical: str) -> None:
        """See that an entity is what was written last, under this id."""
        answer = self.api.admin.get(f"{self.base}/entities/{entity}")
        names = self.names.get(entity)
        self.trials += 1
        if names is None:
            assert answer.status_code == 404, answer.text
        else:
            assert answer.status_code == 200, answer.text
            shown = answer.json()
            assert (shown["id"], set(shown["properties"].get("name", ()))) == (canonical, names), shown

    def streamed(self) -> list[str]:
        answer = self.api.admin.get(f"{self.base}/entities/stream", params={"end": "true"})
        lines = [orjson.loads(line) for line in answer.content.splitlines()]
        assert lines[-1]["$end"]["count"] == len(lines) - 1
        return [line["id"] for line in lines[:-1]]

    def listed(self) -> list[str]:
        answer = self.api.admin.get(f"{self.base}/entities", params={"limit": 1000, "sort": "-last_seen"})
        assert answer.status_code == 200, answer.text
        return [entity["id"] for entity in answer.json()["results"]]

    def told(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        answer = self.api.admin(method, self.base + path, params={"origin": self.origin}, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def name(self) -> str:
        return f"name {self.draw.randrange(10**9)}"


def person(entity: str, name: str) -> dict[str, Any]:
    return {"id": entity, "schema": "Person", "properties": {"name": [name]}}


@contextmanager
def flushing(api: InProcessApi, dataset: Dataset, kernels: DirectKernels) -> Iterator[list[int]]:
    """A worker that flushes again and again beside the block; how many snapshots it made."""
    services = api.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    flush = Flush(services.database, services.store, publisher, lambda: kernels)
    over = threading.Event()
    made: list[int] = []

    def run() -> None:
        while not over.is_set():
            done = flush.run([dataset], lambda: None)[dataset.id]
            assert done.error is None, repr(done.error)
            made.extend(snapshot.seq for snapshot in done.snapshots)

    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(run)
        try:
            yield made
        finally:
            over.set()
        worker.result(60)


def looked_over(clients: list[Client], read: Callable[[], list[str]]) -> int:
    """Read everything, and compare it with the entities that nobody wrote to meanwhile; how many these were."""
    before = [(client, entity, client.versions[entity]) for client in clients for entity in own(client)]
    steady = {
        (client.number, entity, entity in client.names): (client, version)
        for client, entity, version in before
        if version % 2 == 0
    }
    shown = Counter(read())
    assert not [name for name, times in shown.items() if times > 1]
    checked = 0
    for (_, entity, there), (client, version) in steady.items():
        if client.versions[entity] == version:
            assert shown[entity] == there, entity
            checked += 1
    return checked


def own(client: Client) -> list[str]:
    return [f"{client.number}-{number}" for number in range(OWN)]


def test_everybody_reads_what_they_wrote_at_once_and_what_others_did_once_while_a_worker_flushes(
    api: InProcessApi, kernels: DirectKernels
):
    for number in range(-(-TRIALS // AT_ONCE)):
        api.dataset(f"test{number}")
        dataset = dataset_of(api.services.database, f"test{number}")
        base = f"/v1/datasets/{dataset.name}"
        clients = [Client(api, base, one, random.Random(f"{number} {one}")) for one in range(CLIENTS)]

        with flushing(api, dataset, kernels) as made, ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(client.work, AT_ONCE // CLIENTS, clients) for client in clients]:
                done.result()

        assert len(made) > 1
        assert sum(client.trials for client in clients) >= AT_ONCE
        for read in ("streamed", "listed"):
            assert sum(client.checked[read] for client in clients) > 0
        for client in clients:
            for entity in own(client):
                client.look(entity, entity)
