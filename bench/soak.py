"""A soak: writers who know the truth of their own entities, readers beside them, and maintenance all the time.

At the end the lake holds exactly what the writers know, `verify` finds nothing, and nothing has grown without bound:
not the files, not the logs, not the memory.
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
ENTITIES, AT_REST = 1_500, 3_000
"""Entities that one writer owns, and others between them that it never writes again. So the store stays of one size,
and is large enough that not every flush is worth a compaction."""
DATASET = "soak"
PATH = f"/v1/datasets/{DATASET}"
ORIGINS = ("crawl", "curated")
PAUSE = 0.02
"""Seconds between two requests of a client."""
MOVE_REF_EVERY, VACUUM_EVERY = 7.0, 40.0
REF = "checked"
SETTINGS = {"TARN_FLUSH_AGE": "1", "TARN_UPKEEP_EVERY": "2", "TARN_READER_HEARTBEAT": "0.5"}
POLICY = {"retention": {"count": 5, "days": 0}}
MAINTENANCE = ("compact", "optimize", "vacuum")

MAX_FILES = 200
MAX_OPENING_SECONDS = 1.0
"""Seconds for both Delta tables."""
MOST_GROWTH, SLACK = 1.3, 50.0
"""What the memory of the last third may be of the middle third's, and megabytes besides."""

READ_BACK = 0.4
"""Of the writes, so many are read at once by who wrote them."""

Properties = dict[str, set[str]]
Act = Callable[[httpx.Client], str]

POSSIBLE: Properties = {
    "name": {f"Name {number}" for number in range(8)},
    "country": {"de", "fr", "gb", "us", "gr"},
    "birthDate": {f"19{number}-01-01" for number in range(50, 60)},
    "summary": {f"Said {number}" for number in range(30)},
}
PROPS = tuple(POSSIBLE)


def run() -> dict[str, Any]:
    """Soak for as long as `SOAK_SECONDS` says, and print what was sampled."""
    with tempfile.TemporaryDirectory() as folder:
        soaked = soak(Path(folder), SECONDS, SAMPLE_EVERY, VACUUM_EVERY)
    _print(soaked.samples)
    results = soaked.results()
    results["memory is flat"] = soaked.is_flat()
    results["maintained unasked"] = all(soaked.unasked[operation] for operation in MAINTENANCE)
    results["met"] = soaked.is_sound() and results["memory is flat"] and results["maintained unasked"]
    return results


def run_compaction() -> dict[str, Any]:
    """Flush and compact everything, one after the other without a pause, beside all the rest."""
    with tempfile.TemporaryDirectory() as folder:
        soaked = soak(Path(folder), COMPACTION_SECONDS, SAMPLE_EVERY, VACUUM_EVERY, (_flush, _compact))
    return soaked.results() | {"met": soaked.is_sound() and len(soaked.times.get("compact_all", ())) > 0}


class Sample(NamedTuple):
    """What there was at one moment. Memory in megabytes, of each process what is its own."""

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
    """What came of a soak."""

    times: dict[str, list[float]]
    """Seconds, by what was done."""
    faults: list[str]
    samples: list[Sample]
    unasked: Counter[str]
    """Jobs that the worker gave itself and did, by operation."""
    failed: list[dict[str, Any]]
    verified: dict[str, Any]
    entities: int
    errors: list[str]
    """What the server and its worker logged as errors."""
    differing: list[str]
    """Entities that the lake and their owners do not agree on."""

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
        """Whether no process took more in the last third than in the middle one."""
        third = len(self.samples) // 3
        middle, last = self.samples[third : 2 * third], self.samples[2 * third :]
        return all(
            statistics.median(getattr(one, name) for one in last)
            <= MOST_GROWTH * statistics.median(getattr(one, name) for one in middle) + SLACK
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
            "found by verify": self.verified["findings"][:20],
            **{f"{operation} unasked": self.unasked[operation] for operation in MAINTENANCE},
            "most files of a head": max(sample.files for sample in samples),
            "most files on the disk": max(sample.on_disk for sample in samples),
            "most snapshots": max(sample.snapshots for sample in samples),
            "longest opening s": max(sample.opening for sample in samples),
            "most rows in the journal": max(sample.journal for sample in samples),
            **{
                f"most memory of {name} MB": max(getattr(s, name) for s in samples) for name in ("api", "worker", "jvm")
            },
        }


