"""Compact and optimize, by workers that die, stand still or meet others: nothing is lost, and nothing is seen of it."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select
from tarn.db import jobs
from tarn.db.tables import jobs as table
from tarn.model.job import JobState, Operation
from tarn.model.snapshot import SnapshotOperation
from tarn.storage.fault_injection import Gate

from tests.faults.checks import check, check_now, history_of
from tests.faults.scene import Killed, Scene, in_background, pause_at, kill_at, retrying_while_locked, run_concurrently
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


def does(scene: Scene, kind: SnapshotOperation, owner: str, reached: Any = lambda _: None) -> Callable[[], Any]:
    maintaining = scene.maintenance(owner, reached)
    return maintaining.compact if kind is SnapshotOperation.COMPACT else maintaining.optimize


def with_files(scene: Scene) -> None:
    """A few snapshots, so that there is something to be rewritten; and something that waits."""
    scene.with_history(3)


@pytest.mark.contract("H6", "H7", "M13")
@KINDS
@pytest.mark.parametrize("step", STEPS)
def test_rewriting_that_is_killed_after_a_step_leaves_everything_right(
    scene: Scene, kind: SnapshotOperation, step: str
):
    with_files(scene)
    with pytest.raises(Killed):
        does(scene, kind, "dies", kill_at(step))()
    check_now(scene)
    scene.expire_leases()

    does(scene, kind, "another")()

    made = [snapshot.operation for snapshot in history_of(scene)]
    assert made.count(kind) == (2 if kind is SnapshotOperation.COMPACT and step in STEPS[-3:] else 1)
    assert len({snapshot.content for snapshot in history_of(scene)[2:]}) == 1
    check(scene)


@KINDS
@pytest.mark.parametrize("step", STEPS[:-1])
def test_flush_that_lands_while_a_rewriting_stands_still_is_not_lost(scene: Scene, kind: SnapshotOperation, step: str):
    with_files(scene)
    gate = Gate()
    with in_background(does(scene, kind, "slow", pause_at(step, gate))) as slow:
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
def test_build_of_a_rewriting_holds_on_the_head_that_a_flush_made_meanwhile(scene: Scene, kind: SnapshotOperation):
    with_files(scene)
    built: list[str] = []
    gate = Gate()
    hold = pause_at("built", gate)

    def reached(step: str) -> None:
        built.append(step)
        hold(step)

    with in_background(does(scene, kind, "slow", reached)) as slow:
        gate.wait_arrived()
        scene.flush("quick")
        gate.release()
        slow()

    assert built.count("built") == 1
    assert [snapshot.operation for snapshot in history_of(scene)][-2:] == [SnapshotOperation.FLUSH, kind]
    check(scene)


@ONE_DATABASE
@pytest.mark.parametrize("step", ["built", "leased", "translog committed"])
@pytest.mark.parametrize("other", ["compact", "optimize", "vacuum"])
def test_rewriting_is_built_again_after_anything_but_a_flush(scene: Scene, other: str, step: str):
    with_files(scene)
    scene.flush()
    gate = Gate()
    maintaining = scene.maintenance("quick")
    acts: dict[str, Callable[[], Any]] = {
        "compact": maintaining.compact,
        "optimize": maintaining.optimize,
        "vacuum": maintaining.vacuum,
    }
    with in_background(does(scene, SnapshotOperation.COMPACT, "slow", pause_at(step, gate))) as slow:
        gate.wait_arrived()
        scene.expire_leases()
        acts[other]()
        gate.release()
        slow()

    check(scene)


@KINDS
def test_two_workers_that_rewrite_one_dataset_leave_it_right(scene: Scene, kind: SnapshotOperation):
    with_files(scene)

    acts = *(does(scene, kind, owner) for owner in ("one", "two")), lambda: scene.flush("flushes")
    run_concurrently(*(retrying_while_locked(act) for act in acts))

    check(scene)


@ONE_DATABASE
@pytest.mark.parametrize("step", ["statements committed", "translog committed", "manifest put"])
def test_flush_that_stands_still_while_the_dataset_is_compacted_is_not_lost(scene: Scene, step: str):
    with_files(scene)
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
def test_worker_process_killed_while_it_compacts_is_followed_by_another(scene: Scene, seed: int):
    step = STEPS[(3 + seed) % len(STEPS)]
    scene.with_history(2)
    scene.flush()
    with scene.database.write() as connection:
        job = jobs.enqueue(connection, Operation.COMPACT, scene.dataset.id, "admin", "r", {"force": True})
    with worker(scene, step, "KILL") as killed:
        killed.wait_reached(step)
        assert killed.wait_dead() == -signal.SIGKILL
    check_now(scene)
    scene.expire_leases()
    with scene.database.write() as connection:
        jobs.requeue(connection, job.id, _holder(scene, job.id))
    with worker(scene) as following:
        following.wait_reached("released")
        following.send(signal.SIGTERM)
        assert following.wait_dead() == 0

    with scene.database.read() as connection:
        assert jobs.get(connection, job.id).state is JobState.DONE
    check(scene)


def _holder(scene: Scene, job_id: str) -> str:
    with scene.database.read() as connection:
        return str(connection.execute(select(table.c.worker).where(table.c.id == job_id)).scalar_one())
