"""A flush: what it writes, what it counts, what its manifest says."""

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
from tarn.model.snapshot import Snapshot
from tarn.pipeline.jobs import flush_plan as plan
from tarn.pipeline.jobs.flush import Flush
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.store import Store

from tests.in_process_api import InProcessApi
from tests.lake.manifests import dataset_of
from tests.pipeline.history import head, rows_of, stored
from tests.pipeline.kernels import DirectKernels

Flushing = Callable[[], list[Snapshot]]
PERSON = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"], "country": ["de"]}}


def post(house: InProcessApi, *entities: dict[str, Any], origin: str = "crawl", **parameters: str) -> dict[str, Any]:
    query = "&".join(f"{name}={value}" for name, value in {"origin": origin, **parameters}.items())
    answer = house.admin.post(f"/v1/datasets/test/entities?{query}", list(entities))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.contract("W1")
def test_flush_makes_one_snapshot_on_the_head_and_none_without_rows(house: InProcessApi, flush: Flushing):
    empty = flush()
    post(house, PERSON)
    (first,) = flush()
    again = flush()
    post(house, PERSON | {"id": "john"})
    (second,) = flush()

    assert (empty, again) == ([], [])
    assert (first.seq, first.parent, first.rows.live) == (1, None, 3)
    assert (second.seq, second.parent, second.rows.live) == (2, first.id, 6)
    assert second.created > first.created


def test_flush_counts_new_statements_only(house: InProcessApi, flush: Flushing):
    post(house, PERSON)
    (first,) = flush()
    post(house, PERSON)
    (again,) = flush()
    house.admin.delete("/v1/datasets/test/entities/jane")
    (deleted,) = flush()
    post(house, PERSON)
    (revived,) = flush()

    counts = [
        (each.rows.added, each.rows.seen, each.rows.deleted, each.rows.ended, each.rows.live)
        for each in (first, again, deleted, revived)
    ]
    assert counts == [(3, 0, 0, 0, 3), (0, 3, 0, 0, 3), (0, 0, 1, 3, 0), (3, 0, 0, 0, 3)]


@pytest.mark.contract("M4", "M6", "M7")
def test_manifest_lists_both_tables_files_with_what_their_writer_saw(
    house: InProcessApi, dataset: Dataset, flush: Flushing
):
    seen = {"first_seen": "2020-01-01T00:00:00Z", "last_seen": "2021-01-01T00:00:00Z"}
    post(house, PERSON | seen, PERSON | {"id": "j" * 200})
    (first,) = flush()
    post(house, PERSON | {"id": "zoe"}, origin="mapping:abc")
    (second,) = flush()

    (file,) = [file for file in second.statements.files if file.partition == {"origin": "mapping:abc"}]
    assert second.statements.added == (file.path,)
    assert second.statements.removed == ()
    assert second.statements.files[0] == first.statements.files[0]
    assert file.path.startswith("origin=mapping%3Aabc/")
    root = house.services.store.connection.folder
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
def test_moments_long_ago_are_in_the_manifest_as_they_are(house: InProcessApi, flush: Flushing):
    post(house, PERSON | {"first_seen": "0001-01-01T00:00:00Z", "last_seen": "0900-01-01T00:00:00Z"})

    (snapshot,) = flush()

    assert (snapshot.first_seen, snapshot.last_seen) == (datetime(1, 1, 1, tzinfo=UTC), datetime(900, 1, 1, tzinfo=UTC))
    assert snapshot.statements.files[0].columns["first_seen"].min == "0001-01-01T00:00:00.000000Z"


@pytest.mark.contract("M5")
def test_manifest_lists_the_batches_it_holds(house: InProcessApi, flush: Flushing):
    commit = post(house, PERSON)["commit"]
    stage = house.admin.post("/v1/datasets/test/stages", {"origin": "bulk", "message": "July", "metadata": {"n": 1}})
    url = f"/v1/datasets/test/stages/{stage.json()['id']}"
    house.admin.post(f"{url}/entities", [PERSON | {"id": "john"}])
    staged = house.admin.post(f"{url}/commit").json()["commit"]

    (snapshot,) = flush()

    held = [(batch.tenant, batch.commit, batch.message, batch.metadata, batch.rows) for batch in snapshot.batches]
    assert held == [("admin", commit, None, {}, 3), ("admin", staged, "July", {"n": 1}, 3)]


