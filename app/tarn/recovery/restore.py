"""Restore: a backup into an empty database and an empty lake.

    1. check   the dump's checksums, and that every object is there with its size: before anything is written
    2. mark    put a note at the lake's root that says which backup comes here
    3. copy    every object but `lake.json`: without it no process starts on what is half there
    4. load    tables and rows, in one transaction
    5. fit     make the two one (`app/tarn/recovery/reconcile.py`)
    6. finish  put `lake.json`, and take the note away

Run again after a crash, it goes on: the note says that what lies there is of this backup.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, islice

import orjson
import structlog
from sqlalchemy import Connection, select, update

from tarn.db import dump, migrate
from tarn.db.dump import DumpInvalid
from tarn.db.engine import Database
from tarn.db.tables import export_leases, leases, queue_leases
from tarn.db.tables import lake as lake_table
from tarn.errors import StartRefused
from tarn.model.recovery import BackupManifest
from tarn.model.statement import EPOCH
from tarn.storage.backup_store import BackupObject, BackupStore, DamagedBackup
from tarn.storage.layout import Layout
from tarn.storage.store import Missing, Store

log = structlog.get_logger(__name__)

COPIERS = 8
BATCH = 512
SMALL = 4 << 20

Fit = Callable[[], None]
"""Makes database and lake one."""


class Restore:
    """Restores one backup."""

    def __init__(
        self,
        database: Database,
        store: Store,
        vault: BackupStore,
        backup: str,
        reached: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Raises Damaged if there is no such backup."""
        self._database = database
        self._store = store
        self._vault = vault
        self._backup = vault.read(backup)
        self._reached = reached

    def run(self, fit: Fit) -> BackupManifest:
        """Restore it, and call `fit` once everything is there.

        Raises Damaged if the backup is not whole, and StartRefused if database or lake hold anything else.
        """
        self._require_known()
        goes_on = self._require_room()
        self._check()
        self._reached("checked")
        self._store.put(Layout.restoring, orjson.dumps({"backup": self._backup.id, "lake": self._backup.lake}))
        self._reached("marked")
        self._copy()
        self._reached("copied")
        self._load(goes_on)
        self._reached("loaded")
        fit()
        self._reached("fitted")
        for held in self._vault.index(self._backup):
            if held.path == Layout.lake:
                self._store.put(Layout.lake, self._vault.store.get(held.object))
        self._reached("opened")
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
        """Raise StartRefused unless lake and database are empty. True: an earlier attempt began here."""
        goes_on = self._begun()
        if not goes_on:
            first = next((entry.path for entry in self._store.list("")), None)
            if first is not None:
                raise StartRefused(f"the lake at {self._store.connection.uri} is not empty: it holds {first}")
        with self._database.write() as connection:
            full = dump.occupied(connection)
            if full is not None and not (
                goes_on and self._is_loaded(connection.execute(select(lake_table.c.id)).scalar())
            ):
                raise StartRefused(f"the database is not empty: {full}")
        return goes_on

    def _begun(self) -> bool:
        try:
            note = orjson.loads(self._store.get(Layout.restoring))
        except (Missing, ValueError):
            return False
        if note.get("backup") != self._backup.id:
            raise StartRefused(
                f"the lake at {self._store.connection.uri} holds half of the backup {note.get('backup')}: "
                f"restore that one, or empty it"
            )
        return True

    def _is_loaded(self, lake: str | None) -> bool:
        return lake == self._backup.lake

    def _check(self) -> None:
        for table in self._backup.tables:
            rows = sum(1 for _ in self._vault.table(self._backup.id, table)) - 1
            if rows != table.rows:
                raise DamagedBackup(f"the dump of {table.table!r} has {rows} rows, and should have {table.rows}")
        wrong: list[str] = []
        count = 0
        for folder, group in groupby(self._vault.index(self._backup), _folder):
            known = self._vault.known(folder) if folder else {}
            for held in group:
                count += 1
                there = known if folder else self._vault.known(held.path)
                if there.get(held.object) != held.size:
                    wrong.append(held.object)
        if wrong:
            raise DamagedBackup(
                f"the backup lacks {len(wrong)} of its {count} objects, or they have another size; "
                f"the first is {wrong[0]}"
            )

    # Step 3

    def _copy(self) -> None:
        for folder, group in groupby(self._vault.index(self._backup), _folder):
            there = {entry.path: entry.size for entry in self._store.list(folder)} if folder else {}
            self._copy_all(held for held in group if there.get(held.path) != held.size and held.path != Layout.lake)

    def _copy_all(self, wanted: Iterable[BackupObject]) -> None:
        found = iter(wanted)
        with ThreadPoolExecutor(COPIERS) as pool:
            while some := list(islice(found, BATCH)):
                list(pool.map(self._copy_one, some))
                self._store.sync(held.path for held in some)
                self._reached("some copied")

    def _copy_one(self, held: BackupObject) -> None:
        if held.size > SMALL:
            self._store.put_stream(held.path, self._vault.store.stream(held.object), durable=False)
        else:
            self._store.put_hint(held.path, self._vault.store.get(held.object))

    # Step 4

    def _load(self, goes_on: bool) -> None:
        with self._database.write() as connection:
            if goes_on and dump.occupied(connection) is not None:
                migrate.upgrade_in(connection, "head")
                return
            dump.prepare(connection, self._backup.revision)
            for table in self._backup.tables:
                try:
                    dump.load(connection, self._vault.table(self._backup.id, table))
                except DumpInvalid as error:
                    raise DamagedBackup(f"the dump of {table.table!r} cannot be loaded: {error}") from error
            dump.reset_sequences(connection)
            migrate.upgrade_in(connection, "head")
            free(connection)


def free(connection: Connection) -> None:
    """Nobody holds a lease in a database that was restored; tokens go on rising."""
    for table in (leases, export_leases, queue_leases):
        connection.execute(update(table).values(expires=EPOCH))


def _folder(held: BackupObject) -> str:
    """The folder at the lake's root that it is in; nothing for what lies beside those."""
    top, between, _ = held.path.partition("/")
    return top if between else ""
