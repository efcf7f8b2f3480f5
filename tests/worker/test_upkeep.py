"""Upkeep: datasets are kept in shape by the worker itself, and each gets its turn."""

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select, update
from tarn.datasets.registry import Dataset
from tarn.db import jobs
from tarn.db.tables import exports, uploads
from tarn.db.tables import jobs as jobs_table
from tarn.db.tables import snapshots as history
from tarn.model.ids import now
from tarn.model.job import Operation
from tarn.model.snapshot import Snapshot
from tarn.worker.flusher import SparkFlusher
from tarn.worker.loop import Worker
from tarn.worker.maintenance_schedule import MANY_FILES, PAST, MaintenanceSchedule

from tests.in_process_api import InProcessApi
from tests.pipeline.history import head, stored
from tests.pipeline.kernels import DirectKernels

ENTITIES = "/v1/datasets/test/exports/entities.ftm.json"

Flushing = Callable[[], list[Snapshot]]


@pytest.fixture
def upkeep(house: InProcessApi) -> MaintenanceSchedule:
    return MaintenanceSchedule(house.services.database, house.services.store)


@pytest.fixture
def maintainer(house: InProcessApi, kernels: DirectKernels) -> Worker:
    """A worker that maintains without Spark."""
    services = house.services
    flusher = SparkFlusher(services.settings, services.database, services.store, "tester", kernels=lambda: kernels)
    return Worker(services.settings, services.database, services.store, flusher, flusher.maintenance())


def write(house: InProcessApi, name: str, count: int = 1, dataset: str = "test") -> None:
    people = [
        {"id": f"{name}-{number}", "schema": "Person", "properties": {"name": [f"{name} {number}"]}}
        for number in range(count)
    ]
    assert house.admin.post(f"/v1/datasets/{dataset}/entities?origin=crawl", people).status_code == 200


def enqueued_jobs(house: InProcessApi) -> list[tuple[str, str]]:
    with house.services.database.read() as connection:
        rows = connection.execute(select(jobs_table.c.operation, jobs_table.c.tenant).order_by(jobs_table.c.id))
        return [(row.operation, row.tenant) for row in rows]


def test_dataset_with_many_small_files_is_packed_once_and_then_left_alone(
    house: InProcessApi, dataset: Dataset, flush: Flushing, upkeep: MaintenanceSchedule, maintainer: Worker
):
    for number in range(MANY_FILES):
        assert upkeep.ask() == 0
        write(house, f"p{number}")
        flush()
    live = stored(house.services.store, dataset, head(house, dataset))

    made = [upkeep.ask(), upkeep.ask()]
    maintainer.step()

    after = head(house, dataset)
    assert (made, enqueued_jobs(house)) == ([1, 0], [("optimize", "lakehouse")])
    assert (after.operation, len(after.statements.files), len(after.translog.files)) == ("optimize", 1, 1)
    assert stored(house.services.store, dataset, after).keys() == live.keys()
    assert upkeep.ask() == 0


