"""A flush: the files it writes, the counts it reports, the manifest it publishes."""

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import duckdb
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable, QueryBuilder
from sqlalchemy import select
from tarn.datasets.registry import Dataset
from tarn.db.tables import journal, journal_batches, tags
from tarn.errors import Locked
from tarn.lake.commit import TABLES, SnapshotPublisher
from tarn.lake.leases import Leases
from tarn.lake.table_schemas import PARTITIONED
from tarn.model.datasets.snapshot import Snapshot
from tarn.pipeline.jobs import flush_plan
from tarn.pipeline.jobs.flush import Flush
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.store import Store

from tests.in_process_api import InProcessApi
from tests.lake.manifests import dataset_of
from tests.pipeline.history import head, rows_of, stored
from tests.pipeline.kernels import DirectKernels

Flushing = Callable[[], list[Snapshot]]
PERSON = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"], "country": ["de"]}}


def post(api: InProcessApi, *entities: dict[str, Any], origin: str = "crawl", **parameters: str) -> dict[str, Any]:
    query = "&".join(f"{name}={value}" for name, value in {"origin": origin, **parameters}.items())
    response = api.admin.post(f"/v1/datasets/test/entities?{query}", list(entities))
    assert response.status_code == 200, response.text
    accepted: dict[str, Any] = response.json()
    return accepted


@pytest.mark.both_databases
@pytest.mark.contract("W1")
def test_flush_publishes_one_snapshot_and_none_without_rows(api: InProcessApi, flush: Flushing):
    empty = flush()
    post(api, PERSON)
    (first,) = flush()
    unchanged = flush()
    post(api, PERSON | {"id": "john"})
    (second,) = flush()

    assert (empty, unchanged) == ([], [])
    assert (first.seq, first.parent, first.rows.live) == (1, None, 3)
    assert (second.seq, second.parent, second.rows.live) == (2, first.id, 6)
    assert second.created > first.created


def test_flush_counts_new_statements_only(api: InProcessApi, flush: Flushing):
    post(api, PERSON)
    (first,) = flush()
    post(api, PERSON)
    (unchanged,) = flush()
    api.admin.delete("/v1/datasets/test/entities/jane")
    (deleted,) = flush()
    post(api, PERSON)
    (revived,) = flush()

    counts = [
        (each.rows.added, each.rows.seen, each.rows.deleted, each.rows.ended, each.rows.live)
        for each in (first, unchanged, deleted, revived)
    ]
    assert counts == [(3, 0, 0, 0, 3), (0, 3, 0, 0, 3), (0, 0, 1, 3, 0), (3, 0, 0, 0, 3)]


@pytest.mark.contract("M4", "M6", "M7")
def test_manifest_lists_files_of_both_tables_with_the_writers_statistics(
    api: InProcessApi, dataset: Dataset, flush: Flushing
):
    moments = {"first_seen": "2020-01-01T00:00:00Z", "last_seen": "2021-01-01T00:00:00Z"}
    post(api, PERSON | moments, PERSON | {"id": "j" * 200})
    (first,) = flush()
    post(api, PERSON | {"id": "zoe"}, origin="mapping:abc")
    (second,) = flush()

    (file,) = [file for file in second.statements.files if file.partition == {"origin": "mapping:abc"}]
    assert second.statements.added == (file.path,)
    assert second.statements.removed == ()
    assert second.statements.files[0] == first.statements.files[0]
    assert file.path.startswith("origin=mapping%3Aabc/")
    root = api.services.store.connection.folder
    assert root is not None
    path = root / dataset.layout.statements / file.path
    assert (file.size, file.rows) == (path.stat().st_size, 3)
    assert (file.columns["entity_id"].min, file.columns["entity_id"].max) == ("zoe", "zoe")
    assert file.columns["entity_id"].nulls == 0
    assert "value" not in file.columns
    bounds = first.statements.files[0].columns["entity_id"]
    assert (bounds.min, bounds.max[:64], bounds.truncated) == ("jane", "j" * 64, True)
    assert first.first_seen == datetime(2020, 1, 1, tzinfo=UTC)
    assert first.last_seen is not None
    assert first.last_seen > datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.contract("M6")
