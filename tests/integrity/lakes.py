"""A lake with every kind of event in its history, and copies of it to be corrupted."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Connection, text
from tarn.access.audit import AuditedAction
from tarn.access.bootstrap import ensure_admin
from tarn.datasets import registry
from tarn.datasets.head import recorded_head
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.integrity.verify import verify
from tarn.journal import batches, stages
from tarn.journal.batches import Batch, BatchWithEvents
from tarn.lake import refs, snapshots
from tarn.lake.commit import Build, SnapshotPublisher
from tarn.lake.table_schemas import PARTITIONED
from tarn.model.datasets.dataset import DatasetChange, NewDataset
from tarn.model.datasets.finding import FindingKind
from tarn.model.datasets.snapshot import File, Snapshot, SnapshotOperation, TableName
from tarn.model.datasets.stage import NewStage
from tarn.model.ids import new_id
from tarn.model.names import RefName
from tarn.model.tenant import ADMIN
from tarn.model.work.job import VerifyOptions, VerifyResult
from tarn.pipeline.jobs.flush import TaskRunner
from tarn.settings import Settings
from tarn.storage.connection import Connection as Storage
from tarn.storage.layout import data_file
from tarn.storage.store import Store

from tests.faults.scene import SHORT_BACKOFF, Scene
from tests.pipeline.history import shown, stored
from tests.pipeline.test_fold import as_events

ACT = AuditedAction(None, "add_statements", "test", "r")


@dataclass
class Lake:
    """One dataset of a lake on a disk."""

    settings: Settings
    database: Database
    store: Store
    dataset: Dataset

    def verify(self, repair: bool = False) -> VerifyResult:
        """Verify, without findings about invalid entities: random events have random schemata."""
        result = self.verify_all(repair)
        about_data = [finding for finding in result.findings if finding.kind.about_data]
        return result.model_copy(
            update={
                "findings": [finding for finding in result.findings if finding not in about_data],
                "found": result.found - len(about_data),
                "harmless": result.harmless - len(about_data),
            }
        )

    def verify_all(self, repair: bool = False) -> VerifyResult:
        options = VerifyOptions(repair=repair)
        return verify(self.database, self.store, self.settings, "verifier", self.dataset, options, lambda _: None)

    def kinds(self) -> set[FindingKind]:
        return {finding.kind for finding in self.verify().findings}

    # Inspection

    def head(self) -> Snapshot:
        with self.database.read() as connection:
            return self.manifest(recorded_head(connection, self.dataset).seq)

    def manifest(self, seq: int) -> Snapshot:
        return snapshots.read(self.store, self.dataset, seq)

    def live(self) -> dict[Any, Any]:
        return shown(stored(self.store, self.dataset, self.head()))

    def path(self, table: TableName, file: File) -> str:
        return f"{self.dataset.layout.table(table)}/{file.path}"

    # Corruption

    def sql(self, statement: str, **parameters: Any) -> None:
        with self.database.write() as connection:
            changed = connection.execute(text(statement), {"dataset": self.dataset.id, **parameters})
            assert changed.rowcount > 0, statement

    def at(self, path: str) -> Path:
        folder = self.store.connection.folder
        assert folder is not None
        return folder / path

    def edit_manifest(self, seq: int, edit: Callable[[dict[str, Any]], Any]) -> None:
        place = self.at(self.dataset.layout.snapshot(seq))
        manifest = orjson.loads(place.read_bytes())
        edit(manifest)
        place.write_bytes(orjson.dumps(manifest))

    def edit_rows(self, table: TableName, file: File, edit: Callable[[pa.Table], pa.Table]) -> None:
        """Change the rows of a data file, and update everything recorded of it except its bounds."""
        place = self.at(self.path(table, file))
        pq.write_table(edit(pq.read_table(pa.BufferReader(place.read_bytes()))), place)
        rows = pq.read_metadata(place).num_rows
        size_and_rows = {"size": place.stat().st_size, "rows": rows}
        self.restate(table, file, lambda entry: (entry.update(size_and_rows), entry.pop("checksum", None)))

    def restate(self, table: TableName, file: File, edit: Callable[[dict[str, Any]], Any]) -> None:
        """Change what all manifests and the Delta log record of a file."""
        for place in sorted(self.at(self.dataset.layout.snapshots).glob("*.json")):
            manifest = orjson.loads(place.read_bytes())
            for entry in manifest[table]["files"]:
                if entry["path"] == file.path:
                    edit(entry)
            place.write_bytes(orjson.dumps(manifest))
        log = self.at(f"{self.dataset.layout.table(table)}/_delta_log")
        for place in [*log.glob("*.checkpoint.parquet"), *log.glob("_last_checkpoint")]:
            place.unlink()
        for place in sorted(log.glob("*.json")):
            lines = [orjson.loads(line) for line in place.read_bytes().splitlines()]
            for line in lines:
                if line.get("add", {}).get("path", "").endswith(file.path.rsplit("/", 1)[-1]):
                    line["add"]["size"] = self.at(self.path(table, file)).stat().st_size
            place.write_bytes(b"\n".join(map(orjson.dumps, lines)))


@contextmanager
def copied(template: Lake, folder: Path) -> Iterator[Lake]:
    """Copy a lake on SQLite that is not in use."""
    source = template.settings.database_url.removeprefix("sqlite:///")
    shutil.copy(source, folder / "tarn.db")
    shutil.copytree(template.settings.lake_uri, folder / "lake")
    changes = {"database_url": f"sqlite:///{folder}/tarn.db", "lake_uri": str(folder / "lake")}
    settings = template.settings.model_copy(update=changes)
    database = Database(settings.database_url)
    yield replace(template, settings=settings, database=database, store=Store(Storage.from_settings(settings)))
    database.close()


def rich_lake(settings: Settings, database: Database, store: Store, kernels: TaskRunner, seed: int = 7) -> Lake:
    """Build a lake with every kind of event: colliding origins, deletes, revivals, moved ids, a stage, rejected
    events, packed files, expired snapshots, a ref, a changed configuration, and an unflushed batch.
    """
    ensure_admin(database, settings)
    new = NewDataset.model_validate({"name": "test", "checksum": "sha256", "title": "First"})
    config, _ = registry.create(database, store, new, ACT)
    quick = settings.model_copy(update=SHORT_BACKOFF)
    dataset = Dataset(config.id, config.name)
    scene = Scene(quick, database, store, kernels, dataset, Random(seed))
    for number in range(4):
        for _ in range(4):
            scene.write(*scene.random_events(), *scene.random_events())
        scene.write(scene.new_statement(f"number {number}"))
        scene.flush()
    with database.write() as connection:
        _stage(connection, scene)
    scene.flush()
    scene.write(scene.new_statement("good"), scene.new_statement("bad"))
    with database.write() as connection:
        connection.execute(text("UPDATE journal SET schema = 'Nobody' WHERE entity_id = 'bad'"))
    scene.flush()
    lake = Lake(settings, database, store, dataset)
    pack(lake, scene.publisher())
    scene.write(*scene.random_events(), scene.new_statement("after packing"))
    scene.flush()
    expire_snapshots(lake, scene.publisher(), below=3)
    with database.write() as connection:
        ref = refs.put(connection, dataset, RefName("july"), "4", ADMIN)
        connection.execute(text("UPDATE refs SET updated = '2020-01-01 00:00:00.000000'"))
    refs.mirror(store, dataset, RefName("july"), ref)
    registry.change(database, store, dataset, DatasetChange(title="Second"), None, ACT)
    for number in range(2):
        scene.write(*scene.random_events(), scene.new_statement(f"last {number}"))
        scene.flush()
    scene.write(*scene.random_events())
    return lake


def pack(lake: Lake, publisher: SnapshotPublisher) -> Snapshot:
    """Rewrite a file of each table under another name, as packing would."""
    head = lake.head()
    added: dict[TableName, tuple[File, ...]] = {}
    removed: dict[TableName, tuple[File, ...]] = {}
    for table, column in PARTITIONED.items():
        former = head.table(table).files[0]
        file = former.model_copy(update={"path": data_file(column, former.partition[column], new_id())})
        lake.store.copy_new(lake.path(table, former), lake.path(table, file))
        added[table], removed[table] = (file,), (former,)
    with lake.database.read() as connection:
        base = recorded_head(connection, lake.dataset)
    build = Build(
        lake.dataset, SnapshotOperation.OPTIMIZE, new_id(), base, None, added=added, removed=removed, checksum="sha256"
    )
    return publisher.publish(build)


def expire_snapshots(lake: Lake, publisher: SnapshotPublisher, below: int) -> Snapshot:
    """Expire the snapshots below a number, and delete their manifests."""
    with lake.database.read() as connection:
        base = recorded_head(connection, lake.dataset)
    build = Build(
        lake.dataset, SnapshotOperation.VACUUM, new_id(), base, None, added={}, retained_from=below, checksum="sha256"
    )
    snapshot = publisher.publish(build)
    lake.store.delete([lake.dataset.layout.snapshot(seq) for seq in range(1, below)])
    return snapshot


def _stage(connection: Connection, scene: Scene) -> None:
    new = NewStage.model_validate({"origin": "bulk", "message": "July", "metadata": {"source": "x"}})
    uid = stages.create(connection, scene.settings, scene.dataset, ADMIN, new).id
    stage = stages.find(connection, scene.dataset, ADMIN, uid).id
    for _ in range(2):
        batch = Batch(scene.dataset, ADMIN, ACT, stage=stage)
        batches.write_small(connection, scene.settings, [BatchWithEvents(batch, as_events(scene.random_events()))])
    stages.commit(connection, scene.dataset, ADMIN, [uid], ACT)
