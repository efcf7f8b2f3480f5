"""Compatibility of versions: databases ahead of the code, new data formats, jobs and events of a newer version."""

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta

import orjson
import pytest
from sqlalchemy import insert, select, text, update
from tarn.api.http.services.event_hub import Hub
from tarn.coordination.events import EventReader
from tarn.datasets.registry import Dataset
from tarn.db import jobs, migrate, outbox, reader_heartbeats
from tarn.db.engine import Database
from tarn.db.format_versions import ALIVE_AFTER_HEARTBEAT, FORMATS, DataFormat, is_read_by_all, may_write
from tarn.db.reader_heartbeats import ReaderHeartbeat
from tarn.db.tables import event_heads
from tarn.db.tables import events as events_table
from tarn.db.tables import jobs as jobs_table
from tarn.db.tables import readers as readers_table
from tarn.errors import ManifestInvalid, StartRefused
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.ids import new_id, now
from tarn.model.names import DatasetName
from tarn.model.work.job import JobState, Operation
from tarn.query.engine.active_reads import ActiveReadReporter, ActiveReads
from tarn.settings import Settings
from tarn.storage.lake_root import open_lake
from tarn.storage.layout import Layout
from tarn.storage.store import Store
from tarn.worker.flusher import SparkFlusher

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.lake.manifests import build
from tests.upgrade.next_version import REVISION, migrate_to_next_version
from tests.worker.workers import make_worker

pytestmark = pytest.mark.both_databases

JANE = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}

LATER = DataFormat("later", REVISION)
"""A data format that only the next version reads."""


# Databases ahead of the code


def test_processes_run_and_start_on_a_database_migrated_by_the_next_version(
    api: InProcessApi, database: Database, tmp_path
):
    api.dataset("test")
    migrate_to_next_version(database, tmp_path)

    assert api.admin.post("/v1/datasets/test/entities", [JANE]).status_code in (200, 201)
    assert api.admin.get("/v1/datasets/test/entities/jane").status_code == 200
    migrate.require_current(database)
    with ActiveReadReporter(database, ActiveReads(), 1000):
        pass
    migrate.upgrade(database)
    with database.read() as connection:
        assert migrate.revision(connection) == REVISION


def test_process_neither_starts_on_nor_migrates_an_incompatible_database(database: Database, tmp_path):
    migrate_to_next_version(database, tmp_path, oldest=REVISION)

    for start in (migrate.require_current, lambda each: ActiveReadReporter(each, ActiveReads(), 1000).__enter__()):
        with pytest.raises(
            StartRefused, match=rf"revision {REVISION} \(it supports versions from {REVISION}"
        ) as refused:
            start(database)
        assert "run the newer version" in str(refused.value)
    with pytest.raises(StartRefused, match="cannot be migrated by this version"):
        migrate.upgrade(database)
    with database.read() as connection:
        assert reader_heartbeats.latest(connection) == {}


def test_migration_that_cannot_lock_its_table_gives_up_with_an_error(postgresql_only: Database, monkeypatch):
    """A read locks a table that the migration changes; a migration that waited would block all later requests."""
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
    """Return the database, or skip the test on SQLite."""
    if database.is_sqlite:
        pytest.skip("SQLite has one writer at a time")
    return database


# Data formats