def test_moments_long_ago_are_unchanged_in_the_manifest(api: InProcessApi, flush: Flushing):
    post(api, PERSON | {"first_seen": "0001-01-01T00:00:00Z", "last_seen": "0900-01-01T00:00:00Z"})

    (snapshot,) = flush()

    assert (snapshot.first_seen, snapshot.last_seen) == (datetime(1, 1, 1, tzinfo=UTC), datetime(900, 1, 1, tzinfo=UTC))
    assert snapshot.statements.files[0].columns["first_seen"].min == "0001-01-01T00:00:00.000000Z"


@pytest.mark.contract("M5")
def test_manifest_lists_its_batches(api: InProcessApi, flush: Flushing):
    commit = post(api, PERSON)["commit"]
    stage = api.admin.post("/v1/datasets/test/stages", {"origin": "bulk", "message": "July", "metadata": {"n": 1}})
    url = f"/v1/datasets/test/stages/{stage.json()['id']}"
    api.admin.post(f"{url}/entities", [PERSON | {"id": "john"}])
    staged = api.admin.post(f"{url}/commit").json()["commit"]

    (snapshot,) = flush()

    batches = [(batch.tenant, batch.commit, batch.message, batch.metadata, batch.rows) for batch in snapshot.batches]
    assert batches == [("admin", commit, None, {}, 3), ("admin", staged, "July", {"n": 1}, 3)]


@pytest.mark.contract("M9", "M12", "W5")
def test_files_have_checksums_if_the_dataset_is_configured_so(
    api: InProcessApi, dataset: Dataset, kernels: DirectKernels, flush: Flushing
):
    api.dataset("summed", checksum="sha256")
    services = api.services
    summed = dataset_of(services.database, "summed")
    api.admin.post("/v1/datasets/summed/entities", [PERSON])
    post(api, PERSON)
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    done = Flush(services.database, services.store, publisher, lambda: kernels).run([summed, dataset], lambda: None)

    (with_sums,), (without,) = done[summed.id].snapshots, done[dataset.id].snapshots
    (file,) = with_sums.statements.files
    data = services.store.get(f"{summed.layout.statements}/{file.path}")
    assert (with_sums.components.checksum, file.checksum) == ("sha256", hashlib.sha256(data).hexdigest())
    assert without.components.checksum is None
    assert "checksum" not in services.store.get(dataset.layout.snapshot(1)).decode()
    assert with_sums.components.order == ("bucket", "canonical_id", "id")


def test_rows_are_sorted_by_the_sort_key_and_ids_are_bytes(api: InProcessApi, dataset: Dataset, flush: Flushing):
    people = [PERSON | {"id": f"p{number * 7919 % 100:02d}"} for number in range(100)]
    documents = [{"id": "a", "schema": "Document", "properties": {"fileName": ["x"]}}]
    post(api, *people, *documents)

    (snapshot,) = flush()

    for table in TABLES:
        rows = rows_of(api.services.store, dataset, snapshot, table)
        keys = [(row["bucket"], row["canonical_id"], row["id"]) for row in rows]
        assert keys == sorted(keys)
        assert {len(row["id"]) for row in rows} == {20}
        assert {row["bucket"] for row in rows} == {"document", "thing"}


