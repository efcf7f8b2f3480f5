"""Soak test: writers that record the expected state of their entities, concurrent readers, and constant maintenance.

At the end the lake must have exactly the state that the writers expect, `verify` must find nothing, and files, Delta
logs and memory must not have grown without bound.
"""

import hashlib
import os
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import orjson
import psutil
from deltalake import DeltaTable
from followthemoney.statement import Statement
from rich.console import Console
from rich.table import Table

from tests.server import Server, running

SECONDS = float(os.environ.get("SOAK_SECONDS", "900"))
COMPACTION_SECONDS = float(os.environ.get("COMPACTING_SECONDS", "300"))
SAMPLE_EVERY = 10.0
WRITERS, READERS = 4, 4
ENTITIES, UNCHANGED = 1_500, 3_000
"""Entities that one writer changes, and entities with ids between them that it writes only once. So the dataset keeps
its size, and is large enough that not every flush triggers a compaction."""
DATASET = "soak"
PATH = f"/v1/datasets/{DATASET}"
ORIGINS = ("crawl", "curated")
PAUSE = 0.02
"""Seconds between two requests of a client."""
MOVE_REF_EVERY, VACUUM_EVERY = 7.0, 40.0
REF = "checked"
SETTINGS = {"TARN_FLUSH_AGE": "1", "TARN_MAINTENANCE_INTERVAL": "2", "TARN_READER_HEARTBEAT": "0.5"}
POLICY = {"retention": {"count": 5, "days": 0}}
MAINTENANCE = ("compact", "optimize", "vacuum")

MAX_FILES = 200
MAX_OPENING_SECONDS = 1.0
"""Maximum seconds for opening both Delta tables."""
MAX_GROWTH, GROWTH_SLACK_MB = 1.3, 50.0
"""Maximum memory of the last third: MAX_GROWTH times that of the middle third, plus GROWTH_SLACK_MB."""

READ_BACK = 0.4
"""The share of writes that the writer reads back immediately."""

Properties = dict[str, set[str]]
Action = Callable[[httpx.Client], str]

POSSIBLE: Properties = {
    "name": {f"Name {number}" for number in range(8)},
    "country": {"de", "fr", "gb", "us", "gr"},
    "birthDate": {f"19{number}-01-01" for number in range(50, 60)},
    "summary": {f"Summary {number}" for number in range(30)},
}
PROPS = tuple(POSSIBLE)


def run() -> dict[str, Any]:
    """Run the soak test for `SOAK_SECONDS`, and print the samples."""
    with tempfile.TemporaryDirectory() as folder:
        result = soak(Path(folder), SECONDS, SAMPLE_EVERY, VACUUM_EVERY)
    _print(result.samples)
    results = result.results()
    results["memory is flat"] = result.is_flat()
    results["maintained automatically"] = all(result.automatic[operation] for operation in MAINTENANCE)
    results["met"] = result.is_sound() and results["memory is flat"] and results["maintained automatically"]
    return results


def run_compaction() -> dict[str, Any]:
    """Run the soak test while also flushing and compacting everything without a pause."""
    with tempfile.TemporaryDirectory() as folder:
        result = soak(Path(folder), COMPACTION_SECONDS, SAMPLE_EVERY, VACUUM_EVERY, (_flush, _compact))
    return result.results() | {"met": result.is_sound() and len(result.times.get("compact_all", ())) > 0}


class Sample(NamedTuple):
    """Measurements at one moment. Memory is unique memory (USS) of processes, in megabytes."""

    second: float
    api: float
    worker: float
    jvm: float
    files: int
    on_disk: int
    snapshots: int
    opening: float
    journal: int


