"""Scheduled maintenance: the worker enqueues maintenance of datasets, and claims jobs of tenants round-robin."""

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
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.ids import now
from tarn.model.work.job import Operation
from tarn.worker.flusher import SparkFlusher
from tarn.worker.loop import Worker
from tarn.worker.maintenance_schedule import MANY_FILES, PAST, MaintenanceSchedule

from tests.in_process_api import InProcessApi
from tests.pipeline.history import head, stored
from tests.pipeline.kernels import DirectKernels

ENTITIES = "/v1/datasets/test/exports/entities.ftm.json"

Flushing = Callable[[], list[Snapshot]]


@pytest.fixture
def schedule(api: InProcessApi) -> MaintenanceSchedule:
    return MaintenanceSchedule(api.services.database, api.services.store)


@pytest.fixture
def maintainer(api: InProcessApi, kernels: DirectKernels) -> Worker:
    """Return a worker that runs maintenance without Spark."""
    services = api.services
    flusher = SparkFlusher(services.settings, services.database, services.store, "tester", kernels=lambda: kernels)
    return Worker(services.settings, services.database, services.store, flusher, flusher.maintenance())


def write(api: InProcessApi, name: str, count: int = 1, dataset: str = "test") -> None:
    people = [
        {"id": f"{name}-{number}", "schema": "Person", "properties": {"name": [f"{name} {number}"]}}
        for number in range(count)
    ]
    assert api.admin.post(f"/v1/datasets/{dataset}/entities?origin=crawl", people).status_code == 200


def enqueued_jobs(api: InProcessApi) -> list[tuple[str, str]]:
    with api.services.database.read() as connection:
        rows = connection.execute(select(jobs_table.c.operation, jobs_table.c.tenant).order_by(jobs_table.c.id))
        return [(row.operation, row.tenant) for row in rows]


def test_dataset_with_many_small_files_is_optimized_once(
    api: InProcessApi, dataset: Dataset, flush: Flushing, schedule: MaintenanceSchedule, maintainer: Worker
):
    for number in range(MANY_FILES):
        assert schedule.enqueue_due() == 0
        write(api, f"p{number}")
        flush()
    live = stored(api.services.store, dataset, head(api, dataset))

    enqueued = [schedule.enqueue_due(), schedule.enqueue_due()]
    maintainer.step()

    after = head(api, dataset)
    assert (enqueued, enqueued_jobs(api)) == ([1, 0], [("optimize", "lakehouse")])
    assert (after.operation, len(after.statements.files), len(after.translog.files)) == ("optimize", 1, 1)
    assert stored(api.services.store, dataset, after).keys() == live.keys()
    assert schedule.enqueue_due() == 0


