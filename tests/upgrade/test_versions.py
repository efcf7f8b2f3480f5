"""Who may read what: a database ahead of the code, forms that are new, jobs and events of a newer version."""

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta

import orjson
import pytest
from sqlalchemy import insert, select, text, update
from tarn.api.http.services.event_hub import Hub
from tarn.datasets.registry import Dataset
from tarn.db import jobs, migrate
from tarn.db import outbox as events
from tarn.db import reader_heartbeats as readers
from tarn.db.engine import Database
from tarn.db.format_versions import ALIVE_AFTER_HEARTBEAT, FORMATS, DataFormat, is_read_by_all, may_write
from tarn.db.reader_heartbeats import ReaderHeartbeat
from tarn.db.tables import event_heads
from tarn.db.tables import events as events_table
from tarn.db.tables import jobs as jobs_table
from tarn.db.tables import readers as readers_table
from tarn.errors import ManifestInvalid, StartRefused
from tarn.model.ids import new_id, now
from tarn.model.job import JobState, Operation
from tarn.model.names import DatasetName
from tarn.model.snapshot import Snapshot
from tarn.query.active_reads import ActiveReadReporter, ActiveReads
from tarn.settings import Settings
from tarn.storage.lake_root import open_lake
from tarn.storage.layout import Layout
from tarn.storage.store import Store
from tarn.worker.flusher import SparkFlusher

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.lake.manifests import build
from tests.upgrade.next_version import REVISION, migrate_to_next_version
from tests.worker.workers import make_worker

JANE = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}

LATER = DataFormat("later", REVISION)
"""A form that only the next version reads."""


# A database that is ahead


def test_processes_go_on_and_start_on_a_database_that_the_next_version_has_migrated(
    house: InProcessApi, database: Database, tmp_path
):
    house.dataset("test")
    migrate_to_next_version(database, tmp_path)

    assert house.admin.post("/v1/datasets/test/entities", [JANE]).status_code in (200, 201)
    assert house.admin.get("/v1/datasets/test/entities/jane").status_code == 200
    migrate.require_current(database)
    with ActiveReadReporter(database, ActiveReads(), 1000):
        pass
    migrate.upgrade(database)
    with database.read() as connection:
        assert migrate.revision(connection) == REVISION


def test_no_process_starts_on_a_database_that_does_not_serve_it_and_none_migrates_it(database: Database, tmp_path):
    migrate_to_next_version(database, tmp_path, oldest=REVISION)

    for start in (migrate.require_current, lambda each: ActiveReadReporter(each, ActiveReads(), 1000).__enter__()):
        with pytest.raises(StartRefused, match=f"revision {REVISION}, serves versions made for {REVISION}") as refused:
            start(database)
        assert "run the newer version" in str(refused.value)
    with pytest.raises(StartRefused, match="cannot be migrated by this version"):
        migrate.upgrade(database)
    with database.read() as connection:
        assert readers.latest(connection) == {}


def test_migration_that_cannot_have_its_table_stands_back_and_says_so(postgresql_only: Database, monkeypatch):
    """A read of a table that is to be changed holds it, and a migration that waits would hold up all who come after."""
    monkeypatch.setattr(migrate, "LOCK_SECONDS", 0.05)
    monkeypatch.setattr(migrate, "TRIES", 2)
    with postgresql_only.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0013'"))
        connection.execute(text("DROP TABLE file_texts"))
        connection.execute(text("DROP TABLE compatibility"))
        connection.execute(text("ALTER TABLE readers DROP COLUMN speaks"))

    with postgresql_only.read() as reading:
        reading.execute(text("SELECT * FROM readers"))
        with pytest.raises(StartRefused, match="run `tarn migrate` again"):
            migrate.upgrade(postgresql_only)

    migrate.upgrade(postgresql_only)
    migrate.require_current(postgresql_only)


@pytest.fixture
def postgresql_only(database: Database) -> Database:
    if database.is_sqlite:
        pytest.skip("SQLite has one writer at a time")
    return database


# Forms


def test_new_form_is_written_once_nobody_lives_who_cannot_read_it_and_nobody_starts_who_cannot_from_then_on(
    database: Database, tmp_path
):
    migrate_to_next_version(database, tmp_path)
    with ActiveReadReporter(database, ActiveReads(), 1000):
        with database.write() as connection:
            assert not may_write(connection, LATER)
        migrate.require_current(database)

    with database.write() as connection:
        assert may_write(connection, LATER)
        assert may_write(connection, LATER)
    with pytest.raises(StartRefused, match=f"made for {REVISION} or later"):
        migrate.require_current(database)


def test_form_that_a_process_speaks_is_no_reason_to_wait_and_the_dead_are_not_waited_for_for_ever(database: Database):
    form = DataFormat("spoken", migrate.head())
    with database.write() as connection:
        readers.tell(connection, "old", ReaderHeartbeat(1, {}))
        readers.tell(connection, "new", ReaderHeartbeat(1, {}))
        connection.execute(update(readers_table).values(speaks=None).where(readers_table.c.id == "old"))
        connection.execute(update(readers_table).values(speaks=["spoken"]).where(readers_table.c.id == "new"))
        assert not is_read_by_all(connection, form)
        silent = now() - ALIVE_AFTER_HEARTBEAT - timedelta(seconds=1)
        connection.execute(update(readers_table).values(seen=silent).where(readers_table.c.id == "old"))
        assert is_read_by_all(connection, form)


def test_every_process_says_which_forms_it_reads(house: InProcessApi, database: Database):
    with database.read() as connection:
        said = connection.execute(select(readers_table.c.speaks)).scalars().all()
    assert said == [[form.name for form in FORMATS]]


