"""Vacuums with processes that are killed, paused or concurrent: needed files are kept, and all others are deleted."""

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import update
from tarn.db import reader_heartbeats
from tarn.db.tables import datasets as dataset_rows
from tarn.errors import DatasetNotFound, SnapshotGone
from tarn.integrity.vacuum import Vacuum
from tarn.lake import refs, snapshots
from tarn.model.datasets.flush import FlushOutcome
from tarn.model.datasets.snapshot import SnapshotOperation
from tarn.model.ids import new_id
from tarn.model.names import RefName
from tarn.model.work.job import VacuumOptions, VacuumResult
from tarn.query.engine.active_reads import ActiveReadReporter
from tarn.query.reader import Reader, RequestedState
from tarn.storage.fault_injection import FaultyStore, Gate

from tests.faults.checks import check, check_now, history_of
from tests.faults.scene import (
    Killed,
    Scene,
    error_slug,
    in_background,
    kill_at,
    pause_at,
    retrying_while_locked,
    run_concurrently,
)
from tests.in_process_api import ONE_DATABASE
from tests.integrity.vacuums import (
    NOW,
    assert_clean,
    data_files,
    head_of,
    manifests,
    named,
    replace_files,
    vacuum,
    with_garbage,
)
from tests.pipeline.history import shown, stored

BEFORE = ("listed", "decided", "leased", "leveled", "statements committed", "translog committed")
AFTER = (
    "manifest put",
    "recorded",
    "released",
    "published",
    "readers reported",
    "deleting data",
    "data deleted",
    "deleting manifests",
    "manifests deleted",
    "deleting statements log",
    "statements log deleted",
    "deleting translog log",
    "translog log deleted",
    "deleting versions",
    "versions deleted",
    "swept",
)


# Killed vacuums


@pytest.mark.contract("H9")
@pytest.mark.parametrize(
    ("database_url", "step"),
    [
        *(("sqlite", step) for step in (*BEFORE, *AFTER)),
        *(("postgresql", step) for step in ("recorded", "readers reported")),
    ],
    indirect=["database_url"],
)
def test_vacuum_killed_at_a_step_keeps_needed_files_and_the_next_one_completes(scene: Scene, step: str):
    with_garbage(scene, 8)
    with pytest.raises(Killed):
        vacuum(scene, reached=kill_at(step))
    check_now(scene)
    scene.expire_leases()

    vacuum(scene)

    assert [one.operation for one in history_of(scene)] in (
        [SnapshotOperation.VACUUM],
        [SnapshotOperation.VACUUM, SnapshotOperation.VACUUM],
    )
    assert_clean(scene)
    check(scene)


@ONE_DATABASE
def test_vacuum_killed_during_a_delete_request_is_completed_by_the_next(scene: Scene):
    with_garbage(scene, 8)
    layout = scene.dataset.layout
    for glob in (f"{layout.statements}/origin*", f"{layout.snapshots}/*", f"{layout.translog}/_delta_log/*"):
        for after in (False, True):
            replace_files(scene)
            store = FaultyStore(scene.store)
            store.fail("delete", glob, Killed(), after=after)
            with pytest.raises(Killed):
                vacuum(scene, store=store)
            check_now(scene)

    vacuum(scene)

    assert_clean(scene)
    check(scene)


# Concurrent reads


@pytest.fixture
def reader(scene: Scene) -> Iterator[Reader]:
    reader = Reader(scene.settings, scene.database, scene.store)
    with closing(reader), ActiveReadReporter(scene.database, reader.active_reads, 0.002):
        yield reader


def test_slow_reader_of_an_expired_snapshot_reads_it_completely(scene: Scene, reader: Reader):
    with_garbage(scene, 4)
    since = history_of(scene)[1:]
    live = stored(scene.store, scene.dataset, since[0])
    expected = {(row["entity_id"], row["value"]) for row in live.values()}

    with reader.reading() as reading:
        reading.everything(scene.dataset, RequestedState(at="2"))
        during = vacuum(scene)
        with scene.database.read() as connection, pytest.raises(SnapshotGone):
            snapshots.find(connection, scene.dataset, "2")
        rows = reading.duck.execute("SELECT entity_id, value FROM live").fetchall()
    after = vacuum(scene)

    assert set(rows) == expected
    assert during.left == len(named(scene, *since) - named(scene, *history_of(scene)))
    assert after.left == 0
    assert_clean(scene)
    check(scene)


