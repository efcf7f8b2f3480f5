"""Delta tables: the version of a restore, and durability."""

from typing import Any

import pytest
from deltalake import DeltaTable
from tarn.datasets.registry import Dataset
from tarn.lake import delta_tables as delta
from tarn.lake.delta_tables import NONE, DeltaStore
from tarn.model.datasets.snapshot import File
from tarn.model.ids import new_id
from tarn.model.names import DatasetName
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.store import Store


@pytest.fixture
def dataset() -> Dataset:
    return Dataset(new_id(), DatasetName("test"))


def file(store: Store, dataset: Dataset) -> File:
    path = f"origin=crawl/{new_id()}.parquet"
    store.put_new(f"{dataset.layout.statements}/{path}", b"PAR1")
    return File(path=path, size=4, partition={"origin": "crawl"}, rows=1)


def test_restore_is_the_version_after_the_current_one_despite_a_concurrent_commit(
    store: Store, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
):
    tables = DeltaStore(store)
    pinned = tables.commit(dataset, "statements", NONE, [file(store, dataset)], (), {})
    ahead = tables.commit(dataset, "statements", pinned, [file(store, dataset)], (), {})
    restore = DeltaTable.restore

    def overtaken(self: DeltaTable, target: int, **options: Any) -> None:
        restore(self, target, **options)
        tables.commit(dataset, "statements", ahead + 1, [file(store, dataset)], (), {})
        self.update_incremental()

    monkeypatch.setattr(DeltaTable, "restore", overtaken)

    assert tables.restore(dataset, "statements", pinned, {}) == ahead + 1
    assert tables.is_ahead(dataset, "statements", ahead + 1)


@pytest.mark.parametrize("files", [0, 1])
def test_table_that_no_head_pins_is_emptied(store: Store, dataset: Dataset, files: int):
    tables = DeltaStore(store)
    tables.commit(dataset, "statements", NONE, [file(store, dataset) for _ in range(files)], (), {})

    version = tables.restore(dataset, "statements", NONE, {})

    opened = DeltaTable(store.connection.table_uri(dataset.layout.statements))
    assert (version, opened.version(), opened.file_uris()) == (files, files, [])


def test_checkpoint_is_durable_with_the_version_that_writes_it(
    store: Store, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(delta, "CHECKPOINT_EVERY", 3)
    monkeypatch.setitem(delta.CONFIGURATION, "delta.checkpointInterval", "3")
    watched = FaultyStore(store)
    tables, version = DeltaStore(watched), NONE
    for _ in range(5):
        version = tables.commit(dataset, "statements", version, [file(store, dataset)], (), {})
        tables.sync(dataset, {"statements": version})

    log = {entry.path for entry in store.list(f"{dataset.layout.statements}/_delta_log")}
    assert {*dataset.layout.delta_checkpoint(dataset.layout.statements, 2)} < log
    assert log <= {call.path for call in watched.calls if call.method == "sync"}
