"""Checks of the Delta logs: the tables open at the versions that snapshots pin, with the files they name."""

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.integrity.findings import Findings, some
from tarn.lake.commit import TABLES
from tarn.lake.delta_tables import NONE, DeltaStore
from tarn.lake.recorded_history import WriterState, is_kept, lease_free_since
from tarn.model.datasets.finding import FindingKind
from tarn.model.datasets.snapshot import Snapshot, TableName
from tarn.storage.store import Store

TRIES = 2
"""Attempts to open a table before it counts as unreadable: deltalake has no separate error for a failing store."""


class UnreadableTable(Exception):
    """A table cannot be opened at a version."""


def sizes_at(store: Store, dataset: Dataset, table: TableName, version: int) -> dict[str, int]:
    """Return the sizes of a table's files at a version, by path below its folder. Raises UnreadableTable."""
    address = store.connection.table_uri(dataset.layout.table(table))
    for _ in range(TRIES):
        try:
            opened = DeltaTable(address, version=version, storage_options=store.connection.delta_options())
            actions: Any = opened.get_add_actions(flatten=True)
        except (DeltaError, TableNotFoundError, OSError) as error:
            # Raises if the store does not respond: then the table may be intact.
            store.head(dataset.layout.config)
            failure: Exception = error
        else:
            paths, sizes = actions["path"].to_pylist(), actions["size_bytes"].to_pylist()
            return {unquote(path): size for path, size in zip(paths, sizes, strict=True)}
    raise UnreadableTable(type(failure).__name__) from failure


def check_pinned(
    database: Database, store: Store, dataset: Dataset, pinned: Iterable[Snapshot], findings: Findings
) -> None:
    """Check that the tables open at the versions these snapshots pin, with the files they name."""
    for snapshot in pinned:
        for table in TABLES:
            made = snapshot.table(table)
            path = dataset.layout.delta_log(dataset.layout.table(table), made.version)
            try:
                listed = sizes_at(store, dataset, table, made.version)
            except UnreadableTable as error:
                if is_kept(database, dataset, snapshot.seq):
                    detail = f"cannot open {table} at version {made.version} of snapshot {snapshot.seq}: {error}"
                    findings.add(FindingKind.DELTA_UNREADABLE, detail, path)
                continue
            named = {file.path: file.size for file in made.files}
            if listed != named:
                differing = {name for name in listed.keys() | named.keys() if listed.get(name) != named.get(name)}
                detail = f"{table} at version {made.version} differs from snapshot {snapshot.seq}: {some(differing)}"
                findings.add(FindingKind.DELTA_DIFFERS, detail, path)


def check_ahead(
    database: Database,
    store: Store,
    dataset: Dataset,
    writer_state: WriterState,
    head: Snapshot | None,
    findings: Findings,
) -> None:
    """Check that no log is ahead of the head. Not reported if a writer held the lease since: publishing causes it."""
    ahead = []
    for table in TABLES:
        version = NONE if head is None else head.table(table).version
        if DeltaStore(store).is_ahead(dataset, table, version):
            ahead.append((table, version))
    if ahead and lease_free_since(database, dataset, writer_state):
        for table, version in ahead:
            path = dataset.layout.delta_log(dataset.layout.table(table), version + 1)
            findings.add(FindingKind.DELTA_AHEAD, f"the log of {table} is ahead of the head's version {version}", path)
