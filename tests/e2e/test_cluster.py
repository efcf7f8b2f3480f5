"""Cluster mode: APIs, workers and executors that share only PostgreSQL and an object store, and are killed during
work.
"""

import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain, count, cycle
from pathlib import Path
from typing import Any, cast

import httpx
import orjson
import psycopg
import pytest
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.model.datasets.snapshot import SnapshotOperation
from tarn.model.ftm.entity import Exploder
from tarn.model.ftm.statistics import Statistics
from tarn.model.names import DatasetName
from tarn.pipeline.jobs.flush import TaskRunner
from tarn.query.output.statement_formats import CSV
from tarn.settings import Settings, load_settings
from tarn.storage.connection import Connection
from tarn.storage.store import Store

from tests.conftest import copied_postgresql
from tests.e2e.cluster import ADMIN_KEY, TIMEOUT, Cluster, cluster, wait_for
from tests.faults.checks import check_now, history_of
from tests.faults.scene import Scene
from tests.in_process_api import InProcessApi
from tests.query.model import Event, added, deleted, erased, iso, shown
from tests.query.reads import parsed
from tests.query.test_histories_http import NDJSON, HttpPlayer
from tests.query.test_statistics import counted_in
from tests.s3 import S3Server

pytestmark = pytest.mark.long

ORIGINS = ("crawl", "by.hand")
NAMES = ("Ann", "Bo", "Cy", "Di")
EXPORTS = ("entities.ftm.json", "statements.csv", "statistics.json")
PEOPLE = [f"p{number:03}" for number in range(40)]


class AlternatingClients:
    """Alternates between the APIs, so that what one has written is read from the other."""

    def __init__(self, clients: list[httpx.Client]) -> None:
        self._clients = cycle(clients)

    def __call__(self, method: str, path: str, **options: Any) -> httpx.Response:
        return next(self._clients).request(method, path, **options)