def test_statement_with_a_changed_key_is_found_by_either_key(api: InProcessApi, dataset: Dataset, flush: Flushing):
    row = {"entity_id": "jane", "schema": "Person", "prop": "name", "value": "Jane"}
    for canonical in ("jane", "Q1"):
        body = [row | {"canonical_id": canonical}]
        headers = {"Content-Type": "application/x-ndjson"}
        lines = "\n".join(str(each).replace("'", '"') for each in body)
        response = api.admin.post("/v1/datasets/test/statements?origin=crawl", content=lines, headers=headers)
        assert response.status_code == 200, response.text
        flush()

    snapshot = head(api, dataset)
    rows = rows_of(api.services.store, dataset, snapshot, "statements")
    marks = [row for row in rows_of(api.services.store, dataset, snapshot, "translog") if row["kind"] == "delete"]
    live = stored(api.services.store, dataset, snapshot)
    assert sorted(row["canonical_id"] for row in rows) == ["Q1", "jane"]
    assert [(mark["canonical_id"], mark["ord"]) for mark in marks] == [("jane", max(row["ord"] for row in rows))]
    assert [each["canonical_id"] for each in live.values()] == ["Q1"]
    assert snapshot.rows.live == 1


def test_tables_open_in_other_readers_with_the_same_rows(api: InProcessApi, dataset: Dataset, flush: Flushing):
    post(api, PERSON)
    flush()
    post(api, PERSON, PERSON | {"id": "john"}, origin="mapping:abc")
    (snapshot,) = flush()
    store = api.services.store

    for table in TABLES:
        partition = PARTITIONED[table]
        folder = dataset.layout.statements if table == "statements" else dataset.layout.translog
        opened = DeltaTable(store.connection.table_uri(folder), version=snapshot.table(table).version)
        by_delta = opened.to_pyarrow_table()
        by_arrow = ds.dataset(
            [f"{store.connection.folder}/{folder}/{file.path}" for file in snapshot.table(table).files]
        ).to_table()
        by_datafusion = (
            QueryBuilder().register("t", opened).execute(f"SELECT count(*) AS n, min({partition}) AS p FROM t")
        )
        paths = [f"{store.connection.folder}/{folder}/{file.path}" for file in snapshot.table(table).files]
        by_duckdb = duckdb.connect().execute("SELECT id FROM read_parquet(?)", [paths]).fetchall()
        rows = rows_of(store, dataset, snapshot, table)
        assert by_delta.num_rows == by_arrow.num_rows == len(rows)
        assert sorted(identity for (identity,) in by_duckdb) == sorted(row["id"] for row in rows)
        assert by_datafusion.read_all()["n"][0].as_py() == len(rows)
        assert Counter(by_delta[partition].to_pylist()) == Counter(row[partition] for row in rows)
        assert sorted(by_delta["id"].to_pylist()) == sorted(row["id"] for row in rows)
        assert opened.protocol().min_reader_version == 1
        assert opened.protocol().min_writer_version == 2
        assert str(by_delta.schema.field("first_seen").type) == "timestamp[us, tz=UTC]"
        assert pc.min(by_delta["ord"]).as_py() > 0


@pytest.mark.both_databases
def test_flushed_rows_are_deleted_from_the_journal_and_tags_are_updated(
    api: InProcessApi, dataset: Dataset, flush: Flushing
):
    post(api, PERSON)
    flush()
    first = tags_of(api)
    api.admin.delete("/v1/datasets/test/entities/nobody")
    flush()
    second = tags_of(api)

    with api.services.database.read() as connection:
        assert connection.execute(select(journal)).all() == []
        assert connection.execute(select(journal_batches)).all() == []
    assert first["journal/last_flushed"] > first["journal/last_updated"]
    assert second["journal/last_flushed"] > first["journal/last_flushed"]
    assert second["statements/last_updated"] == first["statements/last_updated"]
    assert api.services.store.head(f"{dataset.layout.tags}/lakehouse/journal/last_flushed") is not None


def tags_of(api: InProcessApi) -> dict[str, datetime]:
    with api.services.database.read() as connection:
        return {row.key: row.at for row in connection.execute(select(tags))}