@pytest.mark.contract("M9", "M12", "W5")
def test_checksums_are_there_where_the_dataset_asks_for_them(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels, flush: Flushing
):
    house.dataset("summed", checksum="sha256")
    services = house.services
    summed = dataset_of(services.database, "summed")
    house.admin.post("/v1/datasets/summed/entities", [PERSON])
    post(house, PERSON)
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    done = Flush(services.database, services.store, publisher, lambda: kernels).run([summed, dataset], lambda: None)

    (with_sums,), (without,) = done[summed.id].snapshots, done[dataset.id].snapshots
    (file,) = with_sums.statements.files
    data = services.store.get(f"{summed.layout.statements}/{file.path}")
    assert (with_sums.components.checksum, file.checksum) == ("sha256", hashlib.sha256(data).hexdigest())
    assert without.components.checksum is None
    assert "checksum" not in services.store.get(dataset.layout.snapshot(1)).decode()
    assert with_sums.components.order == ("bucket", "canonical_id", "id")


def test_rows_are_sorted_by_the_stores_key_and_ids_are_bytes(house: InProcessApi, dataset: Dataset, flush: Flushing):
    many = [PERSON | {"id": f"p{number * 7919 % 100:02d}"} for number in range(100)]
    documents = [{"id": "a", "schema": "Document", "properties": {"fileName": ["x"]}}]
    post(house, *many, *documents)

    (snapshot,) = flush()

    for table in TABLES:
        rows = rows_of(house.services.store, dataset, snapshot, table)
        keys = [(row["bucket"], row["canonical_id"], row["id"]) for row in rows]
        assert keys == sorted(keys)
        assert {len(row["id"]) for row in rows} == {20}
        assert {row["bucket"] for row in rows} == {"document", "thing"}


def test_statement_that_changes_its_key_is_seen_from_either_side(
    house: InProcessApi, dataset: Dataset, flush: Flushing
):
    row = {"entity_id": "jane", "schema": "Person", "prop": "name", "value": "Jane"}
    for canonical in ("jane", "Q1"):
        body = [row | {"canonical_id": canonical}]
        headers = {"Content-Type": "application/x-ndjson"}
        lines = "\n".join(str(each).replace("'", '"') for each in body)
        answer = house.admin.post("/v1/datasets/test/statements?origin=crawl", content=lines, headers=headers)
        assert answer.status_code == 200, answer.text
        flush()

    snapshot = head(house, dataset)
    rows = rows_of(house.services.store, dataset, snapshot, "statements")
    marks = [row for row in rows_of(house.services.store, dataset, snapshot, "translog") if row["kind"] == "delete"]
    live = stored(house.services.store, dataset, snapshot)
    assert sorted(row["canonical_id"] for row in rows) == ["Q1", "jane"]
    assert [(mark["canonical_id"], mark["ord"]) for mark in marks] == [("jane", max(row["ord"] for row in rows))]
    assert [each["canonical_id"] for each in live.values()] == ["Q1"]
    assert snapshot.rows.live == 1


def test_tables_open_with_other_readers_and_hold_the_same_rows(house: InProcessApi, dataset: Dataset, flush: Flushing):
    post(house, PERSON)
    flush()
    post(house, PERSON, PERSON | {"id": "john"}, origin="mapping:abc")
    (snapshot,) = flush()
    store = house.services.store

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


def test_flushed_rows_leave_the_journal_and_tags_say_so(house: InProcessApi, dataset: Dataset, flush: Flushing):
    post(house, PERSON)
    flush()
    first = tags_of(house)
    house.admin.delete("/v1/datasets/test/entities/nobody")
    flush()
    second = tags_of(house)

    with house.services.database.read() as connection:
        assert connection.execute(select(journal)).all() == []
        assert connection.execute(select(journal_batches)).all() == []
    assert first["journal/last_flushed"] > first["journal/last_updated"]
    assert second["journal/last_flushed"] > first["journal/last_flushed"]
    assert second["statements/last_updated"] == first["statements/last_updated"]
    assert house.services.store.head(f"{dataset.layout.tags}/lakehouse/journal/last_flushed") is not None