@dataclass
class ClusterPlayer(HttpPlayer):
    """A dataset written through both APIs, with the model of its expected content."""

    moments: Iterator[int] = field(default_factory=lambda: count(1))
    batches: list[list[Event]] = field(default_factory=list)
    commits: list[int | None] = field(default_factory=list)
    """Commit number of each batch; None for a delete that matched nothing."""

    def __post_init__(self) -> None:
        self.draw = random.Random(self.dataset.name)

    def send(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        answer = super().send(method, path, **options)
        self.commits.append(answer["commit"])
        return answer

    def expect(self, events: Any) -> list[Event]:
        self.batches.append(super().expect(events))
        return self.batches[-1]

    def load(self, origin: str) -> None:
        """Write all people as entities."""
        moment = next(self.moments)
        people = [
            {
                "id": name,
                "schema": "Person",
                "properties": {"name": [self.draw.choice(NAMES)]},
                "first_seen": iso(moment),
            }
            for name in PEOPLE
        ]
        body = b"\n".join(map(orjson.dumps, people))
        self.send("POST", "/entities", content=body, params={"origin": origin}, headers=NDJSON)
        self.expect(chain.from_iterable(self._added(person, origin, moment) for person in people))

    def _added(self, person: dict[str, Any], origin: str, moment: int) -> Iterator[Event]:
        exploded = Exploder().explode(self.dataset.name, person)
        for prop, value in zip(exploded.props, exploded.values, strict=True):
            yield added(person["id"], origin, ("Person", prop, value), None, moment, moment)

    def write(self) -> None:
        """Write a random change to people that may or may not exist: adds, a PUT, a delete of a statement or of a
        person.
        """
        draw, moment = self.draw, next(self.moments)
        person, origin = draw.choice(PEOPLE), draw.choice(ORIGINS)
        facts = [("Person", "name", draw.choice(NAMES)), ("Person", "birthDate", str(draw.randint(1950, 1959)))]
        adds = [added(person, origin, fact, draw.choice((None, "Q1")), moment, moment) for fact in facts]
        changes: list[list[Event]] = [
            adds,
            [erased(person, origin), *adds],
            [erased(person, draw.choice((None, *ORIGINS)))],
            [deleted(person, origin, facts[0])],
        ]
        (change,) = draw.choices(changes, weights=[4, 3, 1, 2])
        self.commit(*change)


class Tenant:
    """A tenant with datasets of its own and a client of each API, used alternately."""

    def __init__(self, running: Cluster, name: str, *datasets: str) -> None:
        first, second = (api.client(ADMIN_KEY) for api in running.apis)
        first.post("/v1/admin/tenants", json={"name": name}).raise_for_status()
        key = second.post(f"/v1/admin/tenants/{name}/keys", json={}).raise_for_status().json()["key"]
        self.clients = [api.client(key) for api in running.apis]
        for client in self.clients:
            client.timeout = httpx.Timeout(TIMEOUT)
        api = cast("InProcessApi", type("Api", (), {"admin": AlternatingClients(self.clients)}))
        self.players = []
        for dataset in datasets:
            created = first.post("/v1/datasets", json={"name": dataset}).raise_for_status().json()
            grant = {"dataset": dataset, "level": "maintain"}
            second.post(f"/v1/admin/tenants/{name}/grants", json=grant).raise_for_status()
            self.players.append(
                ClusterPlayer(api, cast("TaskRunner", None), Dataset(created["id"], DatasetName(dataset)))
            )

    def write(self, times: int) -> None:
        for _ in range(times):
            for player in self.players:
                player.write()

    def check(self) -> None:
        """Assert that the content of all its datasets is as the model has it through either API."""
        for player in self.players:
            for client in self.clients:
                _check(client, player)

    def request_job(self, path: str, **options: Any) -> str:
        """Request a job and return its id."""
        return self.clients[0].post(f"/v1/{path}", json=options).raise_for_status().json()["id"]

    def job(self, job: str) -> dict[str, Any]:
        return self.clients[1].get(f"/v1/jobs/{job}").raise_for_status().json()

    def wait_done(self, job: str) -> dict[str, Any]:
        """Wait until a job is over, assert that it succeeded, and return it."""
        wait_for(lambda: self.job(job)["state"] not in ("queued", "running"), f"the job is over: {self.job(job)}")
        finished = self.job(job)
        assert finished["state"] == "done", finished
        return finished


def _check(client: httpx.Client, player: ClusterPlayer) -> None:
    base, model = f"/v1/datasets/{player.dataset.name}", player.model
    for name in (*PEOPLE[:5], "Q1", "nobody"):
        answer, line = client.get(f"{base}/entities/{name}"), model.one(name)
        assert answer.status_code == (404 if line is None else 200), answer.text
        assert line is None or answer.content == line.strip()
    streamed = client.get(f"{base}/entities/stream", params={"end": "true"}).content.splitlines(keepends=True)
    assert streamed[:-1] == model.lines()
    rows = client.get(f"{base}/statements/stream", headers={"Accept": "application/x-ndjson"}).content
    assert [orjson.loads(line) for line in rows.splitlines()] == [shown(row) for row in model.rows]


@contextmanager
def journal_locked(database_url: str) -> Iterator[Callable[[int], None]]:
    """Lock the journal against reads, and wait until the given number of readers is blocked."""
    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as observer:
        # Other statements may be blocked as well; this is the one with which tasks read their slices.
        blocked = """SELECT count(*) >= %s FROM pg_stat_activity WHERE wait_event_type = 'Lock'
                     AND strpos(query, 'FROM journal_batches b JOIN journal j') > 0"""

        def wait(readers: int) -> None:
            wait_for(lambda: observer.execute(blocked, [readers]).fetchone() == (True,), "tasks are blocked")

        with psycopg.connect(database_url.replace("+psycopg", "")) as locker:
            locker.execute("LOCK TABLE journal IN ACCESS EXCLUSIVE MODE")
            yield wait


@pytest.mark.xdist_group("spark")
def test_cluster_lake_equals_the_model_after_an_executor_and_a_worker_were_killed(
    postgresql: str, s3: S3Server, tmp_path: Path
):
    with copied_postgresql(postgresql) as url, cluster(tmp_path, url, s3) as running:
        press, court = Tenant(running, "press", "north"), Tenant(running, "court", "south", "west")
        for tenant in (press, court):
            for player in tenant.players:
                player.load(ORIGINS[0])
                player.load(ORIGINS[1])
            tenant.write(10)
            tenant.check()

        flush_while_an_executor_is_killed(running, press, court, url)
        compact_while_a_worker_is_killed(running, press, court)

        for tenant in (press, court):
            tenant.wait_done(tenant.request_job("operations/flush"))
            tenant.check()
            for player in tenant.players:
                export(tenant, player)
        settings = load_settings(database_url=url, lake_uri=running.lake_uri, storage_options=s3.options)
        with closing(Database(settings.database_url)) as database:
            for tenant in (press, court):
                for player in tenant.players:
                    check_stored(tenant, player, settings, database)


def flush_while_an_executor_is_killed(running: Cluster, press: Tenant, court: Tenant, database_url: str) -> None:
    """Flush with both workers at once, and kill an executor while executors of both machines read the journal. Spark
    reschedules its task, and the flush completes.
    """
    with journal_locked(database_url) as wait_for_readers:
        jobs = {press: press.request_job("operations/flush")}
        first = running.wait_for_worker_of(jobs[press])
        # The first worker's flush is blocked until the journal can be read again.
        jobs[court] = court.request_job("operations/flush")
        worker = running.wait_for_worker_of(jobs[court])
        assert worker is not first
        wait_for_readers(3)
        (killed, *_), (other, *_) = (
            [each for each in machine.executors() if each.driver_port == worker.driver_port]
            for machine in running.spark.workers
        )
        assert [len(each.tasks()) > 0 for each in (killed, other)] == [True, True]
        killed.process.kill()
        wait_for(lambda: not killed.process.is_running(), "the executor is dead")
        wait_for(lambda: len(running.executors_of(worker)) == 2, "Spark has started another executor")
    for tenant, job in jobs.items():
        done = tenant.wait_done(job)
        assert done["attempts"] == 1
        datasets = {player.dataset.name for player in tenant.players}
        assert {snapshot["dataset"] for snapshot in done["result"]["snapshots"]} == datasets
        tenant.check()
    assert "Finished task" not in killed.log
    assert "Finished task" in other.log
    assert (other.folder / "app.zip").exists(), "the executor did not get Tarn's code with the job"
    wait_for(lambda: len(running.spark.executors()) == 4, "each worker has an executor on each machine")


def compact_while_a_worker_is_killed(running: Cluster, press: Tenant, court: Tenant) -> None:
    """Kill a worker during a compaction while both tenants write; paused executors keep the compaction from ending. The
    other worker takes over the dead worker's job without intervention.
    """
    with ExitStack() as paused:
        for executor in running.spark.executors():
            paused.enter_context(executor.paused())
        compaction = press.request_job("datasets/north/operations/compact", force=True)
        killed = running.wait_for_worker_of(compaction)
        press.write(2)
        court.write(2)
        flush = court.request_job("operations/flush")
        running.wait_for_worker_of(flush)
        press.check()
        assert press.job(compaction)["state"] == "running"
        killed.process.kill()
        assert killed.process.wait() == -signal.SIGKILL

    def is_over() -> bool:
        press.write(1)
        court.write(1)
        press.check()
        return bool(press.job(compaction)["state"] != "running")

    wait_for(is_over, "the compaction is over", pause=0.2)
    (survivor,) = (worker for worker in running.workers if worker is not killed)
    assert (press.wait_done(compaction)["attempts"], survivor.has_started(compaction)) == (2, True)
    court.wait_done(flush)
    court.check()
    wait_for(lambda: not running.executors_of(killed), "Spark has ended the executors of the killed driver")


def export(tenant: Tenant, player: ClusterPlayer) -> None:
    """Assert that the exports equal the model through either API."""
    base, model = f"datasets/{player.dataset.name}", player.model
    tenant.wait_done(tenant.request_job(f"{base}/operations/make"))
    for client in tenant.clients:
        exports = {name: client.get(f"/v1/{base}/exports/{name}").raise_for_status().content for name in EXPORTS}
        assert exports["entities.ftm.json"].splitlines(keepends=True) == model.lines()
        assert parsed(CSV, exports["statements.csv"]) == [shown(row) for row in model.rows]
        statistics = counted_in(map(orjson.loads, model.lines()), len(model.rows))
        assert Statistics.parsed(orjson.loads(exports["statistics.json"])) == statistics


def check_stored(tenant: Tenant, player: ClusterPlayer, settings: Settings, database: Database) -> None:
    """Assert that `verify` reports nothing, and that the stored files read without Tarn have a linear history and no
    row lost or duplicated.
    """
    verified = tenant.wait_done(tenant.request_job(f"datasets/{player.dataset.name}/operations/verify"))["result"]
    assert verified["findings"] == []
    store = Store(Connection.from_settings(settings))
    batches = zip(player.commits, player.batches, strict=True)
    acknowledged = {commit: batch for commit, batch in batches if commit is not None}
    scene = Scene(settings, database, store, player.kernels, player.dataset, player.draw, acknowledged)
    check_now(scene)
    operations = Counter(snapshot.operation for snapshot in history_of(scene))
    assert operations[SnapshotOperation.COMPACT] == (player.dataset.name == "north")