def test_dataset_of_which_a_good_part_is_loose_is_compacted(
    house: InProcessApi,
    dataset: Dataset,
    flush: Flushing,
    upkeep: MaintenanceSchedule,
    maintainer: Worker,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("tarn.worker.maintenance_schedule.WORTH_A_JOB", 100)
    write(house, "many", 200)
    flush()
    inserts = upkeep.ask()
    maintainer.step()
    settled = head(house, dataset)
    write(house, "many", 40)
    flush()
    before = upkeep.ask()
    write(house, "many", 100)
    flush()

    made = upkeep.ask()
    maintainer.step()

    after = head(house, dataset)
    assert (inserts, settled.translog.files, len(settled.statements.files)) == (1, (), 1)
    assert (before, made, enqueued_jobs(house)) == (0, 1, [("compact", "lakehouse")] * 2)
    assert after.translog.files == ()
    assert (after.operation, after.rows.live) == ("compact", 400)


def test_history_that_is_past_its_time_is_given_up(
    house: InProcessApi, dataset: Dataset, flush: Flushing, upkeep: MaintenanceSchedule, maintainer: Worker
):
    policy = {"policy": {"retention": {"count": 2, "days": 1}}}
    assert house.admin.patch("/v1/datasets/test", policy).status_code == 200
    for number in range(PAST + 1):
        write(house, f"p{number}")
        flush()
    before = upkeep.ask()
    with house.services.database.write() as connection:
        connection.execute(update(history).values(created=now() - timedelta(days=2)))
    write(house, "last")
    flush()

    made = upkeep.ask()
    maintainer.step()

    assert (before, made, enqueued_jobs(house)) == (0, 1, [("vacuum", "lakehouse")])
    with house.services.database.read() as connection:
        kept = connection.execute(select(history.c.seq).where(history.c.expired.is_(None))).scalars().all()
    assert len(kept) == 2


def test_exports_are_made_unasked_as_the_policy_says(
    house: InProcessApi, dataset: Dataset, flush: Flushing, upkeep: MaintenanceSchedule, maintainer: Worker
):
    def follow(policy: object) -> None:
        assert house.admin.patch("/v1/datasets/test", {"policy": {"exports": policy}}).status_code == 200

    write(house, "a")
    flush()
    off = upkeep.ask()
    follow("after_flush")
    write(house, "b")
    flush()
    after_flush = upkeep.ask(), upkeep.ask()
    maintainer.step()
    done = upkeep.ask()
    follow(60)
    write(house, "c")
    flush()
    too_soon = upkeep.ask()
    with house.services.database.write() as connection:
        connection.execute(update(exports).values(made=now() - timedelta(minutes=61)))
    later = upkeep.ask()
    maintainer.step()

    assert (off, after_flush, done, too_soon, later) == (0, (1, 0), 0, 0, 1)
    assert enqueued_jobs(house) == [("make", "lakehouse")] * 2
    names = [line["id"] for line in map(json.loads, house.admin.get(ENTITIES).content.splitlines())]
    assert names == ["a-0", "b-0", "c-0"]


def put_file(house: InProcessApi, path: str, content: bytes) -> str:
    answer = house.admin.put(f"/v1/datasets/test/files?path={path}", content=content)
    assert answer.status_code == 201
    return str(answer.headers["Location"])


def test_contents_of_files_that_were_deleted_are_collected_though_there_is_no_snapshot(
    house: InProcessApi, dataset: Dataset, upkeep: MaintenanceSchedule, maintainer: Worker
):
    put_file(house, "kept.txt", b"kept")
    deleted = put_file(house, "deleted.txt", b"deleted")
    before = upkeep.ask()
    assert house.admin.delete(deleted).status_code == 204
    later = MaintenanceSchedule(house.services.database, house.services.store)

    made = later.ask(), later.ask()
    age_archive(house, dataset)
    maintainer.step()

    assert (before, made, enqueued_jobs(house)) == (0, (1, 0), [("vacuum", "lakehouse")])
    blobs = [entry.path for entry in house.services.store.list(dataset.layout.archive) if entry.path.endswith("/data")]
    assert len(blobs) == 1
    assert MaintenanceSchedule(house.services.database, house.services.store).ask() == 0


def test_uploads_that_were_given_up_are_collected_though_there_is_no_snapshot(
    house: InProcessApi, dataset: Dataset, upkeep: MaintenanceSchedule, maintainer: Worker
):
    new = {"length": 10, "path": "a.txt"}
    place = house.admin.post("/v1/datasets/test/uploads", new).headers["Location"]
    assert house.admin.put(f"{place}?offset=0", content=b"12345").status_code == 200
    before = upkeep.ask()
    with house.services.database.write() as connection:
        connection.execute(update(uploads).values(expires=now() - timedelta(seconds=1)))
    later = MaintenanceSchedule(house.services.database, house.services.store)

    made = later.ask()
    age_archive(house, dataset)
    maintainer.step()

    assert (before, made, enqueued_jobs(house)) == (0, 1, [("vacuum", "lakehouse")])
    assert list(house.services.store.list(dataset.layout.uploads)) == []
    assert house.admin.get(place).status_code == 404
    assert MaintenanceSchedule(house.services.database, house.services.store).ask() == 0


def age_archive(house: InProcessApi, dataset: Dataset) -> None:
    """Let all that is in the archive have been written days ago."""
    for folder in (dataset.layout.archive, dataset.layout.uploads):
        for path in (Path(house.services.settings.lake_uri) / folder).rglob("*"):
            os.utime(path, (time.time() - 3 * 86_400,) * 2)


def test_dataset_that_is_not_to_be_maintained_is_not(
    house: InProcessApi, dataset: Dataset, flush: Flushing, upkeep: MaintenanceSchedule
):
    assert house.admin.patch("/v1/datasets/test", {"policy": {"maintain": False}}).status_code == 200
    for number in range(MANY_FILES):
        write(house, f"p{number}")
        flush()

    assert (upkeep.ask(), enqueued_jobs(house)) == (0, [])


def test_tenant_that_was_served_longest_ago_is_next(house: InProcessApi, dataset: Dataset):
    database = house.services.database
    with database.write() as connection:
        for tenant in ("alice", "alice", "alice", "bob", "carol"):
            jobs.enqueue(connection, Operation.VERIFY, dataset.id, tenant, "r")

    served = []
    while True:
        with database.write() as connection:
            job = jobs.claim(connection, "w", 30, among=[Operation.VERIFY])
            if job is None:
                break
            jobs.cancel(connection, job.id)
            jobs.requeue(connection, job.id, "w")
        served.append(job.tenant)

    assert served == ["alice", "bob", "carol", "alice", "alice"]


def test_job_that_has_been_over_for_long_is_forgotten(house: InProcessApi, dataset: Dataset):
    database = house.services.database
    with database.write() as connection:
        old, waiting = (jobs.enqueue(connection, Operation.VERIFY, dataset.id, "alice", "r") for _ in range(2))
        jobs.cancel(connection, old.id)

        jobs.delete_finished(connection, now() - timedelta(days=1))
        kept = [jobs.find(connection, job.id) for job in (old, waiting)]
        jobs.delete_finished(connection, now() + timedelta(days=1))
        left = [jobs.find(connection, job.id) for job in (old, waiting)]

    assert None not in kept
    assert [job is None for job in left] == [True, False]


def test_work_is_shown_to_the_lakes_administrator_alone(
    house: InProcessApi, dataset: Dataset, flush: Flushing, upkeep: MaintenanceSchedule, maintainer: Worker
):
    for number in range(MANY_FILES):
        write(house, f"p{number}")
        flush()
    upkeep.ask()
    maintainer.step()
    write(house, "waiting", 2)

    shown = house.admin.get("/v1/admin/worker").json()
    metrics = house.admin.get("/metrics").text

    assert [(each["dataset"], each["rows"]) for each in shown["journal"]] == [("test", 4)]
    assert [(each["operation"], each["state"], each["jobs"]) for each in shown["jobs"]] == [("optimize", "done", 1)]
    assert shown["running"] == []
    assert 'tarn_jobs{operation="optimize",state="done"} 1.0' in metrics
    assert "tarn_journal_rows 4.0" in metrics
    assert house.tenant("alice", test="admin").get("/v1/admin/worker").status_code == 403