def test_new_format_is_written_once_all_running_processes_read_it_and_others_can_then_not_start(
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
    with pytest.raises(StartRefused, match=f"supports versions from {REVISION} on"):
        migrate.require_current(database)


def test_new_format_waits_for_live_processes_that_cannot_read_it_and_not_for_dead_ones(database: Database):
    data_format = DataFormat("known", migrate.head())
    with database.write() as connection:
        reader_heartbeats.beat(connection, "old", ReaderHeartbeat(1, {}))
        reader_heartbeats.beat(connection, "new", ReaderHeartbeat(1, {}))
        connection.execute(update(readers_table).values(speaks=None).where(readers_table.c.id == "old"))
        connection.execute(update(readers_table).values(speaks=["known"]).where(readers_table.c.id == "new"))
        assert not is_read_by_all(connection, data_format)
        silent = now() - ALIVE_AFTER_HEARTBEAT - timedelta(seconds=1)
        connection.execute(update(readers_table).values(seen=silent).where(readers_table.c.id == "old"))
        assert is_read_by_all(connection, data_format)


def test_every_process_reports_the_formats_that_it_reads(api: InProcessApi, database: Database):
    with database.read() as connection:
        reported = connection.execute(select(readers_table.c.speaks)).scalars().all()
    assert reported == [[data_format.name for data_format in FORMATS]]


def test_process_that_starts_while_a_format_is_enabled_waits_and_is_refused(postgresql_only: Database, tmp_path):
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
        assert reader_heartbeats.latest(connection) == {}


# Jobs and events of a newer version


@pytest.fixture
def future_job(api: InProcessApi, dataset: Dataset) -> str:
    """Enqueue a job of an unknown operation, abandoned and cancelled long ago, which workers must skip."""
    with api.services.database.write() as connection:
        job = jobs.enqueue(connection, Operation.COMPACT, dataset.id, "admin", "request")
        abandoned = {
            "state": JobState.RUNNING,
            "heartbeat": now() - timedelta(days=1),
            "cancelled": now(),
            "attempts": 100,
        }
        connection.execute(
            update(jobs_table).where(jobs_table.c.id == job.id).values(operation="from_later", **abandoned)
        )
    return job.id


def test_job_of_an_unknown_operation_is_skipped_and_does_not_block_others(
    api: InProcessApi, dataset: Dataset, future_job: str
):
    database, admin = api.services.database, api.admin
    api.dataset("gone")
    deletion = admin.delete("/v1/datasets/gone?confirm=gone").json()["id"]

    assert make_worker(api).step()

    assert admin.get(f"/v1/jobs/{deletion}").json()["state"] == "done"
    assert future_job not in {job["id"] for job in admin.get("/v1/jobs").json()["results"]}
    response = admin.get(f"/v1/jobs/{future_job}")
    assert (response.status_code, response.json()["type"]) == (503, "/problems/unavailable")
    assert "newer version" in response.json()["detail"]
    assert admin.get("/v1/admin/worker").status_code == 200
    assert admin.get("/metrics").status_code == 200
    with database.read() as connection:
        row = connection.execute(select(jobs_table).where(jobs_table.c.id == future_job)).one()
    assert (row.state, row.attempts, row.operation) == ("running", 100, "from_later")


@ONE_DATABASE
def test_job_with_an_unknown_option_is_queued_again_for_a_newer_worker(api: InProcessApi, dataset: Dataset):
    services = api.services
    with services.database.write() as connection:
        job = jobs.enqueue(connection, Operation.COMPACT, dataset.id, "admin", "request", {"from_later": True})
    flusher = SparkFlusher(services.settings, services.database, services.store, owner=new_id())

    assert make_worker(api, maintainer=flusher.maintenance()).step()

    with services.database.read() as connection:
        stored = jobs.get(connection, job.id)
    assert stored.state is JobState.QUEUED
    assert stored.not_before is not None
    assert stored.problem is not None
    assert "'from_later'" in str(stored.problem.detail)


def test_events_are_read_only_up_to_the_first_of_an_unknown_kind(
    settings: Settings, database: Database, api: InProcessApi, dataset: Dataset
):
    with database.write() as connection:
        last = connection.execute(select(event_heads.c.last).where(event_heads.c.stream == dataset.id)).scalar_one()
        row = {"stream": dataset.id, "at": now(), "data": {}}
        kinds = enumerate(("job.done", "from.later", "job.done"), last + 1)
        connection.execute(insert(events_table), [row | {"number": number, "kind": kind} for number, kind in kinds])
        connection.execute(update(event_heads).where(event_heads.c.stream == dataset.id).values(last=last + 3))

    with database.read() as connection:
        page = outbox.after(connection, dataset.id, last, 100)
        blocked = outbox.after(connection, dataset.id, last + 1, 100)
    assert ([event.number for event in page.events], page.through, page.last) == ([last + 1], last + 1, last + 3)
    assert (blocked.events, blocked.through) == ([], last + 1)

    async def follow() -> object:
        hub = Hub(settings, EventReader(database), database.notifications, threading.Event())
        async with hub.following(dataset.id) as follower:
            events = await follower.after(last + 1)
        hub.close()
        return events

    assert asyncio.run(follow()) is None  # it waits instead of polling


# Documents in the lake


@pytest.mark.parametrize(
    "change",
    [lambda document: document | {"version": 2}, lambda document: document | {"version": 2, "components": {"a": 1}}],
    ids=["same-fields", "other-fields"],
)
def test_manifest_of_a_newer_version_is_refused_whatever_its_other_fields(change: Callable[[dict], dict]):
    document = orjson.loads(build(Dataset(new_id(), DatasetName("test"))).to_json())

    with pytest.raises(
        ManifestInvalid, match=r"snapshots/1\.json: version: it has version 2, written by a newer"
    ) as refused:
        Snapshot.from_json("snapshots/1.json", orjson.dumps(change(document)))
    assert refused.value.problem(instance="").model_dump()["field"] == "version"


@ONE_DATABASE
def test_lake_of_a_newer_version_is_refused_with_the_required_action(store: Store):
    document = orjson.loads(store.get(Layout.lake)) | {"version": 2}
    store.put(Layout.lake, orjson.dumps(document))

    with pytest.raises(StartRefused, match=r"format version 2, and this release reads .* run the newer version"):
        open_lake(store)
