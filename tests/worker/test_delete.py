"""Deletion of a dataset: it removes everything of the dataset, and nothing of the next one with its name
(docs/decisions/007).
"""

import pytest
from sqlalchemy import Table, select, update
from tarn.db.tables import datasets, journal, journal_batches, journal_head, journal_packs, tags
from tarn.db.tables import jobs as jobs_table
from tarn.journal import batch_contents, dataset_removal
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.store import Store

from tests.in_process_api import InProcessApi
from tests.journal.convert_to_packs import pack_rows
from tests.worker.workers import expire_heartbeats, make_retries_due, make_worker, stepping

pytestmark = pytest.mark.both_databases

FILES = ["foo/config.yml", "foo/index.json"]


@pytest.fixture
def store(store: Store) -> FaultyStore:
    return FaultyStore(store)


def paths(store: Store) -> list[str]:
    return [entry.path for entry in store.list("foo")]


def create(api: InProcessApi) -> int:
    return api.admin.post("/v1/datasets", {"name": "foo"}).status_code


def begin_delete(api: InProcessApi) -> str:
    api.dataset("foo")
    job: str = api.admin.delete("/v1/datasets/foo?confirm=foo").json()["id"]
    return job


def state(api: InProcessApi, job: str) -> str:
    return str(api.admin.get(f"/v1/jobs/{job}").json()["state"])


def test_name_stays_taken_until_requests_of_a_presumed_dead_worker_must_have_ended(
    api: InProcessApi, store: FaultyStore
):
    job = begin_delete(api)
    gate = store.block("delete", "foo/*")
    with stepping(make_worker(api)):
        gate.wait_arrived()
        expire_heartbeats(api)
        make_worker(api).step()
        early = state(api, job), paths(store), create(api)
        gate.release()

    make_retries_due(api)
    make_worker(api).step()

    assert early == ("queued", [], 409)
    assert state(api, job) == "done"
    assert (create(api), paths(store)) == (201, FILES)


@pytest.mark.parametrize("method", ["list", "delete"])
def test_presumed_dead_worker_does_not_delete_files_of_the_next_dataset(
    api: InProcessApi, store: FaultyStore, method: str
):
    for number in range(1500):
        store.put(f"foo/entities/{number:05d}", b"")
    job = begin_delete(api)
    gate = store.block(method, "foo*", after=method == "delete")
    with stepping(make_worker(api)):
        gate.wait_arrived()
        expire_heartbeats(api)
        make_worker(api).step()
        make_retries_due(api)
        make_worker(api).step()
        created = create(api)
        gate.release()

    assert (created, state(api, job), paths(store)) == (201, "done", FILES)


def test_delete_job_that_freed_the_name_but_was_not_recorded_does_not_affect_the_next_dataset(
    api: InProcessApi, store: FaultyStore
):
    job = begin_delete(api)
    make_worker(api).step()
    create(api)
    with api.services.database.write() as connection:
        connection.execute(update(jobs_table).values(state="running", finished=None))
    expire_heartbeats(api)

    make_worker(api).step()

    assert (state(api, job), paths(store)) == ("done", FILES)
    assert api.admin.get("/v1/datasets/foo").status_code == 200


def test_files_of_a_late_writer_are_deleted_too(api: InProcessApi, store: FaultyStore):
    job = begin_delete(api)
    gate = store.block("delete", "foo/*")
    with stepping(make_worker(api)):
        gate.wait_arrived()
        store.put("foo/archive/late", b"")
        gate.release()

    assert (state(api, job), paths(store)) == ("done", [])


@pytest.mark.parametrize("table", [journal, journal_packs], ids=["rows", "packs"])
@pytest.mark.parametrize("limit", [5000, 1])
def test_journal_of_the_dataset_is_deleted_and_others_are_kept(
    api: InProcessApi, monkeypatch, limit: int, table: Table
):
    monkeypatch.setattr(dataset_removal, "PURGE_ROWS", limit)
    monkeypatch.setattr(batch_contents, "PURGE_ROWS", limit)
    monkeypatch.setattr(batch_contents, "PURGE_PACKED", limit)
    entity = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane"]}}
    used_statements = []
    for name in ("foo", "bar"):
        api.dataset(name)
        api.admin.post(f"/v1/datasets/{name}/entities?origin=crawl", entity)
        used_statements.append(_used(api))
        stage = api.admin.post(f"/v1/datasets/{name}/stages", {"origin": "bulk"}).json()["id"]
        api.admin.post(f"/v1/datasets/{name}/stages/{stage}/entities", entity)
    if table is journal_packs:
        pack_rows(api.services.database)
    before = _used(api)
    bar = api.admin.get("/v1/datasets/bar").json()["id"]
    api.admin.delete("/v1/datasets/foo?confirm=foo")

    make_worker(api).step()

    with api.services.database.read() as connection:
        dataset_ids = {table.name: connection.execute(select(table.c.dataset_id)).scalars().all() for table in TABLES}
        batch_ids = set(connection.execute(select(journal_batches.c.id)).scalars())
        rows = set(connection.execute(select(table.c.batch)).scalars())
        states = sorted(connection.execute(select(datasets.c.state)).scalars())
    assert dataset_ids == {"journal_batches": [bar] * 3, "journal_head": [bar], "tags": [bar]}
    assert rows
    assert rows <= batch_ids
    assert states == ["active", "deleted"]
    assert before - _used(api) == used_statements[0]


TABLES = (journal_batches, journal_head, tags)


def _used(api: InProcessApi) -> int:
    return int(api.admin.get("/v1/admin/tenants/admin/limits").json()["used_statements"])
