"""Datasets on a store that fails, and under a connection that dies."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml
from sqlalchemy import Connection, select, text
from tarn.datasets import registry as datasets
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import datasets as table
from tarn.errors import Unavailable
from tarn.model.dataset import DatasetConfig
from tarn.model.ids import parse_stamp
from tarn.model.job import Progress
from tarn.model.names import DatasetName, FileName
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.layout import DatasetLayout
from tarn.storage.store import Store

from tests.in_process_api import InProcessApi
from tests.worker.workers import make_worker

FOO = DatasetLayout(DatasetName("foo"))
PATH = "/v1/datasets/foo"


@pytest.fixture
def store(store: Store) -> FaultyStore:
    return FaultyStore(store)


def titles(house: InProcessApi, store: Store) -> tuple[str, str]:
    """What `config.yml` and `index.json` say."""
    return yaml.safe_load(store.get(FOO.config))["title"], yaml.safe_load(store.get(FOO.index))["title"]


# A store that fails


@pytest.mark.parametrize("failing", [FOO.index, FOO.config])
@pytest.mark.parametrize("after", [False, True])
def test_change_that_failed_on_the_store_can_be_made_again(
    house: InProcessApi, store: FaultyStore, failing: str, after: bool
):
    house.dataset("foo", title="A")
    tag = house.admin.get(PATH).headers["ETag"]
    store.fail("put", failing, Unavailable("down"), after=after)

    failed = house.admin.patch(PATH, {"title": "B"}, headers={"If-Match": tag})
    between = house.admin.get(PATH).json()["title"]
    again = house.admin.patch(PATH, {"title": "B"}, headers={"If-Match": house.admin.get(PATH).headers["ETag"]})

    assert (failed.status_code, again.status_code) == (503, 200)
    assert between == ("B" if failing == FOO.config and after else "A")
    assert titles(house, store) == ("B", "B")


def test_change_whose_config_was_not_written_holds_under_the_same_tag(house: InProcessApi, store: FaultyStore):
    tag = house.admin.post("/v1/datasets", {"name": "foo", "title": "A"}).headers["ETag"]
    store.fail("put", FOO.index, Unavailable("down"))
    store.fail("put", FOO.config, Unavailable("down"))

    statuses = [house.admin.patch(PATH, {"title": "B"}, headers={"If-Match": tag}).status_code for _ in range(3)]

    changes = [entry for entry in house.admin.get("/v1/admin/audit").json()["results"] if "changed" in entry["detail"]]
    assert statuses == [503, 503, 200]
    assert titles(house, store) == ("B", "B")
    assert len(changes) == 1


def test_dataset_whose_config_was_not_written_is_not_there(house: InProcessApi, store: FaultyStore):
    store.fail("put", FOO.config, Unavailable("down"))

    failed = house.admin.post("/v1/datasets", {"name": "foo", "title": "A"})
    again = house.admin.post("/v1/datasets", {"name": "foo", "title": "B"})

    assert (failed.status_code, again.status_code) == (503, 201)
    assert [call.path for call in store.calls if call.method == "put" and call.path.startswith("foo/")] == [
        FOO.index,
        FOO.config,
    ] * 2


# Documents of another dataset


def test_document_of_another_dataset_is_not_shown_and_the_next_change_heals_it(house: InProcessApi, store: FaultyStore):
    stranger = DatasetConfig.model_validate(
        {"name": "foo", "id": "another", "created": datetime(2020, 1, 1, tzinfo=UTC), "title": "Theirs", "summary": "x"}
    )
    created = house.dataset("foo", title="Ours")
    store.put(FOO.config, stranger.to_yaml())

    shown = house.admin.get(PATH)
    listed = house.admin.get("/v1/datasets").json()["results"]
    healed = house.admin.patch(PATH, {"title": "Ours again"})

    assert (shown.status_code, shown.json()["type"]) == (500, "/problems/document-invalid")
    assert listed == []
    assert healed.json() == created | {"title": "Ours again"}
    assert house.admin.get(PATH).json() == healed.json()
    assert titles(house, store) == ("Ours again", "Ours again")
    assert store.get(_version(house, "config.yml")) == stranger.to_yaml()


def _version(house: InProcessApi, name: str) -> str:
    [found] = [version for version in house.admin.get(f"{PATH}/versions").json()["results"] if version["name"] == name]
    return FOO.versions.at(parse_stamp(found["timestamp"]), FileName(name))


@contextmanager
def beside(act: Callable[[], Any]) -> Iterator[list[Any]]:
    """Do it beside what the block does; its result is there after the block."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(act()))
    thread.start()
    yield results
    thread.join()


