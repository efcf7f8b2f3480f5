"""Vacuum: which snapshots are expired, which files are deleted, and what is kept."""

import os
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable
from sqlalchemy import update
from tarn.access.audit import AuditedAction
from tarn.datasets import registry
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import snapshots as recorded
from tarn.errors import ManifestInvalid
from tarn.integrity.vacuum import Vacuum
from tarn.lake import refs
from tarn.lake.commit import TABLES, SnapshotPublisher
from tarn.model.datasets.dataset import DatasetChange
from tarn.model.datasets.snapshot import Snapshot, SnapshotOperation
from tarn.model.ids import now
from tarn.model.names import RefName
from tarn.model.work.job import Progress, VacuumOptions
from tarn.settings import Settings
from tarn.storage.store import Store

from tests.faults.checks import check_now, history_of
from tests.faults.scene import Scene
from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.integrity.vacuums import (
    NOW,
    assert_clean,
    data_files,
    manifests,
    named,
    replace_files,
    states,
    vacuum,
    with_garbage,
)

BY_POLICY = VacuumOptions(override_floor=True)


def everything(scene: Scene) -> dict[str, int]:
    return {entry.path: entry.size for entry in scene.store.list(scene.dataset.layout.root)}


def keep(scene: Scene, count: int, days: float) -> None:
    change = DatasetChange.model_validate({"policy": {"retention": {"count": count, "days": days}}})
    registry.change(
        scene.database, scene.store, scene.dataset, change, None, AuditedAction(None, "change_dataset", "test", "r")
    )


def age(scene: Scene, hours: dict[int, float]) -> None:
    """Make snapshots as old as that."""
    with scene.database.write() as connection:
        for seq, old in hours.items():
            connection.execute(
                update(recorded)
                .where(recorded.c.dataset_id == scene.dataset.id, recorded.c.seq == seq)
                .values(created=now() - timedelta(hours=old))
            )


@pytest.mark.parametrize("seed", range(4))
def test_vacuum_of_any_history_keeps_the_content_of_kept_snapshots_and_deletes_exactly_the_rest(
    scene: Scene, seed: int
):
    draw = random.Random(seed)
    for _ in range(draw.randrange(3, 9)):
        scene.write(scene.new_statement(f"e{draw.random()}"), *scene.random_events())
        scene.flush()
        if draw.random() < 0.5:
            replace_files(scene)
    length = history_of(scene)[-1].seq
    if draw.random() < 0.5:
        with scene.database.write() as connection:
            refs.put(connection, scene.dataset, RefName("pin"), str(draw.randrange(1, length + 1)), "admin")
    keep(scene, draw.randrange(1, length + 2), draw.choice([0, 0, 1]))
    before, files = states(scene), everything(scene)
    dry = vacuum(scene, VacuumOptions(override_floor=True, dry_run=True))
    assert everything(scene) == files

    done = vacuum(scene, BY_POLICY)

    after = states(scene)
    kept = {seq for seq in before if seq >= done.retained_from}
    assert kept | {done.snapshot.seq if done.snapshot else length} == set(after)
    assert {seq: before[seq] for seq in kept} == {seq: after[seq] for seq in kept}
    gone = {path: size for path, size in files.items() if path not in everything(scene)}
    assert {one.path: one.size for one in done.first_files} == gone
    assert (done.files, done.size) == (len(gone), sum(gone.values()))
    assert (dry.files, dry.size, dry.expired, dry.retained_from) == (
        done.files,
        done.size,
        done.expired,
        done.retained_from,
    )
    assert dry.first_files == done.first_files
    assert_clean(scene)
    check_now(scene)
    assert vacuum(scene, BY_POLICY).snapshot is None


@pytest.mark.contract("H9")
def test_only_the_oldest_kept_snapshot_names_a_missing_parent(
    api: InProcessApi,
    dataset: Dataset,
    flush: Callable[[], list[Snapshot]],
    database: Database,
    store: Store,
    settings: Settings,
):
    for name in ("a", "b", "c", "d"):
        api.admin.post("/v1/datasets/test/entities", {"id": name, "schema": "Person"})
        flush()
    ids = [one["id"] for one in api.admin.get("/v1/datasets/test/snapshots").json()["results"]][::-1]
    api.admin.put("/v1/datasets/test/refs/pin", {"snapshot": ids[2]})
    publisher = SnapshotPublisher(database, store, settings, "vacuum")
    quick = settings.model_copy(update={"reader_silent_after": 0.01})

    Vacuum(database, store, quick, publisher).run(dataset, NOW, lambda _: None)

    log = api.admin.get("/v1/datasets/test/snapshots").json()["results"]
    assert [one["seq"] for one in log] == [5, 4, 3]
    assert log[0]["operation"] == SnapshotOperation.VACUUM
    assert api.admin.get("/v1/datasets/test/snapshots/latest").json()["retained_from"] == 3
    assert log[-1]["parent"] == ids[1]
    for name in (ids[0], ids[1], "1", "2"):
        for path in ("", "/files"):
            assert api.admin.get(f"/v1/datasets/test/snapshots/{name}{path}").status_code == 410
        answer = api.admin.get(f"/v1/datasets/test/entities?at={name}")
        assert (answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]) == (410, "snapshot-gone")
    for one in log:
        assert api.admin.get(f"/v1/datasets/test/snapshots/{one['parent']}").status_code == (
            410 if one is log[-1] else 200
        )
        assert len(api.admin.get(f"/v1/datasets/test/entities?at={one['seq']}").json()["results"]) == min(one["seq"], 4)