@dataclass
class SoakResult:
    """The result of a soak test."""

    times: dict[str, list[float]]
    """Durations in seconds, by action."""
    faults: list[str]
    samples: list[Sample]
    automatic: Counter[str]
    """Finished jobs that the worker scheduled itself, by operation."""
    failed: list[dict[str, Any]]
    verified: dict[str, Any]
    entities: int
    errors: list[str]
    """Log lines of the server and its worker with level error or above."""
    differing: list[str]
    """Ids of entities whose final state differs from what their writer expects."""

    def is_sound(self) -> bool:
        return (
            not self.faults
            and not self.differing
            and not self.failed
            and not self.errors
            and self.verified["found"] == 0
            and max(sample.files for sample in self.samples) < MAX_FILES
            and max(sample.opening for sample in self.samples) < MAX_OPENING_SECONDS
        )

    def is_flat(self) -> bool:
        """Return whether no process used more memory in the last third than in the middle one."""
        third = len(self.samples) // 3
        middle, last = self.samples[third : 2 * third], self.samples[2 * third :]
        return all(
            statistics.median(getattr(sample, name) for sample in last)
            <= MAX_GROWTH * statistics.median(getattr(sample, name) for sample in middle) + GROWTH_SLACK_MB
            for name in ("api", "worker", "jvm")
        )

    def results(self) -> dict[str, Any]:
        samples = self.samples
        return {
            "seconds": samples[-1].second,
            "entities": self.entities,
            **{f"{name} times": len(times) for name, times in sorted(self.times.items())},
            **{f"{name} p50 ms": statistics.median(times) * 1000 for name, times in sorted(self.times.items())},
            "faults": self.faults[:20],
            "entities that differ": len(self.differing),
            "first that differ": self.differing[:5],
            "logged errors": self.errors[:5],
            "jobs that failed": [(job["operation"], job["problem"]) for job in self.failed],
            "findings of verify": self.verified["findings"][:20],
            **{f"{operation} automatic": self.automatic[operation] for operation in MAINTENANCE},
            "most files of a head": max(sample.files for sample in samples),
            "most files on disk": max(sample.on_disk for sample in samples),
            "most snapshots": max(sample.snapshots for sample in samples),
            "longest opening s": max(sample.opening for sample in samples),
            "most rows in the journal": max(sample.journal for sample in samples),
            **{
                f"most memory of {name} MB": max(getattr(s, name) for s in samples) for name in ("api", "worker", "jvm")
            },
        }


def soak(
    folder: Path, seconds: float, sample_every: float, vacuum_every: float, constantly: Sequence[Action] = ()
) -> SoakResult:
    """Write, read and maintain for this many seconds, or until the first fault; then compare the final state."""
    with running(folder, "serve", **SETTINGS) as server:
        client = server.client()
        client.timeout = httpx.Timeout(300)
        client.post("/v1/datasets", json={"name": DATASET, "policy": POLICY}).raise_for_status()
        shared = Shared(server)
        writers = [Writer(number) for number in range(WRITERS)]
        for writer in writers:
            writer.write_unchanged(client)
        # This starts Spark.
        _done(client, "flush")
        readers = [Reader(number, shared) for number in range(READERS)]
        threads = [
            *(shared.start(writer.write, PAUSE) for writer in writers),
            *(shared.start(reader.read, PAUSE) for reader in readers),
            shared.start(_move_ref, MOVE_REF_EVERY),
            shared.start(_vacuum, vacuum_every),
            *(shared.start(action, PAUSE) for action in constantly),
        ]
        samples = [*_samples(server, client, shared.stop, seconds, sample_every)]
        shared.stop.set()
        for thread in threads:
            thread.join()
        _done(client, "flush")
        actual = {entity["id"]: _sets(entity["properties"]) for entity in _entities(client)}
        verified = _done(client, "verify")
        jobs = [*_jobs(client)]
    expected = {name: known for writer in writers for name, known in writer.expected()}
    return SoakResult(
        times=shared.times,
        faults=shared.faults,
        samples=samples,
        automatic=Counter(job["operation"] for job in jobs if job["tenant"] == "lakehouse" and job["state"] == "done"),
        failed=[job for job in jobs if job["state"] == "failed"],
        verified=verified,
        entities=len(actual),
        errors=[line for line in server.log.read_text().splitlines() if _is_error(line)],
        differing=sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name)),
    )


class Shared:
    """State shared by all threads. The first fault stops the test, so that its cause can be inspected."""

    def __init__(self, server: Server) -> None:
        self.stop = threading.Event()
        self.faults: list[str] = []
        self.times: dict[str, list[float]] = {}
        """Durations in seconds, by action."""
        self._server = server
        self._digests: dict[str, str] = {}
        """Digest of a snapshot's entities, by snapshot id, recorded by the first read of it."""
        self._lock = threading.Lock()

    def start(self, action: Action, pause: float) -> threading.Thread:
        """Call `action`, which returns its name, in a loop, in a new thread with its own connection."""

        def loop() -> None:
            with httpx.Client(base_url=self._server.url, headers=self._server.client().headers, timeout=120) as client:
                while not self.stop.wait(pause):
                    try:
                        start = time.perf_counter()
                        name = action(client)
                        with self._lock:
                            self.times.setdefault(name, []).append(time.perf_counter() - start)
                    except Exception as fault:  # noqa: BLE001 - any exception is a fault
                        self.faults.append(f"{type(fault).__name__}: {fault}")
                        self.stop.set()

        thread = threading.Thread(target=loop, name=action.__qualname__)
        thread.start()
        return thread

    def same(self, snapshot: str, content: bytes) -> bool:
        """Return whether a snapshot's entities are the same as when they were first read."""
        digest = hashlib.sha256(content).hexdigest()
        with self._lock:
            return self._digests.setdefault(snapshot, digest) == digest

    def known_snapshots(self) -> list[str]:
        with self._lock:
            return [*self._digests]

    def forget(self, snapshot: str) -> None:
        with self._lock:
            self._digests.pop(snapshot, None)


