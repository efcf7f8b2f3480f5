"""Reconciliation of a database and a lake of different moments: nothing is duplicated, and exactly the
losses are reported.
"""

from pathlib import Path

import pytest
from sqlalchemy import text
from tarn.errors import StartRefused
from tarn.journal import segments
from tarn.lake import refs
from tarn.model.datasets.recovery import Losses, Reconciled
from tarn.model.names import RefName
from tarn.model.tenant import ADMIN
from tarn.query.engine.active_reads import hold_snapshots
from tarn.recovery.reconcile import require_no_heartbeats

from tests.faults.checks import check, check_now, history_of
from tests.faults.scene import Killed, Scene, kill_at
from tests.in_process_api import ONE_DATABASE
from tests.integrity.vacuums import head_of, replace_files, vacuum
from tests.recovery.backups import Elsewhere, findings, only, save_database, save_lake

pytestmark = pytest.mark.both_databases


def flushes(scene: Scene, count: int, name: str) -> list[int]:
    """Make some snapshots, each with a statement of its own; return their commits."""
    commits = []
    for number in range(count):
        commits.append(scene.write(scene.new_statement(f"{name} {number}"), *scene.random_events()))
        scene.flush()
    return commits


def lost(one: Reconciled) -> set[int]:
    return {number for commits in one.lost.commits for number in range(commits.first, commits.last + 1)}


def test_equal_moments_need_no_reconciliation(scene: Scene, elsewhere: Elsewhere, tmp_path: Path):
    flushes(scene, 2, "before")
    scene.write()
    elsewhere.put(save_database(scene), save_lake(scene, tmp_path / "saved"))

    assert elsewhere.reconcile(apply=False).datasets == []
    assert elsewhere.reconcile().datasets == []

    check(elsewhere.scene(scene, scene.acknowledged))


def test_lake_ahead_of_the_database_is_recorded_and_nothing_is_flushed_twice(
    scene: Scene, elsewhere: Elsewhere, tmp_path: Path
):
    flushes(scene, 2, "before")
    scene.write()
    saved = save_database(scene)
    flushes(scene, 3, "after")
    unflushed = scene.write()
    elsewhere.put(saved, save_lake(scene, tmp_path / "saved"))

    dry = only(elsewhere.reconcile(apply=False))
    done = only(elsewhere.reconcile())

    assert (dry.found, dry.recorded, dry.lost) == ("lake ahead", [3, 4, 5], Losses())
    assert (done.found, done.recorded, done.lost, done.findings) == ("lake ahead", [3, 4, 5], Losses(), [])
    restored = elsewhere.scene(scene, scene.acknowledged.keys() - {unflushed})
    assert head_of(restored).id == head_of(scene).id
    check(restored)
    assert findings(restored) == []


def test_database_ahead_of_the_lake_is_rolled_back_and_reports_exactly_what_is_lost(
    scene: Scene, elsewhere: Elsewhere, tmp_path: Path
):
    flushes(scene, 2, "before")
    lake = save_lake(scene, tmp_path / "saved")
    lost_commits = flushes(scene, 3, "after")
    segments.purge_done(scene.database)
    scene.write()
    elsewhere.put(save_database(scene), lake)
    lost_ids = [one.id for one in history_of(scene)][2:]

    dry = only(elsewhere.reconcile(apply=False))
    done = only(elsewhere.reconcile())

    for result in (dry, done):
        assert (result.found, result.head_before, result.head) == ("database ahead", 5, 2)
        assert [one.id for one in result.lost.snapshots] == lost_ids
        assert lost(result) == set(lost_commits)
    assert done.findings == []
    restored = elsewhere.scene(scene, scene.acknowledged.keys() - set(lost_commits))
    assert [one.operation for one in history_of(restored)] == ["flush"] * 2 + ["revert"] * 4
    check(restored)
    assert findings(restored) == []


@ONE_DATABASE
def test_batches_whose_rows_still_exist_are_flushed_again(scene: Scene, elsewhere: Elsewhere, tmp_path: Path):
    flushes(scene, 1, "before")
    lake = save_lake(scene, tmp_path / "saved")
    scene.write(scene.new_statement("after"))
    with pytest.raises(Killed):
        scene.worker("dies", kill_at("released"))()
    elsewhere.put(save_database(scene), lake)

    done = only(elsewhere.reconcile())

    assert [batch.commit for batch in done.again] == [2]
    assert (done.lost.commits, done.lost.batches) == ([], [])
    check(elsewhere.scene(scene, scene.acknowledged))