def kill_transactions(database: Database) -> None:
    """What a failover does to connections that are in the middle of something."""
    with database.write() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'"
            )
        )


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("name", ["config.yml", "index.json"])
def test_change_whose_connection_died_is_noticed_before_the_put(
    house: InProcessApi, store: FaultyStore, database: Database, name: str
):
    house.dataset("foo", title="A")
    gate = store.block("put_new", f"foo/versions/*/{name}")
    with beside(lambda: house.admin.patch(PATH, {"title": "B"})) as answers:
        gate.wait_arrived()
        kill_transactions(database)
        gate.release()

    assert [answer.status_code for answer in answers] == [503]
    assert yaml.safe_load(store.get(f"foo/{name}"))["title"] == "A"


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_change_of_the_catalog_whose_connection_died_is_noticed_before_the_put(
    house: InProcessApi, store: FaultyStore, database: Database
):
    house.admin.patch("/v1/catalog", {"title": "A"})
    gate = store.block("put_new", "versions/*")
    with beside(lambda: house.admin.patch("/v1/catalog", {"title": "B"})) as answers:
        gate.wait_arrived()
        kill_transactions(database)
        gate.release()

    assert [answer.status_code for answer in answers] == [503]
    assert house.admin.get("/v1/catalog").json()["title"] == "A"


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_put_that_outlives_its_dataset_is_found_out_and_healed(
    house: InProcessApi, store: FaultyStore, database: Database
):
    house.dataset("foo", title="Former")
    gate = store.block("put", FOO.config)
    with beside(lambda: house.admin.patch(PATH, {"title": "Former, changed"})) as answers:
        gate.wait_arrived()
        kill_transactions(database)
        house.admin.delete(f"{PATH}?confirm=foo")
        make_worker(house).step()
        created = house.dataset("foo", title="New")
        gate.release()
    shown = house.admin.get(PATH)
    healed = house.admin.patch(PATH, {"title": "New"})

    assert [answer.status_code for answer in answers] == [503]
    assert (shown.status_code, shown.json()["type"]) == (500, "/problems/document-invalid")
    assert (healed.status_code, healed.json()) == (200, created)


# Deleting


@pytest.fixture
def deleting(house: InProcessApi, database: Database) -> Dataset:
    """A dataset that is to be deleted, by who calls `datasets.delete`."""
    created = house.dataset("foo")
    house.admin.delete(f"{PATH}?confirm=foo")
    return Dataset(created["id"], DatasetName("foo"))


def state(database: Database, dataset: Dataset) -> str | None:
    with database.read() as connection:
        return connection.execute(select(table.c.state).where(table.c.id == dataset.id)).scalar()


def held(_: Connection, __: Progress | None) -> None:
    """Nobody else has the job."""


def test_job_is_asked_for_before_the_first_file_goes(store: FaultyStore, database: Database, deleting: Dataset):
    asked: list[int] = []

    def lost_at_the_second(_: Connection, __: Progress | None) -> None:
        asked.append(1)
        if len(asked) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        datasets.delete(database, store, deleting, lost_at_the_second, None)

    assert [entry.path for entry in store.list("foo")] == [FOO.config, FOO.index]
    assert state(database, deleting) == "deleting"


def test_name_is_freed_only_by_who_has_the_job(store: FaultyStore, database: Database, deleting: Dataset):
    def lost_when_all_is_gone(_: Connection, progress: Progress | None) -> None:
        if progress is not None and progress.done == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        datasets.delete(database, store, deleting, lost_when_all_is_gone, None)

    assert state(database, deleting) == "deleting"


def test_file_that_is_younger_than_the_mark_is_left_and_the_name_with_it(
    store: FaultyStore, database: Database, deleting: Dataset
):
    store.put("foo/young", b"")
    assert store.connection.folder is not None
    os.utime(store.connection.folder / "foo/young", (4e9, 4e9))

    with pytest.raises(Unavailable, match="younger"):
        datasets.delete(database, store, deleting, held, None)

    assert [entry.path for entry in store.list("foo")] == ["foo/young"]
    assert state(database, deleting) == "deleting"
