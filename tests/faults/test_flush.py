"""Flushes with workers that are killed, paused or run concurrently: always exactly one commit."""

import pytest
from tarn.model.datasets.flush import FlushOutcome
from tarn.storage.fault_injection import Gate

from tests.faults.checks import assert_no_lease, check, check_now, history_of, unflushed_commits
from tests.faults.scene import (
    AFTER_MANIFEST,
    BEFORE_MANIFEST,
    STEPS,
    Killed,
    Scene,
    error_slug,
    in_background,
    kill_at,
    pause_at,
    run_concurrently,
)
from tests.in_process_api import ONE_DATABASE

EARLIER = pytest.mark.parametrize(
    ("database_url", "earlier"), [("sqlite", 0), ("sqlite", 1), ("postgresql", 1)], indirect=["database_url"]
)
"""Cases with no earlier snapshot and with one."""


# Killed workers


@pytest.mark.contract("H1", "H2", "H7", "W1")
@EARLIER
@pytest.mark.parametrize("step", STEPS)
def test_flush_of_a_worker_killed_after_a_step_is_finished_by_another(scene: Scene, step: str, earlier: int):
    scene.with_history(earlier)
    with pytest.raises(Killed):
        scene.worker("dies", kill_at(step))()
    check_now(scene)
    recorded = len(history_of(scene))
    scene.expire_leases()

    snapshots = scene.flush()

    assert len(history_of(scene)) == earlier + 1
    assert recorded == earlier + (step in AFTER_MANIFEST[1:])
    assert len(snapshots) == (step in BEFORE_MANIFEST)
    check(scene)


@ONE_DATABASE
@pytest.mark.parametrize("step", ["leased", "translog committed", "manifest put"])
def test_worker_restarted_with_the_same_id_does_not_wait_for_its_own_lease(scene: Scene, step: str):
    scene.with_history(1)
    with pytest.raises(Killed):
        scene.worker("same", kill_at(step))()

    scene.flush("same")

    assert [*unflushed_commits(scene)] == []
    assert_no_lease(scene)
    check(scene)


@ONE_DATABASE
@pytest.mark.parametrize("step", ["leased", "translog committed"])
def test_lease_of_a_killed_worker_blocks_others_until_it_expires(scene: Scene, step: str):
    scene.with_history(1)
    with pytest.raises(Killed):
        scene.worker("dies", kill_at(step))()

    early = scene.worker("early")()
    scene.expire_leases()
    scene.flush()

    assert (early.snapshots, error_slug(early.error)) == ([], "locked")
    check(scene)


@pytest.mark.contract("H2")
def test_flush_killed_before_the_manifest_is_invisible_and_after_it_is_recorded_by_recovery(scene: Scene):
    scene.with_history(1)
    before = history_of(scene)
    with pytest.raises(Killed):
        scene.worker("dies", kill_at("translog committed"))()
    scene.expire_leases()
    scene.publisher().recover(scene.dataset)
    unchanged = history_of(scene)
    with pytest.raises(Killed):
        scene.worker("dies too", kill_at("manifest put"))()
    scene.expire_leases()

    scene.publisher().recover(scene.dataset)

    assert unchanged == before
    assert [snapshot.seq for snapshot in history_of(scene)] == [1, 2]
    assert [*unflushed_commits(scene)] == []
    check(scene)


def test_table_ahead_of_the_head_is_restored_before_a_commit(scene: Scene):
    scene.with_history(1)
    (before,) = history_of(scene)
    with pytest.raises(Killed):
        scene.worker("dies", kill_at("statements committed"))()
    scene.expire_leases()
    unflushed = [*unflushed_commits(scene)]

    (snapshot,) = scene.flush()

    # Three versions: the commit of the killed worker, the restore, and ours. The translog had no commit to undo.
    assert [batch.commit for batch in snapshot.batches] == unflushed
    assert snapshot.statements.version == before.statements.version + 3
    assert snapshot.translog.version == before.translog.version + 1
    check(scene)