@ONE_DATABASE
def test_manifest_numbers_of_lost_snapshots_are_taken_by_new_manifests(
    scene: Scene, elsewhere: Elsewhere, tmp_path: Path
):
    flushes(scene, 2, "before")
    lake = save_lake(scene, tmp_path / "saved")
    lost_commits = flushes(scene, 2, "after")
    segments.purge_done(scene.database)
    strays = {path: scene.store.get(path) for path in (scene.dataset.layout.snapshot(seq) for seq in (3, 4))}
    elsewhere.put(save_database(scene), lake)
    elsewhere.reconcile()
    restored = elsewhere.scene(scene, scene.acknowledged.keys() - set(lost_commits))

    for path, manifest in strays.items():
        assert restored.store.get(path) != manifest
    assert head_of(restored).seq == 5
    check(restored)
    assert findings(restored) == []


@ONE_DATABASE
@pytest.mark.parametrize("step", ["note written", "went back", "numbers taken", "files reconciled"])
def test_killed_reconciliation_is_resumed_and_reports_the_losses_again(
    scene: Scene, elsewhere: Elsewhere, tmp_path: Path, step: str
):
    flushes(scene, 1, "before")
    lake = save_lake(scene, tmp_path / "saved")
    lost_commits = flushes(scene, 2, "after")
    segments.purge_done(scene.database)
    elsewhere.put(save_database(scene), lake)

    with pytest.raises(Killed):
        elsewhere.reconcile(reached=kill_at(step))
    again = elsewhere.reconcile()

    if step != "files reconciled":
        assert lost(only(again)) == set(lost_commits)
        assert len(only(again).lost.snapshots) == 2
    restored = elsewhere.scene(scene, scene.acknowledged.keys() - set(lost_commits))
    assert head_of(restored).seq == 4
    check(restored)
    assert findings(restored) == []


@ONE_DATABASE
def test_manifest_without_its_files_is_moved_away(scene: Scene, elsewhere: Elsewhere, tmp_path: Path):
    """A bucket copied during a flush may have the manifest without the files."""
    flushes(scene, 1, "before")
    saved = save_database(scene)
    lost_commits = flushes(scene, 1, "after")
    lake = save_lake(scene, tmp_path / "saved")
    added = head_of(scene).statements.added[0]
    (lake / scene.dataset.layout.statements / added).unlink()
    elsewhere.put(saved, lake)

    done = only(elsewhere.reconcile())

    assert [one.seq for one in done.lost.snapshots] == [2]
    assert [batch.commit for batch in done.lost.batches] == lost_commits
    assert done.aside == [scene.dataset.layout.snapshot(2)]
    restored = elsewhere.scene(scene, scene.acknowledged.keys() - set(lost_commits))
    assert head_of(restored).seq == 3
    check(restored)
    assert findings(restored) == []


@ONE_DATABASE
def test_history_expired_by_a_lost_vacuum_is_kept_again(scene: Scene, elsewhere: Elsewhere, tmp_path: Path):
    flushes(scene, 2, "before")
    replace_files(scene)
    lake = save_lake(scene, tmp_path / "saved")
    vacuum(scene, keep_from=3)
    elsewhere.put(save_database(scene), lake)

    done = only(elsewhere.reconcile())

    assert [one.seq for one in done.lost.snapshots] == [4]
    restored = elsewhere.scene(scene, scene.acknowledged)
    assert [one.seq for one in history_of(restored)] == [1, 2, 3, 4, 5]
    check_now(restored)
    assert findings(restored) == []


@ONE_DATABASE
def test_history_expired_in_the_lake_is_expired_and_refs_into_it_are_reported(
    scene: Scene, elsewhere: Elsewhere, tmp_path: Path
):
    flushes(scene, 2, "before")
    replace_files(scene)
    with scene.database.write() as connection:
        refs.put(connection, scene.dataset, RefName("then"), "1", ADMIN)
    saved = save_database(scene)
    with scene.database.write() as connection:
        connection.execute(text("DELETE FROM refs"))
    vacuum(scene, keep_from=3)
    elsewhere.put(saved, save_lake(scene, tmp_path / "saved"))

    done = only(elsewhere.reconcile())

    assert done.lost.refs == ["then"]
    restored = elsewhere.scene(scene, scene.acknowledged)
    assert history_of(restored)[0].seq == 3
    check_now(restored)
    assert findings(restored) == []