def tags_of(house: InProcessApi) -> dict[str, datetime]:
    with house.services.database.read() as connection:
        return {row.key: row.at for row in connection.execute(select(tags))}


@pytest.mark.contract("X1", "X3")
def test_commit_costs_a_fixed_number_of_storage_calls_and_lists_nothing(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels, store: Store
):
    services = house.services
    counted = FaultyStore(store)
    publisher = SnapshotPublisher(services.database, counted, services.settings, "tester")
    flushing = Flush(services.database, counted, publisher, lambda: kernels)
    costs = []
    for round_, size in enumerate((1, 1, 40, 1)):
        post(house, *(PERSON | {"id": f"e{round_}-{number}"} for number in range(size)))
        counted.calls.clear()
        flushing.run([dataset], lambda: None)
        costs.append(Counter(call.method for call in counted.calls))

    assert costs[1] == costs[2] == costs[3]
    assert not any("list" in cost or "folders" in cost for cost in costs)
    assert costs[1]["put_new"] == 1


def test_lease_that_is_given_back_soon_is_waited_for(
    house: InProcessApi, dataset: Dataset, flush: Flushing, monkeypatch: pytest.MonkeyPatch
):
    others = Leases(house.services.database, house.services.store, "another", seconds=60)
    lease = others.take(dataset)
    monkeypatch.setattr("tarn.lake.commit.time.sleep", lambda _: others.release(lease))
    post(house, PERSON)

    (snapshot,) = flush()

    assert snapshot.rows.added == 3


def test_lease_that_is_not_given_back_is_not_waited_for_long(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels, monkeypatch: pytest.MonkeyPatch
):
    services = house.services
    Leases(services.database, services.store, "another", seconds=60).take(dataset)
    waits: list[float] = []
    monkeypatch.setattr("tarn.lake.commit.time.sleep", waits.append)
    post(house, PERSON)
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")

    done = Flush(services.database, services.store, publisher, lambda: kernels).run([dataset], lambda: None)

    assert isinstance(done[dataset.id].error, Locked)
    assert len(waits) > 1
    assert sum(waits) < 1


@pytest.mark.parametrize(("bound", "least"), [("TASK_ROWS", 20), ("TASK_CHARACTERS", 200)])
def test_segment_divided_among_tasks_makes_the_same_rows(
    house: InProcessApi, dataset: Dataset, flush: Flushing, monkeypatch: pytest.MonkeyPatch, bound: str, least: int
):
    monkeypatch.setattr(plan, bound, least)
    for round_ in range(2):
        post(house, *(PERSON | {"id": f"e{number}"} for number in range(50)), origin=f"o{round_}")
        flush()
    house.admin.delete("/v1/datasets/test/origins/o0")
    post(house, *(PERSON | {"id": f"e{number}"} for number in range(50)), origin="o2")
    (snapshot,) = flush()

    live = stored(house.services.store, dataset, snapshot)
    assert (snapshot.rows.ended, snapshot.rows.deleted, snapshot.rows.live) == (150, 1, 300)
    assert Counter(row["origin"] for row in live.values()) == {"o1": 150, "o2": 150}
    assert len([path for path in snapshot.translog.added if path.startswith("kind=delete")]) > 3


def test_files_are_cut_at_the_datasets_target_size(house: InProcessApi, kernels: DirectKernels):
    house.dataset("small", target_file_bytes=1 << 20)
    services = house.services
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
        assert house.admin.post("/v1/datasets/small/entities", texts).status_code == 200
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")

    done = Flush(services.database, services.store, publisher, lambda: kernels).run([small], lambda: None)

    (snapshot,) = done[small.id].snapshots
    sizes = [file.size for file in snapshot.statements.files]
    assert snapshot.rows.live == sum(file.rows for file in snapshot.statements.files) == 54
    assert len(sizes) > 1
    assert max(sizes) < 12 << 20
