"""Deleting a dataset: everything of it, and nothing of the next one of its name (docs/decisions/007)."""

import pytest
from sqlalchemy import Table, select, update
from tarn.db.tables import datasets, journal, journal_batches, journal_head, journal_packs, tags
from tarn.db.tables import jobs as jobs_table
from tarn.journal import batch_contents as contents
from tarn.journal import dataset_removal as removal
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.store import Store

from tests.in_process_api import InProcessApi
from tests.journal.packing import pack_rows
from tests.worker.workers import fall_silent, let_time_pass, make_worker, stepping

FILES = ["foo/config.yml", "foo/index.json"]


@pytest.fixture
def store(store: Store) -> FaultyStore:
    return FaultyStore(store)


def paths(store: Store) -> list[str]:
    return [entry.path for entry in store.list("foo")]


def create(house: InProcessApi) -> int:
    return house.admin.post("/v1/datasets", {"name": "foo"}).status_code


def begin_delete(house: InProcessApi) -> str:
    house.dataset("foo")
    job: str = house.admin.delete("/v1/datasets/foo?confirm=foo").json()["id"]
    return job


def state(house: InProcessApi, job: str) -> str:
    return str(house.admin.get(f"/v1/jobs/{job}").json()["state"])


def test_name_stays_taken_until_the_request_of_a_forgotten_worker_must_have_died(
    house: InProcessApi, store: FaultyStore
):
    job = begin_delete(house)
    gate = store.block("delete", "foo/*")
    with stepping(make_worker(house)):
        gate.wait_arrived()
        fall_silent(house)
        make_worker(house).step()
        early = state(house, job), paths(store), create(house)
        gate.release()

    let_time_pass(house)
    make_worker(house).step()

    assert early == ("queued", [], 409)
    assert state(house, job) == "done"
    assert (create(house), paths(store)) == (201, FILES)


@pytest.mark.parametrize("method", ["list", "delete"])
def test_forgotten_worker_finds_out_before_it_deletes_the_next_dataset(
    house: InProcessApi, store: FaultyStore, method: str
):
    for number in range(1500):
        store.put(f"foo/entities/{number:05d}", b"")
    job = begin_delete(house)
    gate = store.block(method, "foo*", after=method == "delete")
    with stepping(make_worker(house)):
        gate.wait_arrived()
        fall_silent(house)
        make_worker(house).step()
        let_time_pass(house)
        make_worker(house).step()
        created = create(house)
        gate.release()

    assert (created, state(house, job), paths(store)) == (201, "done", FILES)


def test_job_that_freed_the_name_and_could_not_say_so_leaves_the_next_dataset_alone(
    house: InProcessApi, store: FaultyStore
):
    job = begin_delete(house)
    make_worker(house).step()
    create(house)
    with house.services.database.write() as connection:
        connection.execute(update(jobs_table).values(state="running", finished=None))
    fall_silent(house)

    make_worker(house).step()

    assert (state(house, job), paths(store)) == ("done", FILES)
    assert house.admin.get("/v1/datasets/foo").status_code == 200


def test_what_a_late_writer_puts_goes_too(house: InProcessApi, store: FaultyStore):
    job = begin_delete(house)
    gate = store.block("delete", "foo/*")
    with stepping(make_worker(house)):
        gate.wait_arrived()
        store.put("foo/archive/late", b"")
        gate.release()

    assert (state(house, job), paths(store)) == ("done", [])


@pytest.mark.parametrize("table", [journal, journal_packs], ids=["rows", "packs"])
@pytest.mark.parametrize("most", [5000, 1])
def test_journal_of_the_dataset_goes_and_others_stay(house: InProcessApi, monkeypatch, most: int, table: Table):
    monkeypatch.setattr(removal, "PURGE_ROWS", most)
    monkeypatch.setattr(contents, "PURGE_ROWS", most)
    monkeypatch.setattr(contents, "PURGE_PACKED", most)
    entity = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane"]}}
    used = []
    for name in ("foo", "bar"):
        house.dataset(name)
        house.admin.post(f"/v1/datasets/{name}/entities?origin=crawl", entity)
        used.append(_used(house))
        stage = house.admin.post(f"/v1/datasets/{name}/stages", {"origin": "bulk"}).json()["id"]
        house.admin.post(f"/v1/datasets/{name}/stages/{stage}/entities", entity)
    if table is journal_packs:
        pack_rows(house.services.database)
    before = _used(house)
    bar = house.admin.get("/v1/datasets/bar").json()["id"]
    house.admin.delete("/v1/datasets/foo?confirm=foo")

    make_worker(house).step()

    with house.services.database.read() as connection:
        left = {table.name: connection.execute(select(table.c.dataset_id)).scalars().all() for table in TABLES}
        mine = set(connection.execute(select(journal_batches.c.id)).scalars())
        rows = set(connection.execute(select(table.c.batch)).scalars())
        states = sorted(connection.execute(select(datasets.c.state)).scalars())
    assert left == {"journal_batches": [bar] * 3, "journal_head": [bar], "tags": [bar]}
    assert rows
    assert rows <= mine
    assert states == ["active", "deleted"]
    assert before - _used(house) == used[0]


TABLES = (journal_batches, journal_head, tags)


def _used(house: InProcessApi) -> int:
    return int(house.admin.get("/v1/admin/tenants/admin/limits").json()["used_statements"])
