"""The simulation finds what it is there to find: a protocol with one rule less fails it, whichever rule it is."""

from contextlib import suppress

import pytest
from deltalake import DeltaTable
from sqlalchemy import Connection, update
from tarn.datasets.head import recorded_head
from tarn.datasets.registry import Dataset
from tarn.db.tables import snapshot_heads
from tarn.db.tables import snapshots as recorded
from tarn.db.upsert import upsert
from tarn.errors import PathExists
from tarn.journal import segments
from tarn.lake import commit, snapshots
from tarn.lake.commit import SnapshotPublisher
from tarn.lake.delta_tables import NONE
from tarn.lake.leases import Lease
from tarn.model.snapshot import Head, Snapshot, TableName

from tests.simulation.play import Failed, Stage

MOST_SEEDS = 200


def assert_noticed(stage: Stage, *steps: str, danger: float = 0.5) -> None:
    """Some play ends badly, with faults after these steps only, and that likely."""
    for seed in range(MOST_SEEDS):
        try:
            stage.play(seed, dict.fromkeys(steps, danger))
        except Failed:
            return
    raise AssertionError(f"nothing was noticed in {MOST_SEEDS} plays")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """For taking a rule away."""
    return monkeypatch


def test_simulation_notices_a_manifest_after_the_recorded_head_that_nobody_finishes(stage: Stage, broken):
    def base(self: SnapshotPublisher, dataset: Dataset) -> tuple[Head, Snapshot | None]:
        with self._database.read() as connection:
            head = recorded_head(connection, dataset)
        return head, None if head.id is None else snapshots.read(self._store, dataset, head.seq)

    broken.setattr(SnapshotPublisher, "_base", base)

    assert_noticed(stage, "manifest put")


def test_simulation_notices_a_table_ahead_that_is_not_put_back(stage: Stage, broken):
    def level(self: SnapshotPublisher, lease: Lease, table: TableName, parent: Snapshot | None) -> int:
        if not self._tables.is_ahead(lease.dataset, table, NONE):
            return NONE
        return int(DeltaTable(self._tables._uri(lease.dataset, table)).version())

    broken.setattr(SnapshotPublisher, "_pinned_or_restored", level)

    assert_noticed(stage, "statements committed", "translog committed")


def test_simulation_notices_a_head_that_is_swapped_without_a_look_at_the_parent(stage: Stage, broken):
    def swap(connection: Connection, snapshot: Snapshot) -> bool:
        own = snapshot_heads.c.dataset_id == snapshot.dataset_id
        named = {"seq": snapshot.seq, "content": snapshot.content, "segment": snapshot.segment}
        connection.execute(update(snapshot_heads).where(own).values(snapshot=snapshot.id, **named))
        row = {"dataset_id": snapshot.dataset_id, "id": snapshot.id, "created": snapshot.created, **named}
        connection.execute(upsert(connection, recorded).values(**row).on_conflict_do_nothing())
        return True

    broken.setattr(snapshots, "advance_head", swap)

    assert_noticed(stage, "manifest put", danger=0.9)


def test_simulation_notices_a_manifest_that_exists_and_is_taken_for_ones_own(stage: Stage, broken):
    def put(self: SnapshotPublisher, dataset: Dataset, snapshot: Snapshot) -> None:
        with suppress(PathExists):
            self._store.put_new(dataset.layout.snapshot(snapshot.seq), snapshot.to_json())

    broken.setattr(SnapshotPublisher, "_put", put)

    assert_noticed(stage, "translog committed", "manifest put", danger=0.3)


def test_simulation_notices_a_build_that_is_published_on_any_head(stage: Stage, broken):
    broken.setattr(SnapshotPublisher, "_require_applies", lambda *_: None)

    assert_noticed(stage, "built", "leased")


def test_simulation_notices_batches_that_are_done_in_a_transaction_after_the_head_moved(stage: Stage, broken):
    def record(self: SnapshotPublisher, dataset: Dataset, snapshot: Snapshot) -> bool:
        with self._database.write() as connection:
            if not snapshots.advance_head(connection, snapshot):
                return commit._is_recorded(connection, dataset, snapshot)
        with self._database.write() as connection:
            uids = [batch.id for batch in snapshot.batches]
            segments.mark_done(connection, dataset, snapshot.segment, uids, moved=True)
        return True

    broken.setattr(SnapshotPublisher, "_record", record)

    assert_noticed(stage, "manifest put")