def test_snapshot_that_a_read_resolves_while_a_vacuum_decides_is_kept(scene: Scene, reader: Reader):
    with_garbage(scene, 4)
    resolving, deleting = Gate(), Gate()
    slow = FaultyStore(scene.store)
    blocked = slow.block("get", scene.dataset.layout.snapshot(3))
    late = Reader(scene.settings, scene.database, slow)

    def read() -> set[Any]:
        with late.reading() as reading:
            reading.everything(scene.dataset, RequestedState(at="3"))
            resolving.release()
            deleting.hold()
            return set(reading.duck.execute("SELECT id, origin FROM live").fetchall())

    expected = set(stored(scene.store, scene.dataset, history_of(scene)[2]))
    with closing(late), ActiveReadReporter(scene.database, late.active_reads, 0.002), in_background(read) as reading:
        blocked.wait_arrived()  # the snapshot is chosen, but not reported in a heartbeat yet
        done = vacuum(scene)
        blocked.release()
        deleting.wait_arrived()
        deleting.release()
        rows = reading()

    assert rows == expected
    assert done.left > 0
    vacuum(scene)
    assert_clean(scene)
    check(scene)


@ONE_DATABASE
def test_read_of_old_snapshots_during_vacuums_is_complete_or_fails_with_snapshot_gone(scene: Scene, reader: Reader):
    with_garbage(scene, 4)
    known = {one.seq: set(stored(scene.store, scene.dataset, one)) for one in history_of(scene)}
    reader.warm_up()
    stop = threading.Event()

    def read_snapshots() -> tuple[int, int]:
        complete = expired = 0
        while not stop.is_set() or not expired:
            for seq, expected in known.items():
                try:
                    with reader.reading() as reading:
                        reading.everything(scene.dataset, RequestedState(at=str(seq)))
                        assert set(reading.duck.execute("SELECT id, origin FROM live").fetchall()) == expected
                    complete += 1
                except SnapshotGone:
                    expired += 1
        return complete, expired

    def maintain() -> None:
        for hours in (24, 0, 0):
            vacuum(scene, VacuumOptions(retention_hours=hours, override_floor=True))
            replace_files(scene)
        stop.set()

    (complete, expired), _ = run_concurrently(read_snapshots, maintain)

    assert complete > 0
    assert expired > 0
    check(scene)


@ONE_DATABASE
def test_dead_reader_delays_one_vacuum_until_its_heartbeat_expires(scene: Scene):
    with_garbage(scene, 4)
    with scene.database.write() as connection:
        reader_heartbeats.beat(connection, "dead", reader_heartbeats.ReaderHeartbeat(7, {scene.dataset.id: 1}))
    reports: list[object] = []
    settings = scene.settings.model_copy(update={"reader_heartbeat": 0.004, "reader_silent_after": 0.05})

    result = Vacuum(scene.database, scene.store, settings, scene.publisher()).run(scene.dataset, NOW, reports.append)

    assert result.left == 0
    assert len(reports) > 2
    with scene.database.read() as connection:
        assert reader_heartbeats.latest(connection) == {}
    assert_clean(scene)
    check(scene)


@ONE_DATABASE
def test_vacuum_stopped_while_it_waits_for_readers_deletes_nothing(scene: Scene):
    with_garbage(scene, 4)
    before = data_files(scene)
    with scene.database.write() as connection:
        reader_heartbeats.beat(connection, "slow", reader_heartbeats.ReaderHeartbeat(7, {}))
    waiting = Vacuum(scene.database, scene.store, scene.settings, scene.publisher())

    def stop(_: object) -> None:
        if len(history_of(scene)) == 1:
            raise Killed

    with pytest.raises(Killed):
        waiting.run(scene.dataset, NOW, stop)

    assert data_files(scene) == before
    check_now(scene)