def soak(
    folder: Path, seconds: float, sample_every: float, vacuum_every: float, constantly: Sequence[Act] = ()
) -> SoakResult:
    """Write, read and maintain for so long, or until something is wrong; then compare."""
    with running(folder, "serve", **SETTINGS) as server:
        client = server.client()
        client.timeout = httpx.Timeout(300)
        client.post("/v1/datasets", json={"name": DATASET, "policy": POLICY}).raise_for_status()
        play = Shared(server)
        owners = [Writer(number) for number in range(WRITERS)]
        for owner in owners:
            owner.begin(client)
        # This starts Spark.
        _done(client, "flush")
        readers = [Reader(number, play) for number in range(READERS)]
        threads = [
            *(play.start(owner.write, PAUSE) for owner in owners),
            *(play.start(reader.read, PAUSE) for reader in readers),
            play.start(_move_ref, MOVE_REF_EVERY),
            play.start(_vacuum, vacuum_every),
            *(play.start(act, PAUSE) for act in constantly),
        ]
        samples = [*_samples(server, client, play.over, seconds, sample_every)]
        play.over.set()
        for thread in threads:
            thread.join()
        _done(client, "flush")
        found = {entity["id"]: _sets(entity["properties"]) for entity in _entities(client)}
        verified = _done(client, "verify")
        jobs = [*_jobs(client)]
    truth = {name: known for owner in owners for name, known in owner.truth()}
    return SoakResult(
        times=play.times,
        faults=play.faults,
        samples=samples,
        unasked=Counter(job["operation"] for job in jobs if job["tenant"] == "lakehouse" and job["state"] == "done"),
        failed=[job for job in jobs if job["state"] == "failed"],
        verified=verified,
        entities=len(found),
        errors=[line for line in server.log.read_text().splitlines() if _is_error(line)],
        differing=sorted(name for name in truth.keys() | found.keys() if truth.get(name) != found.get(name)),
    )