@pytest.mark.contract("X1", "X3")
def test_commit_makes_a_fixed_number_of_storage_calls_and_lists_nothing(
    api: InProcessApi, dataset: Dataset, kernels: DirectKernels, store: Store
):
    services = api.services
    counted = FaultyStore(store)
    publisher = SnapshotPublisher(services.database, counted, services.settings, "tester")
    flushing = Flush(services.database, counted, publisher, lambda: kernels)
    costs = []
    for round_, size in enumerate((1, 1, 40, 1)):
        post(api, *(PERSON | {"id": f"e{round_}-{number}"} for number in range(size)))
        counted.calls.clear()
        flushing.run([dataset], lambda: None)
        costs.append(Counter(call.method for call in counted.calls))

    assert costs[1] == costs[2] == costs[3]
    assert not any("list" in cost or "folders" in cost for cost in costs)
    assert costs[1]["put_new"] == 1


def test_lease_that_is_released_soon_is_waited_for(
    api: InProcessApi, dataset: Dataset, flush: Flushing, monkeypatch: pytest.MonkeyPatch
):
    others = Leases(api.services.database, api.services.store, "another", seconds=60)
    lease = others.take(dataset)
    monkeypatch.setattr("tarn.lake.commit.time.sleep", lambda _: others.release(lease))
    post(api, PERSON)

    (snapshot,) = flush()

    assert snapshot.rows.added == 3


def test_wait_for_a_lease_that_is_not_released_is_short(
    api: InProcessApi, dataset: Dataset, kernels: DirectKernels, monkeypatch: pytest.MonkeyPatch
):
    services = api.services
    Leases(services.database, services.store, "another", seconds=60).take(dataset)
    pauses: list[float] = []
    monkeypatch.setattr("tarn.lake.commit.time.sleep", pauses.append)
    post(api, PERSON)
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")

    done = Flush(services.database, services.store, publisher, lambda: kernels).run([dataset], lambda: None)

    assert isinstance(done[dataset.id].error, Locked)
    assert len(pauses) > 1
    assert sum(pauses) < 1


@pytest.mark.both_databases
@pytest.mark.parametrize(("bound", "least"), [("TASK_ROWS", 20), ("TASK_CHARACTERS", 200)])
def test_segment_divided_among_tasks_has_the_same_rows(
    api: InProcessApi, dataset: Dataset, flush: Flushing, monkeypatch: pytest.MonkeyPatch, bound: str, least: int
):
    monkeypatch.setattr(flush_plan, bound, least)
    for round_ in range(2):
        post(api, *(PERSON | {"id": f"e{number}"} for number in range(50)), origin=f"o{round_}")
        flush()
    api.admin.delete("/v1/datasets/test/origins/o0")
    post(api, *(PERSON | {"id": f"e{number}"} for number in range(50)), origin="o2")
    (snapshot,) = flush()

    live = stored(api.services.store, dataset, snapshot)
    assert (snapshot.rows.ended, snapshot.rows.deleted, snapshot.rows.live) == (150, 1, 300)
    assert Counter(row["origin"] for row in live.values()) == {"o1": 150, "o2": 150}
    assert len([path for path in snapshot.translog.added if path.startswith("kind=delete")]) > 3


def test_files_are_split_at_the_target_size_of_the_dataset(api: InProcessApi, kernels: DirectKernels):
    api.dataset("small", target_file_bytes=1 << 20)
    services = api.services
    small = dataset_of(services.database, "small")
    draw = random.Random(0)
    for number in range(3):
        texts = [
            {
                "id": f"d{number}-{each}",
                "schema": "Document",
                "properties": {"bodyText": [draw.randbytes(400_000).hex()]},
            }
            for each in range(9)
        ]
        assert api.admin.post("/v1/datasets/small/entities", texts).status_code == 200
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")

    done = Flush(services.database, services.store, publisher, lambda: kernels).run([small], lambda: None)

    (snapshot,) = done[small.id].snapshots
    sizes = [file.size for file in snapshot.statements.files]
    assert snapshot.rows.live == sum(file.rows for file in snapshot.statements.files) == 54
    assert len(sizes) > 1
    assert max(sizes) < 12 << 20
