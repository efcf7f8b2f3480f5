"""Datasets on a failing store, and with connections that are lost."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml
from sqlalchemy import Connection, select, text
from tarn.datasets import registry
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import datasets as table
from tarn.errors import Unavailable
from tarn.model.datasets.dataset import DatasetConfig
from tarn.model.ids import parse_stamp
from tarn.model.names import DatasetName, FileName
from tarn.model.work.job import Progress
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.layout import DatasetLayout
from tarn.storage.store import Store

from tests.in_process_api import InProcessApi
from tests.worker.workers import make_worker

pytestmark = pytest.mark.both_databases

FOO = DatasetLayout(DatasetName("foo"))
PATH = "/v1/datasets/foo"


@pytest.fixture
def store(store: Store) -> FaultyStore:
    return FaultyStore(store)


def titles(api: InProcessApi, store: Store) -> tuple[str, str]:
    """Return the titles in `config.yml` and `index.json`."""
    return yaml.safe_load(store.get(FOO.config))["title"], yaml.safe_load(store.get(FOO.index))["title"]


# A store that fails


@pytest.mark.parametrize("failing", [FOO.index, FOO.config])
@pytest.mark.parametrize("after", [False, True])
def test_change_that_failed_on_the_store_can_be_repeated(
    api: InProcessApi, store: FaultyStore, failing: str, after: bool
):
    api.dataset("foo", title="A")
    tag = api.admin.get(PATH).headers["ETag"]
    store.fail("put", failing, Unavailable("down"), after=after)

    failed = api.admin.patch(PATH, {"title": "B"}, headers={"If-Match": tag})
    between = api.admin.get(PATH).json()["title"]
    again = api.admin.patch(PATH, {"title": "B"}, headers={"If-Match": api.admin.get(PATH).headers["ETag"]})

    assert (failed.status_code, again.status_code) == (503, 200)
    assert between == ("B" if failing == FOO.config and after else "A")
    assert titles(api, store) == ("B", "B")


def test_change_whose_config_was_not_written_can_be_repeated_with_the_same_entity_tag(
    api: InProcessApi, store: FaultyStore
):
    tag = api.admin.post("/v1/datasets", {"name": "foo", "title": "A"}).headers["ETag"]
    store.fail("put", FOO.index, Unavailable("down"))
    store.fail("put", FOO.config, Unavailable("down"))

    statuses = [api.admin.patch(PATH, {"title": "B"}, headers={"If-Match": tag}).status_code for _ in range(3)]

    changes = [entry for entry in api.admin.get("/v1/admin/audit").json()["results"] if "changed" in entry["detail"]]
    assert statuses == [503, 503, 200]
    assert titles(api, store) == ("B", "B")
    assert len(changes) == 1


def test_dataset_whose_config_was_not_written_does_not_exist(api: InProcessApi, store: FaultyStore):
    store.fail("put", FOO.config, Unavailable("down"))

    failed = api.admin.post("/v1/datasets", {"name": "foo", "title": "A"})
    again = api.admin.post("/v1/datasets", {"name": "foo", "title": "B"})

    assert (failed.status_code, again.status_code) == (503, 201)
    assert [call.path for call in store.calls if call.method == "put" and call.path.startswith("foo/")] == [
        FOO.index,
        FOO.config,
    ] * 2


# Documents of another dataset


def test_document_of_another_dataset_is_not_shown_and_repaired_by_the_next_change(
    api: InProcessApi, store: FaultyStore
):
    stranger = DatasetConfig.model_validate(
        {"name": "foo", "id": "another", "created": datetime(2020, 1, 1, tzinfo=UTC), "title": "Theirs", "summary": "x"}
    )
    created = api.dataset("foo", title="Ours")
    store.put(FOO.config, stranger.to_yaml())

    shown = api.admin.get(PATH)
    listed = api.admin.get("/v1/datasets").json()["results"]
    healed = api.admin.patch(PATH, {"title": "Ours again"})

    assert (shown.status_code, shown.json()["type"]) == (500, "/problems/document-invalid")
    assert listed == []
    assert healed.json() == created | {"title": "Ours again"}
    assert api.admin.get(PATH).json() == healed.json()
    assert titles(api, store) == ("Ours again", "Ours again")
    assert store.get(_version(api, "config.yml")) == stranger.to_yaml()


def _version(api: InProcessApi, name: str) -> str:
    [entry] = [version for version in api.admin.get(f"{PATH}/versions").json()["results"] if version["name"] == name]
    return FOO.versions.at(parse_stamp(entry["timestamp"]), FileName(name))


@contextmanager
def in_background(act: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run a function concurrently with the block; its result is available after the block."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(act()))
    thread.start()
    yield results
    thread.join()


def kill_transactions(database: Database) -> None:
    """Kill open transactions, as a failover does."""
    with database.write() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'"
            )
        )


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("name", ["config.yml", "index.json"])
def test_change_whose_connection_was_lost_is_detected_before_the_put(
    api: InProcessApi, store: FaultyStore, database: Database, name: str
):
    api.dataset("foo", title="A")
    gate = store.block("put_new", f"foo/versions/*/{name}")
    with in_background(lambda: api.admin.patch(PATH, {"title": "B"})) as answers:
        gate.wait_arrived()
        kill_transactions(database)
        gate.release()

    assert [answer.status_code for answer in answers] == [503]
    assert yaml.safe_load(store.get(f"foo/{name}"))["title"] == "A"


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_catalog_change_whose_connection_was_lost_is_detected_before_the_put(
    api: InProcessApi, store: FaultyStore, database: Database
):
    api.admin.patch("/v1/catalog", {"title": "A"})
    gate = store.block("put_new", "versions/*")
    with in_background(lambda: api.admin.patch("/v1/catalog", {"title": "B"})) as answers:
        gate.wait_arrived()
        kill_transactions(database)
        gate.release()

    assert [answer.status_code for answer in answers] == [503]
    assert api.admin.get("/v1/catalog").json()["title"] == "A"


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_put_that_finishes_after_the_deletion_of_its_dataset_is_detected_and_repaired(
    api: InProcessApi, store: FaultyStore, database: Database
):
    api.dataset("foo", title="Former")
    gate = store.block("put", FOO.config)
    with in_background(lambda: api.admin.patch(PATH, {"title": "Former, changed"})) as answers:
        gate.wait_arrived()
        kill_transactions(database)
        api.admin.delete(f"{PATH}?confirm=foo")
        make_worker(api).step()
        created = api.dataset("foo", title="New")
        gate.release()
    shown = api.admin.get(PATH)
    healed = api.admin.patch(PATH, {"title": "New"})

    assert [answer.status_code for answer in answers] == [503]
    assert (shown.status_code, shown.json()["type"]) == (500, "/problems/document-invalid")
    assert (healed.status_code, healed.json()) == (200, created)


# Deleting


@pytest.fixture
def deleting(api: InProcessApi, database: Database) -> Dataset:
    """Return a dataset whose deletion was requested, to be deleted by `registry.delete`."""
    created = api.dataset("foo")
    api.admin.delete(f"{PATH}?confirm=foo")
    return Dataset(created["id"], DatasetName("foo"))


def state(database: Database, dataset: Dataset) -> str | None:
    with database.read() as connection:
        return connection.execute(select(table.c.state).where(table.c.id == dataset.id)).scalar()


def always_held(_: Connection, __: Progress | None) -> None:
    """Pretend that this process holds the job."""


def test_job_is_checked_before_the_first_file_is_deleted(store: FaultyStore, database: Database, deleting: Dataset):
    calls: list[int] = []

    def lose_at_second_check(_: Connection, __: Progress | None) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        registry.delete(database, store, deleting, lose_at_second_check, None)

    assert [entry.path for entry in store.list("foo")] == [FOO.config, FOO.index]
    assert state(database, deleting) == "deleting"


def test_name_is_freed_only_by_the_holder_of_the_job(store: FaultyStore, database: Database, deleting: Dataset):
    def lose_after_the_last_file(_: Connection, progress: Progress | None) -> None:
        if progress is not None and progress.done == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        registry.delete(database, store, deleting, lose_after_the_last_file, None)

    assert state(database, deleting) == "deleting"


def test_file_newer_than_the_mark_is_kept_and_the_name_stays_taken(
    store: FaultyStore, database: Database, deleting: Dataset
):
    store.put("foo/young", b"")
    assert store.connection.folder is not None
    os.utime(store.connection.folder / "foo/young", (4e9, 4e9))

    with pytest.raises(Unavailable, match="have a modification time after the store"):
        registry.delete(database, store, deleting, always_held, None)

    assert [entry.path for entry in store.list("foo")] == ["foo/young"]
    assert state(database, deleting) == "deleting"
