"""Restore a backup into an empty database and an empty lake.

    1. check      the dump's checksums, and that every object exists with its size: before anything is written
    2. mark       put a note at the lake's root that names the backup being restored
    3. copy       every object but `lake.json`: without it no process starts on an incomplete lake
    4. load       tables and rows, in one transaction
    5. reconcile  make database and lake consistent (`app/tarn/recovery/reconcile.py`)
    6. finish     put `lake.json`, and delete the note

After a crash, run it again: it continues, because the note says that the objects belong to this backup.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, islice

import orjson
import structlog
from sqlalchemy import select

from tarn.db import dump, migrate
from tarn.db.dump import DumpInvalid
from tarn.db.engine import Database
from tarn.db.tables import lake as lake_table
from tarn.errors import StartRefused
from tarn.lake import leases
from tarn.model.datasets.recovery import BackupManifest
from tarn.storage.backup_store import BackupObject, BackupStore, DamagedBackup
from tarn.storage.layout import Layout
from tarn.storage.store import ObjectMissing, Store

log = structlog.get_logger(__name__)

COPIERS = 8
BATCH = 512
SMALL = 4 << 20

ReconcileCallback = Callable[[], None]
"""Callback that reconciles database and lake."""


class Restore:
    """Restores one backup."""

    def __init__(
        self,
        database: Database,
        store: Store,
        backup_store: BackupStore,
        backup: str,
        reached: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Read the backup's manifest. Raises DamagedBackup if there is no such backup."""
        self._database = database
        self._store = store
        self._backup_store = backup_store
        self._backup = backup_store.read(backup)
        self._reached = reached

    def run(self, reconcile: ReconcileCallback) -> BackupManifest:
        """Restore the backup, and call `reconcile` once everything is in place.

        Raises DamagedBackup if the backup is incomplete, and StartRefused if database or lake hold anything else.
        """
        self._require_known()
        is_resumed = self._require_room()
        self._check()
        self._reached("checked")
        self._store.put(Layout.restoring, orjson.dumps({"backup": self._backup.id, "lake": self._backup.lake}))
        self._reached("marked")
        self._copy()
        self._reached("copied")
        self._load(is_resumed)
        self._reached("loaded")
        reconcile()
        self._reached("reconciled")
        for item in self._backup_store.index(self._backup):
            if item.path == Layout.lake:
                self._store.put(Layout.lake, self._backup_store.store.get(item.object))
        self._reached("lake.json put")
        self._store.delete([Layout.restoring])
        return self._backup

    # Step 1

    def _require_known(self) -> None:
        if self._backup.revision not in migrate.revisions():
            raise StartRefused(
                f"the backup is of revision {self._backup.revision}, made by Tarn {self._backup.tarn}, which this "
                "version does not know: restore it with that version or a later one"
            )

    def _require_room(self) -> bool:
        """Raise StartRefused unless lake and database are empty. Return whether to continue an earlier attempt."""
        is_resumed = self._is_begun()
        if not is_resumed:
            first = next((entry.path for entry in self._store.list("")), None)
            if first is not None:
                raise StartRefused(f"the lake at {self._store.connection.uri} is not empty: it holds {first}")
        with self._database.write() as connection:
            occupied_by = dump.occupied(connection)
            if occupied_by is not None and not (
                is_resumed and self._is_loaded(connection.execute(select(lake_table.c.id)).scalar())
            ):
                raise StartRefused(f"the database is not empty: {occupied_by}")
        return is_resumed

    def _is_begun(self) -> bool:
        try:
            note = orjson.loads(self._store.get(Layout.restoring))
        except (ObjectMissing, ValueError):
            return False
        if note.get("backup") != self._backup.id:
            raise StartRefused(
                f"the lake at {self._store.connection.uri} holds a partial restore of the backup {note.get('backup')}: "
                f"restore that backup, or empty the lake"
            )
        return True

    def _is_loaded(self, lake: str | None) -> bool:
        return lake == self._backup.lake

    def _check(self) -> None:
        for table in self._backup.tables:
            rows = sum(1 for _ in self._backup_store.table(self._backup.id, table)) - 1
            if rows != table.rows:
                raise DamagedBackup(f"the dump of {table.table!r} has {rows} rows instead of {table.rows}")
        damaged: list[str] = []
        count = 0
        for folder, group in groupby(self._backup_store.index(self._backup), _folder):
            stored_objects = self._backup_store.known(folder) if folder else {}
            for item in group:
                count += 1
                stored = stored_objects if folder else self._backup_store.known(item.path)
                if stored.get(item.object) != item.size:
                    damaged.append(item.object)
        if damaged:
            raise DamagedBackup(
                f"{len(damaged)} of {count} objects of the backup are missing or have another size; the first is "
                f"{damaged[0]}"
            )

    # Step 3

    def _copy(self) -> None:
        for folder, group in groupby(self._backup_store.index(self._backup), _folder):
            sizes = {entry.path: entry.size for entry in self._store.list(folder)} if folder else {}
            self._copy_all(item for item in group if sizes.get(item.path) != item.size and item.path != Layout.lake)

    def _copy_all(self, objects: Iterable[BackupObject]) -> None:
        remaining = iter(objects)
        with ThreadPoolExecutor(COPIERS) as pool:
            while batch := list(islice(remaining, BATCH)):
                list(pool.map(self._copy_one, batch))
                self._store.sync(item.path for item in batch)
                self._reached("some copied")

    def _copy_one(self, item: BackupObject) -> None:
        if item.size > SMALL:
            self._store.put_stream(item.path, self._backup_store.store.stream(item.object), durable=False)
        else:
            self._store.put_hint(item.path, self._backup_store.store.get(item.object))

    # Step 4

    def _load(self, is_resumed: bool) -> None:
        with self._database.write() as connection:
            if is_resumed and dump.occupied(connection) is not None:
                migrate.upgrade_in(connection, "head")
                return
            dump.prepare(connection, self._backup.revision)
            for table in self._backup.tables:
                try:
                    dump.load(connection, self._backup_store.table(self._backup.id, table))
                except DumpInvalid as error:
                    raise DamagedBackup(f"the dump of {table.table!r} cannot be loaded: {error}") from error
            dump.reset_sequences(connection)
            migrate.upgrade_in(connection, "head")
            leases.release_all(connection)


def _folder(item: BackupObject) -> str:
    """Return the top-level folder of an object, or an empty string for one at the lake's root."""
    top, between, _ = item.path.partition("/")
    return top if between else ""
