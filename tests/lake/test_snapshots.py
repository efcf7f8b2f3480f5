"""The recorded head and its history, on both databases."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from tarn.datasets.head import recorded_head
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.errors import ManifestInvalid, NoSnapshots, SnapshotNotFound
from tarn.lake import snapshots
from tarn.lake.snapshots import SnapshotKey
from tarn.model.datasets.snapshot import Head, Snapshot, SnapshotOperation
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.store import Store

from tests.in_process_api import InProcessApi
from tests.lake.manifests import build, dataset_of, history, publish
from tests.worker.workers import make_worker

pytestmark = pytest.mark.both_databases


@pytest.fixture
def store(store: Store) -> FaultyStore:
    return FaultyStore(store)


@pytest.fixture
def dataset(api: InProcessApi, database: Database) -> Dataset:
    api.dataset("donations")
    return dataset_of(database, "donations")


def head(database: Database, dataset: Dataset) -> Head:
    with database.read() as connection:
        return recorded_head(connection, dataset)


def log(database: Database, dataset: Dataset, before: int | None = None, limit: int = 100) -> list[SnapshotKey]:
    with database.read() as connection:
        return snapshots.kept_page(connection, dataset, before, limit)


def find(database: Database, dataset: Dataset, name: str) -> SnapshotKey:
    with database.read() as connection:
        return snapshots.find(connection, dataset, name)


def swap(database: Database, snapshot: Snapshot) -> bool:
    with database.write() as connection:
        return snapshots.advance_head(connection, snapshot)


def named(*history: Snapshot) -> list[SnapshotKey]:
    return [SnapshotKey(snapshot.seq, snapshot.id) for snapshot in history]


@pytest.mark.contract("H1")
def test_recorded_snapshot_becomes_the_head_and_names_its_parent(database: Database, store: Store, dataset: Dataset):
    published = history(database, store, dataset, 3)

    recorded = log(database, dataset)
    read = [snapshots.read_named(store, dataset, one) for one in recorded]

    assert recorded == named(*reversed(published))
    assert [manifest.parent for manifest in read] == [published[1].id, published[0].id, None]
    assert head(database, dataset) == Head(seq=3, id=published[2].id, content=3, segment=3)


@pytest.mark.contract("H1")
@pytest.mark.parametrize("depth", [0, 1])
def test_swap_on_a_stale_parent_is_refused_and_changes_nothing(
    database: Database, store: Store, dataset: Dataset, depth: int
):
    published = history(database, store, dataset, 3)
    before = head(database, dataset), log(database, dataset)
    stale = published[depth]

    right_number = swap(database, build(dataset, stale, seq=4))
    own_number = swap(database, build(dataset, stale))

    assert (right_number, own_number) == (False, False)
    assert (head(database, dataset), log(database, dataset)) == before


@pytest.mark.contract("H1")
def test_swap_that_skips_a_number_or_the_parent_is_refused(database: Database, store: Store, dataset: Dataset):
    published = history(database, store, dataset, 2)

    assert not swap(database, build(dataset, published[1], seq=4))
    assert not swap(database, build(dataset, None, after=2))
    assert head(database, dataset).seq == 2


@pytest.mark.contract("H1")
def test_concurrent_swaps_on_one_parent_succeed_once(database: Database, store: Store, dataset: Dataset):
    (parent,) = history(database, store, dataset, 1)
    start = Barrier(8)

    def race(child: Snapshot) -> bool:
        start.wait()
        return swap(database, child)

    children = [build(dataset, parent) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        won = [child for child, moved in zip(children, pool.map(race, children), strict=True) if moved]

    assert len(won) == 1
    assert log(database, dataset) == named(won[0], parent)
    assert head(database, dataset).id == won[0].id


def test_same_snapshot_is_recorded_once(database: Database, store: Store, dataset: Dataset):
    (first,) = history(database, store, dataset, 1)

    assert not swap(database, first)
    assert log(database, dataset) == named(first)


def test_swap_on_a_dataset_that_is_being_deleted_is_refused(api: InProcessApi, database: Database, dataset: Dataset):
    api.admin.delete("/v1/datasets/donations?confirm=donations")

    assert not swap(database, build(dataset))
    assert log(database, dataset) == []


@pytest.mark.contract("H2")
def test_unrecorded_manifest_is_not_visible(database: Database, store: Store, dataset: Dataset):
    (first,) = history(database, store, dataset, 1)
    put = build(dataset, first)
    store.put_new(dataset.layout.snapshot(put.seq), put.to_json())

    before = head(database, dataset).id, log(database, dataset), find(database, dataset, "latest")
    with pytest.raises(SnapshotNotFound):
        find(database, dataset, put.id)
    with pytest.raises(SnapshotNotFound):
        find(database, dataset, str(put.seq))
    swap(database, put)

    assert before == (first.id, named(first), *named(first))
    assert find(database, dataset, put.id) == find(database, dataset, "latest") == named(put)[0]


@pytest.mark.contract("H2")
def test_stray_manifest_at_the_path_of_a_recorded_one_is_rejected(database: Database, store: Store, dataset: Dataset):
    published = history(database, store, dataset, 2)
    stray = build(dataset, None)
    store.put(dataset.layout.snapshot(1), stray.to_json())

    with pytest.raises(ManifestInvalid, match=f"is not of the snapshot {published[0].id}"):
        snapshots.read_named(store, dataset, find(database, dataset, "1"))
    with pytest.raises(SnapshotNotFound):
        find(database, dataset, stray.id)
    assert log(database, dataset) == named(*reversed(published))


def delete(api: InProcessApi) -> None:
    api.admin.delete("/v1/datasets/donations?confirm=donations")
    make_worker(api).step()


@pytest.mark.contract("H2")
def test_recreated_dataset_numbers_its_snapshots_above_those_of_a_stale_writer(
    api: InProcessApi, database: Database, store: Store, dataset: Dataset
):
    published = history(database, store, dataset, 2)
    delete(api)
    api.dataset("donations")
    again = dataset_of(database, "donations")
    unrecorded = build(dataset, published[1])
    store.put_new(dataset.layout.snapshot(unrecorded.seq), unrecorded.to_json())

    empty = head(database, again), log(database, again), swap(database, unrecorded)
    first = publish(database, store, again, build(again, after=head(database, again).seq))

    assert empty == (Head(seq=3, id=None, content=0, segment=0), [], False)
    assert first.seq == 4
    assert log(database, again) == named(first)
    for gone in (*published, unrecorded):
        with pytest.raises(SnapshotNotFound):
            find(database, again, gone.id)
        with pytest.raises(SnapshotNotFound):
            find(database, again, str(gone.seq))


def test_numbers_continue_over_every_dataset_that_had_the_name(api: InProcessApi, database: Database, store: Store):
    firsts = []
    for _ in range(3):
        api.dataset("donations")
        dataset = dataset_of(database, "donations")
        firsts.append(head(database, dataset).seq)
        publish(database, store, dataset, build(dataset, after=firsts[-1]))
        delete(api)

    assert firsts == [0, 2, 4]


def test_manifest_of_another_dataset_is_not_read(database: Database, store: Store, dataset: Dataset):
    (first,) = history(database, store, dataset, 1)
    store.put(dataset.layout.snapshot(1), build(Dataset("other", dataset.name), id=first.id).to_json())

    with pytest.raises(ManifestInvalid, match="is of another dataset"):
        snapshots.read_named(store, dataset, SnapshotKey(1, first.id))


def test_missing_manifest_is_invalid(database: Database, store: Store, dataset: Dataset):
    history(database, store, dataset, 1)
    store.delete([dataset.layout.snapshot(1)])

    with pytest.raises(ManifestInvalid, match="is missing"):
        snapshots.read_named(store, dataset, find(database, dataset, "latest"))


@pytest.mark.contract("H8")
def test_dataset_without_snapshots_has_an_empty_log_and_no_latest(database: Database, dataset: Dataset):
    assert log(database, dataset) == []
    with pytest.raises(NoSnapshots):
        find(database, dataset, "latest")
    for name in ("1", "0", "9" * 19, "nonsense", "٣"):
        with pytest.raises(SnapshotNotFound):
            find(database, dataset, name)


def test_snapshot_is_found_by_id_and_by_number(database: Database, store: Store, dataset: Dataset):
    published = history(database, store, dataset, 3)

    assert [find(database, dataset, one.id) for one in published] == named(*published)
    assert [find(database, dataset, str(one.seq)) for one in published] == named(*published)


@pytest.mark.contract("M13")
def test_compaction_moves_the_head_and_keeps_the_recorded_content(database: Database, store: Store, dataset: Dataset):
    published = history(database, store, dataset, 2)
    compacted = publish(database, store, dataset, build(dataset, published[1], operation=SnapshotOperation.COMPACT))
    optimized = publish(database, store, dataset, build(dataset, compacted, operation=SnapshotOperation.OPTIMIZE))

    after_both = head(database, dataset)
    flushed = publish(database, store, dataset, build(dataset, optimized))

    assert (after_both.seq, after_both.content) == (4, 2)
    assert (head(database, dataset).content, flushed.content) == (5, 5)


@pytest.mark.contract("X2")
def test_head_is_resolved_without_a_storage_call_whatever_the_length_of_history(
    database: Database, store: FaultyStore, dataset: Dataset
):
    published = history(database, store, dataset, 12)
    store.calls.clear()

    resolved = head(database, dataset).id, find(database, dataset, "latest").id, find(database, dataset, "1").id
    before = list(store.calls)
    after_head = snapshots.read_if_exists(store, dataset, published[-1].seq + 1)

    assert resolved == (published[-1].id, published[-1].id, published[0].id)
    assert before == []
    assert after_head is None
    assert [(call.method, call.path) for call in store.calls] == [("get", dataset.layout.snapshot(13))]


def test_first_snapshot_that_contains_a_segment_is_found(database: Database, store: Store, dataset: Dataset):
    first = publish(database, store, dataset, build(dataset, segment=3))
    second = publish(database, store, dataset, build(dataset, first, segment=5))

    with database.read() as connection:
        containing = [snapshots.first_containing(connection, dataset, segment) for segment in (1, 3, 4, 5, 6)]

    assert containing == [*named(first, first, second, second), None]