@ONE_DATABASE
def test_dataset_that_exists_only_in_the_lake_is_recorded_with_its_history(
    scene: Scene, elsewhere: Elsewhere, tmp_path: Path
):
    saved = save_database(scene)
    later = Scene.make(scene.settings, scene.database, scene.store, scene.kernels, 2, "later")
    flushes(later, 2, "later")
    replace_files(later)
    vacuum(later, keep_from=3)
    elsewhere.put(saved, save_lake(scene, tmp_path / "saved"))

    done = only(elsewhere.reconcile())

    assert (done.dataset, done.found, done.recorded, done.lost) == ("later", "only in the lake", [3, 4], Losses())
    restored = elsewhere.scene(later, later.acknowledged)
    check(restored)
    assert findings(restored) == []


@ONE_DATABASE
def test_dataset_missing_in_the_lake_keeps_its_unflushed_journal(scene: Scene, elsewhere: Elsewhere, tmp_path: Path):
    lake = save_lake(scene, tmp_path / "saved")
    later = Scene.make(scene.settings, scene.database, scene.store, scene.kernels, 2, "later")
    lost_commits = flushes(later, 2, "later")
    segments.purge_done(scene.database)
    later.write(later.new_statement("unflushed"))
    elsewhere.put(save_database(scene), lake)

    done = only(elsewhere.reconcile())

    assert (done.head, done.lost.configuration, lost(done)) == (None, True, set(lost_commits))
    restored = elsewhere.scene(later, later.acknowledged.keys() - set(lost_commits))
    check_now(restored)
    (snapshot,) = restored.flush()
    assert snapshot.seq == 4
    check_now(restored)
    assert findings(restored) == []


@ONE_DATABASE
def test_dataset_deleted_in_the_database_stays_deleted(scene: Scene, elsewhere: Elsewhere, tmp_path: Path):
    later = Scene.make(scene.settings, scene.database, scene.store, scene.kernels, 2, "later")
    flushes(later, 1, "later")
    lake = save_lake(scene, tmp_path / "saved")
    with scene.database.write() as connection:
        connection.execute(text("UPDATE datasets SET state = 'deleted' WHERE name = 'later'"))
    elsewhere.put(save_database(scene), lake)

    done = only(elsewhere.reconcile())

    assert (done.dataset, done.found) == ("later", "deleted")
    assert list(elsewhere.store.list("later")) == []


@ONE_DATABASE
def test_dataset_recreated_in_the_lake_replaces_the_former_one_of_its_name(
    scene: Scene, elsewhere: Elsewhere, tmp_path: Path
):
    flushes(scene, 1, "before")
    scene.write(scene.new_statement("unflushed"))
    saved = save_database(scene)
    for entry in [*scene.store.list("test")]:
        scene.store.delete([entry.path])
    with scene.database.write() as connection:
        connection.execute(text("UPDATE datasets SET state = 'deleted'"))
    recreated = Scene.make(scene.settings, scene.database, scene.store, scene.kernels, 3)
    flushes(recreated, 1, "recreated")
    elsewhere.put(saved, save_lake(scene, tmp_path / "saved"))

    done = only(elsewhere.reconcile())

    assert (done.found, done.id, done.lost.everything) == ("only in the lake", recreated.dataset.id, True)
    assert [batch.commit for batch in done.lost.batches] == [2]
    restored = elsewhere.scene(recreated, recreated.acknowledged)
    check_now(restored)
    assert findings(restored) == []


@ONE_DATABASE
def test_reconciliation_is_refused_while_a_process_sends_heartbeats(scene: Scene):
    require_no_heartbeats(scene.database, scene.settings)
    with hold_snapshots(scene.database, 1.0), pytest.raises(StartRefused, match="sent a heartbeat 0 s ago: stop it"):
        require_no_heartbeats(scene.database, scene.settings)
    require_no_heartbeats(scene.database, scene.settings)