# Paused workers


@pytest.mark.contract("H1", "H7")
@EARLIER
@pytest.mark.parametrize("step", STEPS)
def test_worker_paused_beyond_its_lease_while_another_publishes_leaves_one_commit(
    scene: Scene, step: str, earlier: int
):
    scene.with_history(earlier)
    gate = Gate()
    with in_background(scene.worker("paused", pause_at(step, gate))) as paused:
        gate.wait_arrived()
        scene.expire_leases()
        by_other = scene.flush()
        check_now(scene)
        gate.release()
        resumed: FlushOutcome = paused()

    history = history_of(scene)
    assert resumed.error is None
    assert {each.id for each in history[earlier:]} == {each.id for each in [*by_other, *resumed.snapshots]}
    assert len(history) == earlier + 1
    assert len(by_other) == (step in BEFORE_MANIFEST)
    check(scene)


@ONE_DATABASE
@pytest.mark.parametrize("later", BEFORE_MANIFEST[2:])
@pytest.mark.parametrize("step", BEFORE_MANIFEST[2:])
def test_worker_resumed_while_the_next_is_publishing_leaves_one_commit(scene: Scene, step: str, later: str):
    scene.with_history(1)
    first, second = Gate(), Gate()
    with in_background(scene.worker("paused", pause_at(step, first))) as paused:
        first.wait_arrived()
        scene.expire_leases()
        with in_background(scene.worker("next", pause_at(later, second))) as following:
            second.wait_arrived()
            first.release()
            resumed: FlushOutcome = paused()
            check_now(scene)
            second.release()
            followed: FlushOutcome = following()

    scene.expire_leases()
    published = {each.id for each in [*resumed.snapshots, *followed.snapshots, *scene.flush()]}
    assert published == {each.id for each in history_of(scene)[1:]}
    assert len(published) == 1
    check(scene)


@ONE_DATABASE
@pytest.mark.parametrize("step", BEFORE_MANIFEST[2:])
def test_worker_paused_while_others_publish_twice_publishes_nothing(scene: Scene, step: str):
    scene.with_history(1)
    gate = Gate()
    with in_background(scene.worker("paused", pause_at(step, gate))) as paused:
        gate.wait_arrived()
        for _ in range(2):
            scene.expire_leases()
            scene.flush()
            scene.write()
        gate.release()
        resumed: FlushOutcome = paused()

    assert (resumed.snapshots, error_slug(resumed.error)) == ([], None)
    check(scene)


# Concurrent workers


@pytest.mark.contract("H1", "H7")
@pytest.mark.parametrize("workers", [2, 3])
def test_concurrent_workers_flush_every_batch_once(scene: Scene, workers: int):
    def write() -> None:
        for _ in range(8):
            scene.write()

    def work(owner: str) -> list[str]:
        """Flush until the journal is empty, and retry while another worker holds the lease."""
        ids = []
        while len(scene.acknowledged) < 8 or [*unflushed_commits(scene)]:
            done = scene.worker(owner)()
            assert error_slug(done.error) in (None, "locked")
            ids += [snapshot.id for snapshot in done.snapshots]
        return ids

    _, *results = run_concurrently(write, *(lambda name=f"w{number}": work(name) for number in range(workers)))

    assert sorted(snapshot for ids in results for snapshot in ids) == sorted(
        snapshot.id for snapshot in history_of(scene)
    )
    check(scene)


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_all_assume_to_hold_the_lease_publish_one_snapshot(scene: Scene, workers: int):
    scene.with_history(1)
    flushes = [scene.worker(f"w{number}", lambda _: scene.expire_leases()) for number in range(workers)]

    done = run_concurrently(*flushes)

    assert {error_slug(each.error) for each in done} <= {None, "snapshot-conflict", "locked"}
    scene.expire_leases()
    published = [snapshot.id for each in done for snapshot in each.snapshots]
    published += [snapshot.id for snapshot in scene.flush()]
    assert published == [history_of(scene)[1].id]
    check(scene)