@ONE_DATABASE
def test_policy_keeps_the_newest_and_young_snapshots_and_the_floor_keeps_files(scene: Scene):
    with_garbage(scene, 8)
    keep(scene, 2, 1)
    age(scene, {1: 72, 2: 71, 3: 70, 4: 30, 5: 20})

    done = vacuum(scene, VacuumOptions())

    assert (done.retained_from, done.expired) == (5, 4)
    assert manifests(scene) == [one.seq for one in history_of(scene)]
    assert not [one for one in done.first_files if one.path.endswith(".parquet")], "all files are younger than a day"
    assert vacuum(scene, VacuumOptions()).snapshot is None


@ONE_DATABASE
def test_file_is_deleted_once_it_is_older_than_the_floor(scene: Scene):
    with_garbage(scene, 4)
    unneeded = data_files(scene) - named(scene, *history_of(scene))
    folder = scene.store.connection.folder
    assert folder is not None
    old = sorted(unneeded)[0]
    then = (now() - timedelta(hours=25)).timestamp()
    os.utime(Path(folder) / old, (then, then))

    done = vacuum(scene, VacuumOptions())

    assert [one.path for one in done.first_files if one.path.endswith(".parquet")] == [old]
    assert len(unneeded) > 1


@ONE_DATABASE
def test_dataset_without_snapshots_loses_the_files_of_a_dead_build(scene: Scene):
    with_garbage(scene, 0)
    left = data_files(scene)
    assert vacuum(scene, VacuumOptions()).snapshot is None

    done = vacuum(scene)

    assert {one.path for one in done.first_files} >= left
    assert data_files(scene) == set()
    check_now(scene)
    scene.flush()
    check_now(scene)


@ONE_DATABASE
def test_vacuum_without_work_publishes_and_deletes_nothing(scene: Scene):
    scene.with_history(1)
    before = everything(scene)

    done = vacuum(scene)

    assert (done.snapshot, done.files, done.expired, done.retained_from) == (None, 0, 0, 1)
    assert everything(scene) == before


@ONE_DATABASE
def test_snapshots_below_a_given_number_are_expired_at_once_whatever_the_policy(scene: Scene):
    with_garbage(scene, 5)

    done = vacuum(scene, VacuumOptions(), keep_from=4)

    assert done.retained_from == 4
    assert [one.seq for one in history_of(scene)] == [4, 5, 6, 7]
    assert_clean(scene)
    check_now(scene)


@ONE_DATABASE
def test_delta_logs_are_trimmed_to_versions_that_kept_snapshots_pin(scene: Scene):
    for number in range(24):
        scene.write(scene.new_statement(f"e{number}"))
        scene.flush()
    keep(scene, 3, 0)

    done = vacuum(scene, BY_POLICY)

    for table, folder in zip(TABLES, (scene.dataset.layout.statements, scene.dataset.layout.translog), strict=True):
        left = sorted(entry.path.rsplit("/", 1)[-1] for entry in scene.store.list(f"{folder}/_delta_log"))
        assert [name for name in left if "checkpoint" in name] == [
            "00000000000000000019.checkpoint.parquet",
            "_last_checkpoint",
        ]
        assert [int(name[:20]) for name in left if name.endswith(".json")] == [19, 20, 21, 22, 23]
        uri, options = scene.store.connection.table_uri(folder), scene.store.connection.delta_options()
        assert len(DeltaTable(uri, storage_options=options).file_uris()) == len(
            history_of(scene)[-1].table(table).files
        )
    assert done.retained_from == 23
    check_now(scene)
    scene.flush()
    check_now(scene)


@ONE_DATABASE
def test_log_without_checkpoints_gets_one_before_it_is_trimmed(scene: Scene):
    for number in range(12):
        scene.write(scene.new_statement(f"e{number}"))
        scene.flush()
    log = f"{scene.dataset.layout.statements}/_delta_log"
    scene.store.delete([entry.path for entry in scene.store.list(log) if "checkpoint" in entry.path])

    vacuum(scene)

    left = sorted(entry.path.rsplit("/", 1)[-1] for entry in scene.store.list(log))
    assert left == ["00000000000000000011.checkpoint.parquet", "00000000000000000011.json", "_last_checkpoint"]
    check_now(scene)


@ONE_DATABASE
def test_log_with_a_truncated_checkpoint_is_not_trimmed(scene: Scene):
    for number in range(12):
        scene.write(scene.new_statement(f"e{number}"))
        scene.flush()
    log = f"{scene.dataset.layout.statements}/_delta_log"
    scene.store.put(f"{log}/{9:020d}.checkpoint.parquet", b"PAR1 torn")

    vacuum(scene)

    assert len([entry for entry in scene.store.list(log) if entry.path.endswith(".json")]) == 12


@ONE_DATABASE
def test_unreadable_kept_snapshot_stops_a_vacuum_before_anything_is_expired(scene: Scene):
    with_garbage(scene, 5)
    keep(scene, 4, 0)
    scene.store.put(scene.dataset.layout.snapshot(4), b"{}")
    before = everything(scene)

    with pytest.raises(ManifestInvalid):
        vacuum(scene, BY_POLICY)

    assert everything(scene) == before


@ONE_DATABASE
def test_progress_is_reported_and_its_exception_ends_the_vacuum(scene: Scene):
    with_garbage(scene, 5)
    reported: list[Progress | None] = []
    before = data_files(scene)

    def stop(progress: Progress | None) -> None:
        reported.append(progress)
        if progress is not None:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        Vacuum(scene.database, scene.store, scene.settings, scene.publisher()).run(scene.dataset, NOW, stop)

    assert reported[-1] == Progress(done=0, unit="files")
    assert data_files(scene) == before