class Writer:
    """A writer that is the only one to write its entities, and so knows their expected state after each response."""

    def __init__(self, number: int) -> None:
        self._draw = random.Random(number)
        self._ids = _ids(number)
        self._known: dict[str, dict[str, Properties]] = {}
        """By entity and origin."""
        self._unchanged: dict[str, dict[str, Properties]] = {}

    def write_unchanged(self, client: httpx.Client) -> None:
        """Write the entities that are never written again."""
        rest = {
            f"{name}-{number}": _properties(self._draw) for name in self._ids for number in range(UNCHANGED // ENTITIES)
        }
        self._post(client, ORIGINS[0], rest)
        self._unchanged, self._known = self._known, {}

    def expected(self) -> Iterator[tuple[str, Properties]]:
        """Yield the expected state of every entity."""
        return ((name, _union(by_origin)) for name, by_origin in {**self._unchanged, **self._known}.items())

    def write(self, client: httpx.Client) -> str:
        """Do a random write, and sometimes check that the next read sees it."""
        actions = [self._add, self._add_again, self._put, self._delete, self._delete_statement]
        (action,) = self._draw.choices(actions, weights=[8, 4, 4, 2, 4])
        name = action(client)
        if name is not None and self._draw.random() < READ_BACK:
            answer = client.get(f"{PATH}/entities/{name}")
            _check(answer.status_code == (200 if name in self._known else 404), action, name, answer)
            if name in self._known:
                seen, known = _sets(answer.json()["properties"]), _union(self._known[name])
                _check(seen == known, f"{action.__name__}: expected {known}, read", name, answer)
        return action.__name__.strip("_")

    def _add(self, client: httpx.Client) -> str | None:
        origin = self._draw.choice(ORIGINS)
        batch = {name: _properties(self._draw) for name in self._draw.sample(self._ids, self._draw.randint(1, 20))}
        self._post(client, origin, batch)
        return next(iter(batch))

    def _add_again(self, client: httpx.Client) -> str | None:
        """Write known statements again, unchanged."""
        origin = self._draw.choice(ORIGINS)
        known = [name for name, by_origin in self._known.items() if origin in by_origin]
        batch = {name: self._known[name][origin] for name in self._draw.sample(known, min(len(known), 20))}
        self._post(client, origin, batch)
        return next(iter(batch), None)

    def _post(self, client: httpx.Client, origin: str, batch: dict[str, Properties]) -> None:
        if batch:
            body = b"\n".join(orjson.dumps(_person(name, properties)) for name, properties in batch.items())
            headers = {"Content-Type": "application/x-ndjson"}
            client.post(f"{PATH}/entities?origin={origin}", content=body, headers=headers).raise_for_status()
        for name, properties in batch.items():
            own = self._known.setdefault(name, {}).setdefault(origin, {})
            for prop, values in properties.items():
                own[prop] = own.get(prop, set()) | values

    def _put(self, client: httpx.Client) -> str | None:
        name, origin = self._draw.choice(self._ids), self._draw.choice(ORIGINS)
        properties = _properties(self._draw)
        client.put(f"{PATH}/entities/{name}?origin={origin}", json=_person(name, properties)).raise_for_status()
        self._known.setdefault(name, {})[origin] = properties
        return name

    def _delete(self, client: httpx.Client) -> str | None:
        name, origin = self._draw.choice(self._ids), self._draw.choice((None, *ORIGINS))
        answer = client.delete(f"{PATH}/entities/{name}", params={} if origin is None else {"origin": origin})
        by_origin = self._known.pop(name, {})
        deleted = by_origin if origin is None else {origin: by_origin.pop(origin)} if origin in by_origin else {}
        if by_origin is not deleted and by_origin:
            self._known[name] = by_origin
        # Each origin has one more statement, for the entity itself.
        live = sum(1 + sum(map(len, own.values())) for own in deleted.values())
        _check(answer.status_code == 200 and answer.json()["tombstones"] == live, f"delete of {live}", name, answer)
        return name

    def _delete_statement(self, client: httpx.Client) -> str | None:
        if not self._known:
            return None
        name = self._draw.choice([*self._known])
        prop = self._draw.choice(PROPS)
        value = self._draw.choice([*sorted(_union(self._known[name]).get(prop, ())), "nothing"])
        statement = Statement.make_key(DATASET, name, prop, value, external=False)
        answer = client.delete(f"{PATH}/statements/{statement}")
        matching = [own for own in self._known[name].values() if value in own.get(prop, ())]
        for own in matching:
            own[prop] -= {value}
        correct = answer.status_code == 200 and answer.json()["tombstones"] == len(matching)
        _check(correct, f"delete of {len(matching)} statements", name, answer)
        return name


class Reader:
    """A reader that checks invariants which hold whatever the writers do."""

    def __init__(self, number: int, shared: Shared) -> None:
        self._draw = random.Random(-1 - number)
        self._shared = shared
        self._ids = [name for writer in range(WRITERS) for name in _ids(writer)]

    def read(self, client: httpx.Client) -> str:
        actions = [self._one, self._page, self._stream, self._at_ref, self._at_snapshot]
        (action,) = self._draw.choices(actions, weights=[16, 4, 1, 1, 1])
        action(client)
        return action.__name__.strip("_")

    def _one(self, client: httpx.Client) -> None:
        name = self._draw.choice(self._ids)
        answer = client.get(f"{PATH}/entities/{name}")
        _check(answer.status_code in (200, 404), "read", name, answer)
        if answer.status_code == 200:
            _check(_is_valid(answer.json()) and answer.json()["id"] == name, "read", name, answer)

    def _page(self, client: httpx.Client) -> None:
        """Read two consecutive pages; the state may change between them."""
        first = client.get(f"{PATH}/entities", params={"limit": 100}).raise_for_status().json()
        pages = [first]
        if first["next"] is not None:
            following = client.get(f"{PATH}/entities", params={"limit": 100, "cursor": first["next"]})
            pages.append(following.raise_for_status().json())
        _check_listed([entity for page in pages for entity in page["results"]])
        assert not any(page["invalid"] for page in pages), pages

    def _stream(self, client: httpx.Client) -> None:
        _entities(client)

    def _at_ref(self, client: httpx.Client) -> None:
        answer = client.get(f"{PATH}/entities/stream", params={"at": REF})
        # The ref may be missing only before it is first set.
        if answer.status_code != 404 or self._shared.known_snapshots():
            _check(answer.status_code == 200, "read at", REF, answer)
            snapshot = answer.headers["Tarn-Snapshot"]
            _check(self._shared.same(snapshot, answer.content), "different from the first read at", snapshot, answer)

    def _at_snapshot(self, client: httpx.Client) -> None:
        """Read a snapshot again: it must be unchanged, or have expired (410)."""
        known = self._shared.known_snapshots()
        if not known:
            return
        snapshot = self._draw.choice(known)
        answer = client.get(f"{PATH}/entities/stream", params={"at": snapshot})
        if answer.status_code == 410:
            self._shared.forget(snapshot)
            return
        _check(answer.status_code == 200, "read at", snapshot, answer)
        _check(self._shared.same(snapshot, answer.content), "different from the first read at", snapshot, answer)


def _move_ref(client: httpx.Client) -> str:
    """Set the ref to the head: the snapshot it named before may expire from now on."""
    head = client.get(f"{PATH}/snapshots/latest").raise_for_status().json()["id"]
    client.put(f"{PATH}/refs/{REF}", json={"snapshot": head}).raise_for_status()
    return "move_ref"


def _vacuum(client: httpx.Client) -> str:
    """Run a vacuum without the minimum age of a day: unreferenced files are deleted immediately."""
    _done(client, "vacuum", override_floor=True)
    return "vacuum_at_once"


def _flush(client: httpx.Client) -> str:
    _done(client, "flush")
    return "flush"


def _compact(client: httpx.Client) -> str:
    _done(client, "compact", force=True)
    return "compact_all"


def _is_error(line: str) -> bool:
    """Return whether a log line is an error of Tarn: Spark's own lines are not JSON."""
    return line.startswith("{") and orjson.loads(line)["level"] in ("error", "critical")


def _done(client: httpx.Client, operation: str, **options: Any) -> dict[str, Any]:
    job = client.post(f"{PATH}/operations/{operation}?wait=100", json=options).raise_for_status().json()
    assert job["state"] == "done", job
    result: dict[str, Any] = job["result"]
    return result


def _jobs(client: httpx.Client) -> Iterator[dict[str, Any]]:
    params: dict[str, Any] = {"limit": 1000}
    while True:
        page = client.get("/v1/jobs", params=params).raise_for_status().json()
        yield from page["results"]
        if page["next"] is None:
            return
        params["cursor"] = page["next"]


def _entities(client: httpx.Client) -> list[dict[str, Any]]:
    """Return all entities of the current state."""
    answer = client.get(f"{PATH}/entities/stream", params={"end": "true"}).raise_for_status()
    *entities, end = map(orjson.loads, answer.content.splitlines())
    assert end["$end"]["count"] == len(entities), end
    _check_listed(entities)
    return entities


def _check_listed(entities: list[dict[str, Any]]) -> None:
    names = [entity["id"] for entity in entities]
    assert names == sorted(set(names)), "a list is not sorted by id, or has an entity twice"
    broken = [entity for entity in entities if not _is_valid(entity)]
    assert not broken, broken


def _is_valid(entity: dict[str, Any]) -> bool:
    """Return whether an entity has only values that writers use, each once."""
    return entity["schema"] == "Person" and all(
        len(values) == len(set(values)) and set(values) <= POSSIBLE[prop]
        for prop, values in entity["properties"].items()
    )


def _check(holds: bool, what: object, name: str, answer: httpx.Response) -> None:
    assert holds, f"{what} {name}: {answer.status_code} {answer.headers.get('Tarn-Snapshot')} {answer.text[:2000]}"


def _ids(writer: int) -> list[str]:
    return [f"{writer}-{number:05d}" for number in range(ENTITIES)]


def _properties(draw: random.Random) -> Properties:
    """Draw properties from few values, so that statements repeat, and deleted ones are added again."""
    return {prop: set(draw.sample(sorted(POSSIBLE[prop]), draw.randint(1, 3))) for prop in PROPS}


def _person(name: str, properties: Properties) -> dict[str, Any]:
    return {"id": name, "schema": "Person", "properties": {prop: sorted(values) for prop, values in properties.items()}}


def _union(by_origin: dict[str, Properties]) -> Properties:
    """Return the union of the properties of all origins."""
    union: Properties = {}
    for own in by_origin.values():
        for prop, values in own.items():
            if values:
                union[prop] = union.get(prop, set()) | values
    return union


def _sets(properties: dict[str, Iterable[str]]) -> Properties:
    return {prop: set(values) for prop, values in properties.items()}


def _samples(
    server: Server, client: httpx.Client, stop: threading.Event, seconds: float, every: float
) -> Iterator[Sample]:
    start = time.monotonic()
    while not stop.wait(min(every, max(0.0, start + seconds - time.monotonic()))):
        yield _sample(server, client, time.monotonic() - start)
        if time.monotonic() >= start + seconds:
            return
    yield _sample(server, client, time.monotonic() - start)


def _sample(server: Server, client: httpx.Client, second: float) -> Sample:
    home = server.folder / "data" / "lake" / DATASET
    head = client.get(f"{PATH}/snapshots/latest").raise_for_status().json()
    start = time.perf_counter()
    for table in ("statements", "translog"):
        DeltaTable(str(home / "entities" / table), version=head[table]["version"])
    opening = time.perf_counter() - start
    return Sample(
        second=second,
        **_memory(server.process.pid),
        files=len(head["statements"]["files"]) + len(head["translog"]["files"]),
        on_disk=sum("_delta_log" not in path.parts for path in (home / "entities").rglob("*.parquet")),
        snapshots=sum(1 for _ in (home / "snapshots").glob("0*.json")),
        opening=opening,
        journal=client.get(f"{PATH}/journal").raise_for_status().json()["rows"],
    )


def _memory(pid: int) -> dict[str, float]:
    """Return the megabytes of the API and of the worker, each with its children; the JVM is counted separately."""
    api = psutil.Process(pid)
    (worker,) = (child for child in api.children() if "worker" in child.cmdline())
    worker_pids = {child.pid for child in worker.children(recursive=True)} | {worker.pid}
    memory = {"api": 0.0, "worker": 0.0, "jvm": 0.0}
    for process in [api, *api.children(recursive=True)]:
        with suppress(psutil.Error):
            group = "jvm" if "java" in process.name() else "worker" if process.pid in worker_pids else "api"
            # Forked workers share pages with their daemon: only unique memory (USS) is counted.
            memory[group] += process.memory_full_info().uss / 1e6
    return memory


def _print(samples: list[Sample]) -> None:
    table = Table(*Sample._fields)
    for sample in samples:
        table.add_row(*(f"{value:,.3f}" if isinstance(value, float) else str(value) for value in sample))
    Console().print(table)
