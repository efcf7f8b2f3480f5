"""Vacuums of a scene with garbage, and checks of what is left."""

from typing import Any

import pytest
from tarn.datasets.head import recorded_head
from tarn.integrity.vacuum import Vacuum
from tarn.lake import snapshots
from tarn.lake.commit import TABLES, Build, StepCallback
from tarn.model.datasets.snapshot import File, Snapshot, SnapshotOperation, TableName
from tarn.model.ids import new_id
from tarn.model.work.job import VacuumOptions, VacuumResult
from tarn.storage.store import Store

from tests.faults.checks import history_of
from tests.faults.scene import Killed, Scene, kill_at
from tests.pipeline.history import Identity, stored

NOW = VacuumOptions(retention_hours=0, override_floor=True)


def vacuum(
    scene: Scene,
    options: VacuumOptions = NOW,
    reached: StepCallback = lambda _: None,
    store: Store | None = None,
    keep_from: int | None = None,
    **changes: Any,
) -> VacuumResult:
    settings = scene.settings.model_copy(update={"reader_heartbeat": 0.004} | changes)
    publisher = scene.publisher("vacuum", reached)
    vacuum_run = Vacuum(scene.database, store or scene.store, settings, publisher, reached)
    return vacuum_run.run(scene.dataset, options, lambda _: None, keep_from)


def folder_of(scene: Scene, table: TableName) -> str:
    return scene.dataset.layout.table(table)


def data_files(scene: Scene) -> set[str]:
    paths = [entry.path for table in TABLES for entry in scene.store.list(folder_of(scene, table))]
    return {path for path in paths if "_delta_log" not in path}


def named(scene: Scene, *history: Snapshot) -> set[str]:
    return {
        f"{folder_of(scene, table)}/{file.path}"
        for one in history
        for table in TABLES
        for file in one.table(table).files
    }


def manifests(scene: Scene) -> list[int]:
    paths = [entry.path for entry in scene.store.list(scene.dataset.layout.snapshots)]
    return [int(path[-17:-5]) for path in paths if path.endswith(".json")]


def with_garbage(scene: Scene, snapshots_made: int) -> None:
    """Make a history whose oldest files are in no newer snapshot, long enough for checkpoints, and a killed build."""
    for number in range(snapshots_made):
        scene.write(scene.new_statement(f"earlier {number}"), *scene.random_events())
        scene.flush("earlier")
        if number % 4 == 3:
            replace_files(scene)
    scene.write(scene.new_statement("lost"))
    with pytest.raises(Killed):
        scene.worker("dies", kill_at("built"))()
    scene.store.put(f"{scene.dataset.layout.versions.folder}/2020/01/20200101T000000.000000Z/config.yml", b"old")
    scene.store.put(f"{scene.dataset.layout.versions.folder}/2020/01/20200102T000000.000000Z/config.yml", b"newer")


def head_of(scene: Scene) -> Snapshot:
    with scene.database.read() as connection:
        head = recorded_head(connection, scene.dataset)
    return snapshots.read(scene.store, scene.dataset, head.seq)


def replace_files(scene: Scene) -> Snapshot:
    """Replace all files by others, as a compaction does, without its work."""
    with scene.database.read() as connection:
        base = recorded_head(connection, scene.dataset)
    before = snapshots.read(scene.store, scene.dataset, base.seq)
    added: dict[TableName, tuple[File, ...]] = {}
    for table in TABLES:
        folder = folder_of(scene, table)
        copies = []
        for file in before.table(table).files:
            path = f"{file.path.rsplit('/', 1)[0]}/{new_id()}.parquet"
            scene.store.copy(f"{folder}/{file.path}", f"{folder}/{path}")
            copies.append(file.model_copy(update={"path": path}))
        added[table] = tuple(copies)
    removed = {table: before.table(table).files for table in TABLES}
    return scene.publisher().publish(
        Build(scene.dataset, SnapshotOperation.COMPACT, new_id(), base, segment=None, added=added, removed=removed)
    )


def assert_clean(scene: Scene) -> None:
    """Assert that exactly the files of kept snapshots exist."""
    history = history_of(scene)
    assert data_files(scene) == named(scene, *history)
    assert manifests(scene) == [one.seq for one in history]


def states(scene: Scene) -> dict[int, tuple[Snapshot, dict[Identity, dict[str, Any]]]]:
    """Return every kept snapshot's manifest and live content."""
    return {one.seq: (one, stored(scene.store, scene.dataset, one)) for one in history_of(scene)}