# Concurrent writes


@pytest.mark.contract("H6")
@pytest.mark.parametrize("step", ["built", "leased"])
def test_flush_built_before_a_vacuum_is_built_again_after_it(scene: Scene, step: str):
    scene.with_history(3)
    gate = Gate()
    with in_background(scene.worker("flushes", pause_at(step, gate))) as flushing:
        gate.wait_arrived()
        built = data_files(scene)
        scene.expire_leases()
        vacuum(scene)
        kept = data_files(scene)
        gate.release()
        flushed: FlushOutcome = flushing()

    assert kept < built
    assert error_slug(flushed.error) is None
    assert [one.operation for one in history_of(scene)] == [SnapshotOperation.VACUUM, SnapshotOperation.FLUSH]
    assert named(scene, *flushed.snapshots) & built == kept
    check(scene)


@ONE_DATABASE
def test_vacuum_retries_after_a_concurrent_flush(scene: Scene):
    scene.with_history(3)
    gate = Gate()
    with in_background(lambda: vacuum(scene, reached=pause_at("leased", gate))) as vacuuming:
        gate.wait_arrived()
        scene.expire_leases()
        (between,) = scene.flush()
        gate.release()
        done: VacuumResult = vacuuming()

    assert done.snapshot is not None
    assert done.snapshot.seq == between.seq + 1
    check(scene)


@ONE_DATABASE
def test_snapshot_of_a_ref_set_while_a_vacuum_decides_is_kept(scene: Scene):
    with_garbage(scene, 4)
    third = history_of(scene)[2]
    expected = shown(stored(scene.store, scene.dataset, third))
    gate = Gate()
    with in_background(lambda: vacuum(scene, reached=pause_at("decided", gate))) as vacuuming:
        gate.wait_arrived()
        with scene.database.write() as connection:
            refs.put(connection, scene.dataset, RefName("release"), "3", "admin")
        gate.release()
        done: VacuumResult = vacuuming()

    assert done.retained_from == 3
    assert done.expired == 2
    assert shown(stored(scene.store, scene.dataset, third)) == expected
    assert_clean(scene)
    check(scene)


def test_concurrent_vacuums_delete_what_one_would(scene: Scene):
    with_garbage(scene, 4)

    first, second = run_concurrently(
        retrying_while_locked(lambda: vacuum(scene, VacuumOptions(retention_hours=0, override_floor=True))),
        retrying_while_locked(lambda: vacuum(scene, VacuumOptions(override_floor=True))),
    )

    assert {first.dry_run, second.dry_run} == {False}
    vacuum(scene)
    assert_clean(scene)
    check(scene)


@ONE_DATABASE
@pytest.mark.parametrize(
    "step", ["listed", "decided", "published", "readers reported", "data deleted", "manifests deleted"]
)
def test_vacuum_of_a_dataset_deleted_meanwhile_deletes_nothing_more(scene: Scene, step: str):
    with_garbage(scene, 8)
    kept: list[list[str]] = []

    def reached(name: str) -> None:
        if name == step:
            with scene.database.write() as connection:
                connection.execute(
                    update(dataset_rows).where(dataset_rows.c.id == scene.dataset.id).values(state="deleting")
                )
            kept.append([entry.path for entry in scene.store.list(scene.dataset.layout.root)])

    with pytest.raises(DatasetNotFound):
        vacuum(scene, reached=reached)

    assert kept == [[entry.path for entry in scene.store.list(scene.dataset.layout.root)]]


@ONE_DATABASE
def test_stray_manifest_below_the_oldest_snapshot_is_deleted_and_one_above_the_head_is_kept(scene: Scene):
    scene.with_history(3)
    stray = head_of(scene).model_copy(update={"seq": 9, "id": new_id(), "dataset_id": new_id()})
    scene.store.put_new(scene.dataset.layout.snapshot(9), stray.to_json())
    vacuum(scene)
    scene.store.put_new(scene.dataset.layout.snapshot(2), stray.to_json())

    vacuum(scene)

    assert manifests(scene) == [*(one.seq for one in history_of(scene)), 9]
