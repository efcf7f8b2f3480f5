"""Mutations: the simulation fails for a commit protocol without any one of its rules."""

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
from tarn.model.datasets.snapshot import Head, Snapshot, TableName

from tests.simulation.simulation import Simulation, SimulationFailed

pytestmark = pytest.mark.long

MAX_SEEDS = 200


def assert_detected(simulation: Simulation, *steps: str, fault_rate: float = 0.5) -> None:
    """Assert that some seed fails, with faults after these steps only, at this rate."""
    for seed in range(MAX_SEEDS):
        try:
            simulation.run(seed, dict.fromkeys(steps, fault_rate))
        except SimulationFailed:
            return
    raise AssertionError(f"no failure in {MAX_SEEDS} simulations")


@pytest.fixture
def mutation(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Return the patch with which a test removes a rule of the protocol."""
    return monkeypatch


def test_simulation_detects_that_an_unrecorded_manifest_is_not_recovered(simulation: Simulation, mutation):
    def base(self: SnapshotPublisher, dataset: Dataset) -> tuple[Head, Snapshot | None]:
        with self._database.read() as connection:
            head = recorded_head(connection, dataset)
        return head, None if head.id is None else snapshots.read(self._store, dataset, head.seq)

    mutation.setattr(SnapshotPublisher, "_base", base)

    assert_detected(simulation, "manifest put")


def test_simulation_detects_that_a_table_ahead_of_the_head_is_not_restored(simulation: Simulation, mutation):
    def level(self: SnapshotPublisher, lease: Lease, table: TableName, parent: Snapshot | None) -> int:
        if not self._tables.is_ahead(lease.dataset, table, NONE):
            return NONE
        return int(DeltaTable(self._tables._uri(lease.dataset, table)).version())

    mutation.setattr(SnapshotPublisher, "_pinned_or_restored", level)

    assert_detected(simulation, "statements committed", "translog committed")


def test_simulation_detects_that_the_head_is_replaced_without_comparing_the_parent(simulation: Simulation, mutation):
    def swap(connection: Connection, snapshot: Snapshot) -> bool:
        own = snapshot_heads.c.dataset_id == snapshot.dataset_id
        named = {"seq": snapshot.seq, "content": snapshot.content, "segment": snapshot.segment}
        connection.execute(update(snapshot_heads).where(own).values(snapshot=snapshot.id, **named))
        row = {"dataset_id": snapshot.dataset_id, "id": snapshot.id, "created": snapshot.created, **named}
        connection.execute(upsert(connection, recorded).values(**row).on_conflict_do_nothing())
        return True

    mutation.setattr(snapshots, "advance_head", swap)

    assert_detected(simulation, "manifest put", fault_rate=0.9)


def test_simulation_detects_that_an_existing_manifest_is_taken_for_the_own_one(simulation: Simulation, mutation):
    def put(self: SnapshotPublisher, dataset: Dataset, snapshot: Snapshot) -> None:
        with suppress(PathExists):
            self._store.put_new(dataset.layout.snapshot(snapshot.seq), snapshot.to_json())

    mutation.setattr(SnapshotPublisher, "_put", put)

    assert_detected(simulation, "translog committed", "manifest put", fault_rate=0.3)


def test_simulation_detects_that_a_build_is_published_on_any_head(simulation: Simulation, mutation):
    mutation.setattr(SnapshotPublisher, "_require_applies", lambda *_: None)

    assert_detected(simulation, "built", "leased")


def test_simulation_detects_that_batches_are_marked_done_in_a_later_transaction_than_the_head(
    simulation: Simulation, mutation
):
    def record(self: SnapshotPublisher, dataset: Dataset, snapshot: Snapshot) -> bool:
        with self._database.write() as connection:
            if not snapshots.advance_head(connection, snapshot):
                return commit._is_recorded(connection, dataset, snapshot)
        with self._database.write() as connection:
            uids = [batch.id for batch in snapshot.batches]
            segments.mark_done(connection, dataset, snapshot.segment, uids, moved=True)
        return True

    mutation.setattr(SnapshotPublisher, "_record", record)

    assert_detected(simulation, "manifest put")