def test_process_that_starts_while_a_form_comes_into_use_waits_and_is_refused(postgresql_only: Database, tmp_path):
    database = postgresql_only
    migrate_to_next_version(database, tmp_path)
    refused: list[BaseException] = []

    def start() -> None:
        try:
            ActiveReadReporter(database, ActiveReads(), 1000).__enter__()
        except StartRefused as error:
            refused.append(error)

    starting = threading.Thread(target=start)
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    with database.write() as connection:
        assert may_write(connection, LATER)
        starting.start()
        while not connection.execute(waiting).scalar_one():
            connection.execute(text("SELECT pg_stat_clear_snapshot()"))
    starting.join(20)

    assert len(refused) == 1
    with database.read() as connection:
        assert readers.latest(connection) == {}


# Jobs and events of a newer version


@pytest.fixture
def future_job(house: InProcessApi, dataset: Dataset) -> str:
    """A job that somebody else must do, long abandoned and cancelled: whoever claims has to get past it."""
    with house.services.database.write() as connection:
        job = jobs.enqueue(connection, Operation.COMPACT, dataset.id, "admin", "request")
        over = {"state": JobState.RUNNING, "heartbeat": now() - timedelta(days=1), "cancelled": now(), "attempts": 100}
        connection.execute(update(jobs_table).where(jobs_table.c.id == job.id).values(operation="from_later", **over))
    return job.id


def test_job_of_an_unknown_operation_is_left_alone_and_keeps_nobody_from_others(
    house: InProcessApi, dataset: Dataset, future_job: str
):
    database, admin = house.services.database, house.admin
    house.dataset("gone")
    doomed = admin.delete("/v1/datasets/gone?confirm=gone").json()["id"]

    assert make_worker(house).step()

    assert admin.get(f"/v1/jobs/{doomed}").json()["state"] == "done"
    assert future_job not in {job["id"] for job in admin.get("/v1/jobs").json()["results"]}
    asked = admin.get(f"/v1/jobs/{future_job}")
    assert (asked.status_code, asked.json()["type"]) == (503, "/problems/unavailable")
    assert "newer version" in asked.json()["detail"]
    assert admin.get("/v1/admin/worker").status_code == 200
    assert admin.get("/metrics").status_code == 200
    with database.read() as connection:
        row = connection.execute(select(jobs_table).where(jobs_table.c.id == future_job)).one()
    assert (row.state, row.attempts, row.operation) == ("running", 100, "from_later")


@ONE_DATABASE
def test_job_with_an_unknown_option_waits_for_a_worker_that_knows_it(house: InProcessApi, dataset: Dataset):
    services = house.services
    with services.database.write() as connection:
        job = jobs.enqueue(connection, Operation.COMPACT, dataset.id, "admin", "request", {"from_later": True})
    flusher = SparkFlusher(services.settings, services.database, services.store, owner=new_id())

    assert make_worker(house, maintainer=flusher.maintenance()).step()

    with services.database.read() as connection:
        left = jobs.get(connection, job.id)
    assert left.state is JobState.QUEUED
    assert left.not_before is not None
    assert left.problem is not None
    assert "'from_later'" in str(left.problem.detail)


def test_events_end_before_the_first_of_an_unknown_kind_which_nobody_passes_by(
    settings: Settings, database: Database, house: InProcessApi, dataset: Dataset
):
    with database.write() as connection:
        last = connection.execute(select(event_heads.c.last).where(event_heads.c.stream == dataset.id)).scalar_one()
        row = {"stream": dataset.id, "at": now(), "data": {}}
        kinds = enumerate(("job.done", "from.later", "job.done"), last + 1)
        connection.execute(insert(events_table), [row | {"number": number, "kind": kind} for number, kind in kinds])
        connection.execute(update(event_heads).where(event_heads.c.stream == dataset.id).values(last=last + 3))

    with database.read() as connection:
        page = events.after(connection, dataset.id, last, 100)
        stuck = events.after(connection, dataset.id, last + 1, 100)
    assert ([told.number for told in page.told], page.through, page.last) == ([last + 1], last + 1, last + 3)
    assert (stuck.told, stuck.through) == ([], last + 1)

    async def follow() -> object:
        hub = Hub(settings, database, threading.Event())
        async with hub.following(dataset.id) as follower:
            found = await follower.after(last + 1)
        hub.close()
        return found

    assert asyncio.run(follow()) is None  # it waits, and does not ask again at once


# Documents in the lake


@pytest.mark.parametrize(
    "change",
    [lambda document: document | {"version": 2}, lambda document: document | {"version": 2, "components": {"a": 1}}],
    ids=["as it was", "with other fields"],
)
def test_manifest_of_a_newer_version_is_refused_as_such_whatever_else_is_in_it(change: Callable[[dict], dict]):
    document = orjson.loads(build(Dataset(new_id(), DatasetName("test"))).to_json())

    with pytest.raises(
        ManifestInvalid, match=r"snapshots/1\.json: version: it is of version 2, which a newer"
    ) as refused:
        Snapshot.from_json("snapshots/1.json", orjson.dumps(change(document)))
    assert refused.value.problem(instance="").model_dump()["field"] == "version"


@ONE_DATABASE
def test_lake_of_a_newer_version_is_refused_with_what_to_do(store: Store):
    document = orjson.loads(store.get(Layout.lake)) | {"version": 2}
    store.put(Layout.lake, orjson.dumps(document))

    with pytest.raises(StartRefused, match=r"format version 2, and this release reads .* run the newer version"):
        open_lake(store)
