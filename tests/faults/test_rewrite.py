"""Compactions and optimizations with workers that are killed, paused or concurrent: the visible rows stay the same."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select
from tarn.db import jobs
from tarn.db.tables import jobs as table
from tarn.model.datasets.snapshot import SnapshotOperation
from tarn.model.work.job import JobState, Operation
from tarn.storage.fault_injection import Gate

from tests.faults.checks import check, check_now, history_of
from tests.faults.scene import Killed, Scene, in_background, kill_at, pause_at, retrying_while_locked, run_concurrently
from tests.faults.test_flush_processes import worker
from tests.in_process_api import ONE_DATABASE

STEPS = (
    "built",
    "leased",
    "leveled",
    "statements committed",
    "translog committed",
    "manifest put",
    "recorded",
    "released",
)
KINDS = pytest.mark.parametrize("kind", [SnapshotOperation.COMPACT, SnapshotOperation.OPTIMIZE])


def rewrite_job(scene: Scene, kind: SnapshotOperation, owner: str, reached: Any = lambda _: None) -> Callable[[], Any]:
    """Return the function that runs a compaction or an optimization as a worker with this id."""
    maintenance = scene.maintenance(owner, reached)
    return maintenance.compact if kind is SnapshotOperation.COMPACT else maintenance.optimize


def write_files(scene: Scene) -> None:
    """Make a few snapshots with files to rewrite, and leave something unflushed."""
    scene.with_history(3)


@pytest.mark.contract("H6", "H7", "M13")
@KINDS
@pytest.mark.parametrize("step", STEPS)
def test_rewrite_killed_after_a_step_is_completed_by_the_next(scene: Scene, kind: SnapshotOperation, step: str):
    write_files(scene)
    with pytest.raises(Killed):
        rewrite_job(scene, kind, "dies", kill_at(step))()
    check_now(scene)
    scene.expire_leases()

    rewrite_job(scene, kind, "another")()

    operations = [snapshot.operation for snapshot in history_of(scene)]
    assert operations.count(kind) == (2 if kind is SnapshotOperation.COMPACT and step in STEPS[-3:] else 1)
    assert len({snapshot.content for snapshot in history_of(scene)[2:]}) == 1
    check(scene)


@KINDS
@pytest.mark.parametrize("step", STEPS[:-1])
def test_flush_during_a_paused_rewrite_is_not_lost(scene: Scene, kind: SnapshotOperation, step: str):
    write_files(scene)
    gate = Gate()
    with in_background(rewrite_job(scene, kind, "slow", pause_at(step, gate))) as slow:
        gate.wait_arrived()
        scene.write()
        scene.expire_leases()
        scene.flush("quick")
        check_now(scene)
        gate.release()
        slow()

    assert [snapshot.operation for snapshot in history_of(scene)].count(kind) == 1
    check(scene)


@KINDS
def test_build_of_a_rewrite_stays_valid_on_the_head_of_a_concurrent_flush(scene: Scene, kind: SnapshotOperation):
    write_files(scene)
    steps: list[str] = []
    gate = Gate()
    pause = pause_at("built", gate)

    def reached(step: str) -> None:
        steps.append(step)
        pause(step)

    with in_background(rewrite_job(scene, kind, "slow", reached)) as slow:
        gate.wait_arrived()
        scene.flush("quick")
        gate.release()
        slow()

    assert steps.count("built") == 1
    assert [snapshot.operation for snapshot in history_of(scene)][-2:] == [SnapshotOperation.FLUSH, kind]
    check(scene)


@ONE_DATABASE
@pytest.mark.parametrize("step", ["built", "leased", "translog committed"])
@pytest.mark.parametrize("other", ["compact", "optimize", "vacuum"])
def test_rewrite_is_built_again_after_any_concurrent_change_but_a_flush(scene: Scene, other: str, step: str):
    write_files(scene)
    scene.flush()
    gate = Gate()
    maintenance = scene.maintenance("quick")
    operations: dict[str, Callable[[], Any]] = {
        "compact": maintenance.compact,
        "optimize": maintenance.optimize,
        "vacuum": maintenance.vacuum,
    }
    with in_background(rewrite_job(scene, SnapshotOperation.COMPACT, "slow", pause_at(step, gate))) as slow:
        gate.wait_arrived()
        scene.expire_leases()
        operations[other]()
        gate.release()
        slow()

    check(scene)


@KINDS
def test_concurrent_rewrites_and_a_flush_of_one_dataset_keep_all_rows(scene: Scene, kind: SnapshotOperation):
    write_files(scene)

    functions = *(rewrite_job(scene, kind, owner) for owner in ("one", "two")), lambda: scene.flush("flushes")
    run_concurrently(*(retrying_while_locked(function) for function in functions))

    check(scene)


@ONE_DATABASE
@pytest.mark.parametrize("step", ["statements committed", "translog committed", "manifest put"])
def test_flush_paused_during_a_compaction_is_not_lost(scene: Scene, step: str):
    write_files(scene)
    gate = Gate()
    with in_background(scene.worker("slow", pause_at(step, gate))) as slow:
        gate.wait_arrived()
        scene.expire_leases()
        scene.maintenance("quick").compact()
        gate.release()
        slow()

    check(scene)


@pytest.mark.xdist_group("spark")
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_compaction_of_a_killed_worker_process_is_completed_by_another(scene: Scene, seed: int):
    step = STEPS[(3 + seed) % len(STEPS)]
    scene.with_history(2)
    scene.flush()
    with scene.database.write() as connection:
        job = jobs.enqueue(connection, Operation.COMPACT, scene.dataset.id, "admin", "r", {"force": True})
    with worker(scene, step, "KILL") as killed:
        killed.wait_reached(step)
        assert killed.wait_exited() == -signal.SIGKILL
    check_now(scene)
    scene.expire_leases()
    with scene.database.write() as connection:
        jobs.requeue(connection, job.id, _holder(scene, job.id))
    with worker(scene) as following:
        following.wait_reached("released")
        following.send(signal.SIGTERM)
        assert following.wait_exited() == 0

    with scene.database.read() as connection:
        assert jobs.get(connection, job.id).state is JobState.DONE
    check(scene)


def _holder(scene: Scene, job_id: str) -> str:
    with scene.database.read() as connection:
        return str(connection.execute(select(table.c.worker).where(table.c.id == job_id)).scalar_one())
