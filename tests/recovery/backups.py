"""Databases and lakes saved at different times, and restored together elsewhere."""

import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tarn.db import dump, migrate
from tarn.db.engine import Database
from tarn.db.tables import lake
from tarn.db.upsert import upsert
from tarn.integrity.verify import verify
from tarn.model.datasets.finding import Finding
from tarn.model.datasets.recovery import BackupManifest, Reconciled, Reconciliation
from tarn.model.work.job import VerifyOptions
from tarn.query.engine.active_reads import hold_snapshots
from tarn.recovery.backup import Backup
from tarn.recovery.reconcile import Reconcile
from tarn.recovery.restore import Restore
from tarn.settings import Settings
from tarn.storage.backup_store import BackupStore
from tarn.storage.connection import Connection
from tarn.storage.lake_root import open_lake
from tarn.storage.store import Store

from tests.faults.scene import SHORT_BACKOFF, Scene
from tests.pipeline.kernels import DirectKernels

Saved = list[list[bytes]]
"""A database dump of one moment, as any backup tool would make it."""

Reached = Callable[[str], None]


def ignored(_: str) -> None:
    """Ignore progress reports."""


def save_database(scene: Scene) -> Saved:
    with scene.database.read() as connection:
        return [[*dump.lines(connection, table)] for table in dump.dumped()]


def save_lake(scene: Scene, folder: Path) -> Path:
    shutil.copytree(scene.settings.lake_uri, folder)
    return folder


@dataclass
class Elsewhere:
    """A target to restore to: an empty database, and no lake yet."""

    settings: Settings
    database: Database
    pool: ProcessPoolExecutor

    @property
    def store(self) -> Store:
        return Store(Connection.from_settings(self.settings))

    def put(self, saved: Saved, lake: Path) -> None:
        """Restore a saved database and a saved lake here, unchanged."""
        shutil.copytree(lake, self.settings.lake_uri, dirs_exist_ok=True)
        with self.database.write() as connection:
            revision = migrate.revision(connection)
            assert revision is not None
            dump.prepare(connection, revision)
            for lines in saved:
                dump.load(connection, lines)
            dump.reset_sequences(connection)

    def reconcile(self, apply: bool = True, reached: Reached = ignored) -> Reconciliation:
        return Reconcile(self.database, self.store, self.settings, reached).run(apply)

    def scene(self, scene: Scene, commits: Iterable[int]) -> Scene:
        """Return a scene of the same dataset here, with these expected commits."""
        return replace(
            scene,
            settings=self.settings.model_copy(update=SHORT_BACKOFF),
            database=self.database,
            store=self.store,
            kernels=DirectKernels(self.settings, self.pool),
            acknowledged={commit: scene.acknowledged[commit] for commit in commits},
        )


def findings(scene: Scene) -> list[Finding]:
    options = VerifyOptions(repair=False)
    report = verify(scene.database, scene.store, scene.settings, "verifier", scene.dataset, options, lambda _: None)
    return [finding for finding in report.findings if not finding.kind.about_data]


def back_up(scene: Scene, vault: BackupStore, reached: Reached = ignored) -> BackupManifest:
    with scene.database.write() as connection:
        # As every process does at its start.
        connection.execute(upsert(connection, lake).values(id=open_lake(scene.store).id).on_conflict_do_nothing())
    with hold_snapshots(scene.database, scene.settings.reader_heartbeat) as pin:
        return Backup(scene.database, scene.store, vault, open_lake(scene.store).id, pin, reached).run()


def restore(
    elsewhere: Elsewhere, vault: BackupStore, manifest: BackupManifest, reached: Reached = ignored
) -> Reconciliation:
    results: list[Reconciliation] = []
    restoration = Restore(elsewhere.database, elsewhere.store, vault, manifest.id, reached)
    restoration.run(lambda: results.append(elsewhere.reconcile()))
    return results[0]


def only(reconciliation: Reconciliation) -> Reconciled:
    (result,) = reconciliation.datasets
    return result