def test_dataset_with_a_large_share_of_unsorted_rows_is_compacted(
    api: InProcessApi,
    dataset: Dataset,
    flush: Flushing,
    schedule: MaintenanceSchedule,
    maintainer: Worker,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("tarn.worker.maintenance_schedule.MIN_UNMERGED_ROWS", 100)
    write(api, "many", 200)
    flush()
    inserts = schedule.enqueue_due()
    maintainer.step()
    settled = head(api, dataset)
    write(api, "many", 40)
    flush()
    before = schedule.enqueue_due()
    write(api, "many", 100)
    flush()

    enqueued = schedule.enqueue_due()
    maintainer.step()

    after = head(api, dataset)
    assert (inserts, settled.translog.files, len(settled.statements.files)) == (1, (), 1)
    assert (before, enqueued, enqueued_jobs(api)) == (0, 1, [("compact", "lakehouse")] * 2)
    assert after.translog.files == ()
    assert (after.operation, after.rows.live) == ("compact", 400)


def test_snapshots_past_retention_are_expired(
    api: InProcessApi, dataset: Dataset, flush: Flushing, schedule: MaintenanceSchedule, maintainer: Worker
):
    policy = {"policy": {"retention": {"count": 2, "days": 1}}}
    assert api.admin.patch("/v1/datasets/test", policy).status_code == 200
    for number in range(PAST + 1):
        write(api, f"p{number}")
        flush()
    before = schedule.enqueue_due()
    with api.services.database.write() as connection:
        connection.execute(update(history).values(created=now() - timedelta(days=2)))
    write(api, "last")
    flush()

    enqueued = schedule.enqueue_due()
    maintainer.step()

    assert (before, enqueued, enqueued_jobs(api)) == (0, 1, [("vacuum", "lakehouse")])
    with api.services.database.read() as connection:
        remaining = connection.execute(select(history.c.seq).where(history.c.expired.is_(None))).scalars().all()
    assert len(remaining) == 2


def test_exports_are_scheduled_by_the_policy(
    api: InProcessApi, dataset: Dataset, flush: Flushing, schedule: MaintenanceSchedule, maintainer: Worker
):
    def set_export_policy(policy: object) -> None:
        assert api.admin.patch("/v1/datasets/test", {"policy": {"exports": policy}}).status_code == 200

    write(api, "a")
    flush()
    off = schedule.enqueue_due()
    set_export_policy("after_flush")
    write(api, "b")
    flush()
    after_flush = schedule.enqueue_due(), schedule.enqueue_due()
    maintainer.step()
    done = schedule.enqueue_due()
    set_export_policy(60)
    write(api, "c")
    flush()
    too_soon = schedule.enqueue_due()
    with api.services.database.write() as connection:
        connection.execute(update(exports).values(made=now() - timedelta(minutes=61)))
    later = schedule.enqueue_due()
    maintainer.step()

    assert (off, after_flush, done, too_soon, later) == (0, (1, 0), 0, 0, 1)
    assert enqueued_jobs(api) == [("make", "lakehouse")] * 2
    names = [line["id"] for line in map(json.loads, api.admin.get(ENTITIES).content.splitlines())]
    assert names == ["a-0", "b-0", "c-0"]


def put_file(api: InProcessApi, path: str, content: bytes) -> str:
    response = api.admin.put(f"/v1/datasets/test/files?path={path}", content=content)
    assert response.status_code == 201
    return str(response.headers["Location"])


def test_contents_of_deleted_files_are_vacuumed_without_a_snapshot(
    api: InProcessApi, dataset: Dataset, schedule: MaintenanceSchedule, maintainer: Worker
):
    put_file(api, "kept.txt", b"kept")
    deleted = put_file(api, "deleted.txt", b"deleted")
    before = schedule.enqueue_due()
    assert api.admin.delete(deleted).status_code == 204
    later = MaintenanceSchedule(api.services.database, api.services.store)

    enqueued = later.enqueue_due(), later.enqueue_due()
    age_archive(api, dataset)
    maintainer.step()

    assert (before, enqueued, enqueued_jobs(api)) == (0, (1, 0), [("vacuum", "lakehouse")])
    blobs = [entry.path for entry in api.services.store.list(dataset.layout.archive) if entry.path.endswith("/data")]
    assert len(blobs) == 1
    assert MaintenanceSchedule(api.services.database, api.services.store).enqueue_due() == 0


def test_expired_uploads_are_vacuumed_without_a_snapshot(
    api: InProcessApi, dataset: Dataset, schedule: MaintenanceSchedule, maintainer: Worker
):
    new = {"length": 10, "path": "a.txt"}
    url = api.admin.post("/v1/datasets/test/uploads", new).headers["Location"]
    assert api.admin.put(f"{url}?offset=0", content=b"12345").status_code == 200
    before = schedule.enqueue_due()
    with api.services.database.write() as connection:
        connection.execute(update(uploads).values(expires=now() - timedelta(seconds=1)))
    later = MaintenanceSchedule(api.services.database, api.services.store)

    enqueued = later.enqueue_due()
    age_archive(api, dataset)
    maintainer.step()

    assert (before, enqueued, enqueued_jobs(api)) == (0, 1, [("vacuum", "lakehouse")])
    assert list(api.services.store.list(dataset.layout.uploads)) == []
    assert api.admin.get(url).status_code == 404
    assert MaintenanceSchedule(api.services.database, api.services.store).enqueue_due() == 0


def age_archive(api: InProcessApi, dataset: Dataset) -> None:
    """Set the modification times of all files in the archive to three days ago."""
    for folder in (dataset.layout.archive, dataset.layout.uploads):
        for path in (Path(api.services.settings.lake_uri) / folder).rglob("*"):
            os.utime(path, (time.time() - 3 * 86_400,) * 2)


def test_dataset_with_maintenance_disabled_is_not_maintained(
    api: InProcessApi, dataset: Dataset, flush: Flushing, schedule: MaintenanceSchedule
):
    assert api.admin.patch("/v1/datasets/test", {"policy": {"maintain": False}}).status_code == 200
    for number in range(MANY_FILES):
        write(api, f"p{number}")
        flush()

    assert (schedule.enqueue_due(), enqueued_jobs(api)) == (0, [])


def test_job_of_the_tenant_served_least_recently_is_claimed_next(api: InProcessApi, dataset: Dataset):
    database = api.services.database
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


def test_job_finished_long_ago_is_deleted(api: InProcessApi, dataset: Dataset):
    database = api.services.database
    with database.write() as connection:
        old, waiting = (jobs.enqueue(connection, Operation.VERIFY, dataset.id, "alice", "r") for _ in range(2))
        jobs.cancel(connection, old.id)

        jobs.delete_finished(connection, now() - timedelta(days=1))
        found_jobs = [jobs.find(connection, job.id) for job in (old, waiting)]
        jobs.delete_finished(connection, now() + timedelta(days=1))
        remaining = [jobs.find(connection, job.id) for job in (old, waiting)]

    assert None not in found_jobs
    assert [job is None for job in remaining] == [True, False]


def test_worker_status_is_visible_only_to_the_administrator(
    api: InProcessApi, dataset: Dataset, flush: Flushing, schedule: MaintenanceSchedule, maintainer: Worker
):
    for number in range(MANY_FILES):
        write(api, f"p{number}")
        flush()
    schedule.enqueue_due()
    maintainer.step()
    write(api, "waiting", 2)

    status = api.admin.get("/v1/admin/worker").json()
    metrics = api.admin.get("/metrics").text

    assert [(each["dataset"], each["rows"]) for each in status["journal"]] == [("test", 4)]
    assert [(each["operation"], each["state"], each["jobs"]) for each in status["jobs"]] == [("optimize", "done", 1)]
    assert status["running"] == []
    assert 'tarn_jobs{operation="optimize",state="done"} 1.0' in metrics
    assert "tarn_journal_rows 4.0" in metrics
    assert api.tenant("alice", test="admin").get("/v1/admin/worker").status_code == 403