class Shared:
    """What all who take part share. The first fault ends it: what led to it is still there to be looked at."""

    def __init__(self, server: Server) -> None:
        self.over = threading.Event()
        self.faults: list[str] = []
        self.times: dict[str, list[float]] = {}
        """Seconds, by what was done."""
        self._server = server
        self._digests: dict[str, str] = {}
        """Of the entities of a snapshot, by its id: whoever reads them first says what they are."""
        self._lock = threading.Lock()

    def start(self, act: Act, pause: float) -> threading.Thread:
        """Do something again and again on a connection of its own. It says what it did."""

        def go() -> None:
            with httpx.Client(base_url=self._server.url, headers=self._server.client().headers, timeout=120) as client:
                while not self.over.wait(pause):
                    try:
                        begun = time.perf_counter()
                        did = act(client)
                        with self._lock:
                            self.times.setdefault(did, []).append(time.perf_counter() - begun)
                    except Exception as fault:  # noqa: BLE001 - whatever it is, it is what the soak looks for
                        self.faults.append(f"{type(fault).__name__}: {fault}")
                        self.over.set()

        thread = threading.Thread(target=go, name=act.__qualname__)
        thread.start()
        return thread

    def same(self, snapshot: str, content: bytes) -> bool:
        """Whether a snapshot's entities are what they were when somebody first read them."""
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
    """A writer whose entities nobody else writes, and so knows what is true of them after each answer."""

    def __init__(self, number: int) -> None:
        self._draw = random.Random(number)
        self._ids = _ids(number)
        self._known: dict[str, dict[str, Properties]] = {}
        """By entity and origin."""
        self._at_rest: dict[str, dict[str, Properties]] = {}

    def begin(self, client: httpx.Client) -> None:
        """What is never written again."""
        rest = {
            f"{name}-{number}": _properties(self._draw) for name in self._ids for number in range(AT_REST // ENTITIES)
        }
        self._post(client, ORIGINS[0], rest)
        self._at_rest, self._known = self._known, {}

    def truth(self) -> Iterator[tuple[str, Properties]]:
        """Every entity as a reader must see it."""
        return ((name, _union(said)) for name, said in {**self._at_rest, **self._known}.items())

    def write(self, client: httpx.Client) -> str:
        """Write something, and see that the next read has it."""
        acts = [self._add, self._add_again, self._put, self._delete, self._delete_statement]
        (act,) = self._draw.choices(acts, weights=[8, 4, 4, 2, 4])
        name = act(client)
        if name is not None and self._draw.random() < READ_BACK:
            answer = client.get(f"{PATH}/entities/{name}")
            _check(answer.status_code == (200 if name in self._known else 404), act, name, answer)
            if name in self._known:
                seen, known = _sets(answer.json()["properties"]), _union(self._known[name])
                _check(seen == known, f"{act.__name__}: {known} is read as", name, answer)
        return act.__name__.strip("_")

    def _add(self, client: httpx.Client) -> str | None:
        origin = self._draw.choice(ORIGINS)
        batch = {name: _properties(self._draw) for name in self._draw.sample(self._ids, self._draw.randint(1, 20))}
        self._post(client, origin, batch)
        return next(iter(batch))

    def _add_again(self, client: httpx.Client) -> str | None:
        """What is known already, word for word."""
        origin = self._draw.choice(ORIGINS)
        known = [name for name, said in self._known.items() if origin in said]
        batch = {name: self._known[name][origin] for name in self._draw.sample(known, min(len(known), 20))}
        self._post(client, origin, batch)
        return next(iter(batch), None)

    def _post(self, client: httpx.Client, origin: str, batch: dict[str, Properties]) -> None:
        if batch:
            body = b"\n".join(orjson.dumps(_person(name, said)) for name, said in batch.items())
            headers = {"Content-Type": "application/x-ndjson"}
            client.post(f"{PATH}/entities?origin={origin}", content=body, headers=headers).raise_for_status()
        for name, said in batch.items():
            own = self._known.setdefault(name, {}).setdefault(origin, {})
            for prop, values in said.items():
                own[prop] = own.get(prop, set()) | values

    def _put(self, client: httpx.Client) -> str | None:
        name, origin = self._draw.choice(self._ids), self._draw.choice(ORIGINS)
        said = _properties(self._draw)
        client.put(f"{PATH}/entities/{name}?origin={origin}", json=_person(name, said)).raise_for_status()
        self._known.setdefault(name, {})[origin] = said
        return name

    def _delete(self, client: httpx.Client) -> str | None:
        name, origin = self._draw.choice(self._ids), self._draw.choice((None, *ORIGINS))
        answer = client.delete(f"{PATH}/entities/{name}", params={} if origin is None else {"origin": origin})
        said = self._known.pop(name, {})
        ended = said if origin is None else {origin: said.pop(origin)} if origin in said else {}
        if said is not ended and said:
            self._known[name] = said
        # Each origin has a statement more, which says that the entity is there.
        live = sum(1 + sum(map(len, own.values())) for own in ended.values())
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
        saying = [own for own in self._known[name].values() if value in own.get(prop, ())]
        for own in saying:
            own[prop] -= {value}
        right = answer.status_code == 200 and answer.json()["tombstones"] == len(saying)
        _check(right, f"delete of {len(saying)} statements", name, answer)
        return name


class Reader:
    """Reads what others write, and knows only what must hold whatever they do."""

    def __init__(self, number: int, play: Shared) -> None:
        self._draw = random.Random(-1 - number)
        self._play = play
        self._ids = [name for owner in range(WRITERS) for name in _ids(owner)]

    def read(self, client: httpx.Client) -> str:
        acts = [self._one, self._page, self._stream, self._at_ref, self._at_snapshot]
        (act,) = self._draw.choices(acts, weights=[16, 4, 1, 1, 1])
        act(client)
        return act.__name__.strip("_")

    def _one(self, client: httpx.Client) -> None:
        name = self._draw.choice(self._ids)
        answer = client.get(f"{PATH}/entities/{name}")
        _check(answer.status_code in (200, 404), "read", name, answer)
        if answer.status_code == 200:
            _check(_is_valid(answer.json()) and answer.json()["id"] == name, "read", name, answer)

    def _page(self, client: httpx.Client) -> None:
        """Two pages that follow on each other, though the state may change between them."""
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
        # Only a ref that was never set may be missing.
        if answer.status_code != 404 or self._play.known_snapshots():
            _check(answer.status_code == 200, "read at", REF, answer)
            snapshot = answer.headers["Tarn-Snapshot"]
            _check(self._play.same(snapshot, answer.content), "otherwise than before at", snapshot, answer)

    def _at_snapshot(self, client: httpx.Client) -> None:
        """A snapshot that was read before: the same, or given up meanwhile."""
        known = self._play.known_snapshots()
        if not known:
            return
        snapshot = self._draw.choice(known)
        answer = client.get(f"{PATH}/entities/stream", params={"at": snapshot})
        if answer.status_code == 410:
            self._play.forget(snapshot)
            return
        _check(answer.status_code == 200, "read at", snapshot, answer)
        _check(self._play.same(snapshot, answer.content), "otherwise than before at", snapshot, answer)


def _move_ref(client: httpx.Client) -> str:
    """Point the ref to the head: what it pointed to may be given up from now on."""
    head = client.get(f"{PATH}/snapshots/latest").raise_for_status().json()["id"]
    client.put(f"{PATH}/refs/{REF}", json={"snapshot": head}).raise_for_status()
    return "move_ref"


def _vacuum(client: httpx.Client) -> str:
    """Nobody waits a day here: what no snapshot names goes at once."""
    _done(client, "vacuum", override_floor=True)
    return "vacuum_at_once"


def _flush(client: httpx.Client) -> str:
    _done(client, "flush")
    return "flush"


def _compact(client: httpx.Client) -> str:
    _done(client, "compact", force=True)
    return "compact_all"


def _is_error(line: str) -> bool:
    """Whether it is one of ours: Spark's own lines are not JSON."""
    return line.startswith("{") and orjson.loads(line)["level"] in ("error", "critical")


def _done(client: httpx.Client, operation: str, **options: Any) -> dict[str, Any]:
    job = client.post(f"{PATH}/operations/{operation}?wait=100", json=options).raise_for_status().json()
    assert job["state"] == "done", job
    result: dict[str, Any] = job["result"]
    return result


def _jobs(client: httpx.Client) -> Iterator[dict[str, Any]]:
    asked: dict[str, Any] = {"limit": 1000}
    while True:
        page = client.get("/v1/jobs", params=asked).raise_for_status().json()
        yield from page["results"]
        if page["next"] is None:
            return
        asked["cursor"] = page["next"]


def _entities(client: httpx.Client) -> list[dict[str, Any]]:
    """All entities as they are now."""
    answer = client.get(f"{PATH}/entities/stream", params={"end": "true"}).raise_for_status()
    *found, end = map(orjson.loads, answer.content.splitlines())
    assert end["$end"]["count"] == len(found), end
    _check_listed(found)
    return found


def _check_listed(found: list[dict[str, Any]]) -> None:
    names = [entity["id"] for entity in found]
    assert names == sorted(set(names)), "a list is not in order, or has an entity twice"
    broken = [entity for entity in found if not _is_valid(entity)]
    assert not broken, broken


def _is_valid(entity: dict[str, Any]) -> bool:
    """Whether it says nothing that nobody said, and nothing twice."""
    return entity["schema"] == "Person" and all(
        len(values) == len(set(values)) and set(values) <= POSSIBLE[prop]
        for prop, values in entity["properties"].items()
    )


def _check(holds: bool, what: object, name: str, answer: httpx.Response) -> None:
    assert holds, f"{what} {name}: {answer.status_code} {answer.headers.get('Tarn-Snapshot')} {answer.text[:2000]}"


def _ids(owner: int) -> list[str]:
    return [f"{owner}-{number:05d}" for number in range(ENTITIES)]


def _properties(draw: random.Random) -> Properties:
    """Something to say: of few values, so that much is said again, and what was deleted comes back."""
    return {prop: set(draw.sample(sorted(POSSIBLE[prop]), draw.randint(1, 3))) for prop in PROPS}


def _person(name: str, said: Properties) -> dict[str, Any]:
    return {"id": name, "schema": "Person", "properties": {prop: sorted(values) for prop, values in said.items()}}


def _union(said: dict[str, Properties]) -> Properties:
    """What all origins say together."""
    found: Properties = {}
    for own in said.values():
        for prop, values in own.items():
            if values:
                found[prop] = found.get(prop, set()) | values
    return found


def _sets(properties: dict[str, Iterable[str]]) -> Properties:
    return {prop: set(values) for prop, values in properties.items()}


def _samples(
    server: Server, client: httpx.Client, over: threading.Event, seconds: float, every: float
) -> Iterator[Sample]:
    begun = time.monotonic()
    while not over.wait(min(every, max(0.0, begun + seconds - time.monotonic()))):
        yield _sample(server, client, time.monotonic() - begun)
        if time.monotonic() >= begun + seconds:
            return
    yield _sample(server, client, time.monotonic() - begun)


def _sample(server: Server, client: httpx.Client, second: float) -> Sample:
    home = server.folder / "data" / "lake" / DATASET
    head = client.get(f"{PATH}/snapshots/latest").raise_for_status().json()
    begun = time.perf_counter()
    for table in ("statements", "translog"):
        DeltaTable(str(home / "entities" / table), version=head[table]["version"])
    opening = time.perf_counter() - begun
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
    """Megabytes of the API and of the worker with what each started, the JVM apart."""
    api = psutil.Process(pid)
    (worker,) = (child for child in api.children() if "worker" in child.cmdline())
    below = {child.pid for child in worker.children(recursive=True)} | {worker.pid}
    found = {"api": 0.0, "worker": 0.0, "jvm": 0.0}
    for process in [api, *api.children(recursive=True)]:
        with suppress(psutil.Error):
            place = "jvm" if "java" in process.name() else "worker" if process.pid in below else "api"
            # Forked workers share pages with their daemon: what is their own counts.
            found[place] += process.memory_full_info().uss / 1e6
    return found


def _print(samples: list[Sample]) -> None:
    table = Table(*Sample._fields)
    for sample in samples:
        table.add_row(*(f"{value:,.3f}" if isinstance(value, float) else str(value) for value in sample))
    Console().print(table)
