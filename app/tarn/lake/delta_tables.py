"""The two Delta tables of a dataset, statements and translog: commit, restore and sync.

deltalake's own retries are disabled: they would silently rebase onto another writer's commit. So a commit creates
exactly the version after the one that was loaded, or raises CommitRefused.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import orjson
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from tarn.datasets.registry import Dataset
from tarn.errors import StorageFull, Unavailable
from tarn.lake.table_schemas import PARTITIONED, SCHEMAS
from tarn.model.datasets.snapshot import File, Table, TableName
from tarn.model.ids import now
from tarn.storage.store import Store

CHECKPOINT_EVERY = 10
"""Versions after which deltalake writes a checkpoint of the log, so that opening a table stays cheap."""

CONFIGURATION = {
    # Delta's own clean-up would delete versions that snapshots pin.
    "delta.enableExpiredLogCleanup": "false",
    "delta.checkpointInterval": str(CHECKPOINT_EVERY),
}

NONE = -1
"""The version of a table that does not exist yet, as in a dataset without snapshots."""

_SCHEMAS = {name: Schema.from_arrow(schema) for name, schema in SCHEMAS.items()}
_HOOKS = PostCommitHookProperties(cleanup_expired_logs=False)


class CommitRefused(Exception):
    """Another writer already committed the version that this commit was to create."""


class DeltaStore:
    """The Delta tables of the datasets on one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def is_ahead(self, dataset: Dataset, table: TableName, version: int) -> bool:
        """Return whether the table's log has a version after this one. One storage call, however long the log is."""
        return self._store.head(self._entry(dataset, table, version + 1)) is not None

    def restore(self, dataset: Dataset, table: TableName, version: int, note: dict[str, str]) -> int:
        """Restore a table to an earlier version by a new commit, and return the version that the commit created.

        Raises CommitRefused if another writer was first.
        """
        with _translated_errors():
            loaded = DeltaTable(self._uri(dataset, table), storage_options=self._options())
            # Not the version afterwards: that may be another writer's, who committed right after us.
            before = int(loaded.version())
            if version == NONE:
                # Without files, `delete` makes no commit.
                restored = before + (1 if loaded.file_uris() else 0)
                loaded.delete(commit_properties=_properties(note), post_commithook_properties=_HOOKS)
            else:
                restored = before + 1
                loaded.restore(version, commit_properties=_properties(note), post_commithook_properties=_HOOKS)
        self.sync(dataset, {table: restored})
        return restored

    def commit(
        self,
        dataset: Dataset,
        table: TableName,
        version: int,
        added: Sequence[File],
        removed: Sequence[File],
        note: dict[str, str],
    ) -> int:
        """Add and remove files in one commit on top of a version, and return the new version. Raises CommitRefused.

        A table that does not exist yet is created with its first files. On a disk the commit is durable after `sync`.
        """
        moment = now()
        adds = [_add(file, moment) for file in added]
        with _translated_errors():
            if version == NONE:
                self._create(dataset, table, adds, note)
            else:
                loaded = DeltaTable(self._uri(dataset, table), version=version, storage_options=self._options())
                loaded.create_write_transaction(
                    [*adds, *(_remove(file, moment) for file in removed)],
                    "append",
                    _SCHEMAS[table],
                    partition_by=[PARTITIONED[table]],
                    commit_properties=_properties(note),
                    post_commithook_properties=_HOOKS,
                )
        return version + 1

    def sync(self, dataset: Dataset, versions: Mapping[TableName, int]) -> None:
        """Make log entries durable, and the checkpoints that deltalake may have written after them."""
        written = []
        for table, version in versions.items():
            written.append(self._entry(dataset, table, version))
            # deltalake counts versions, and the first is 0.
            if (version + 1) % CHECKPOINT_EVERY == 0:
                written += dataset.layout.delta_checkpoint(dataset.layout.table(table), version)
        self._store.sync(written)

    def _create(self, dataset: Dataset, table: TableName, adds: list[AddAction], note: dict[str, str]) -> None:
        try:
            create_table_with_add_actions(
                self._uri(dataset, table),
                _SCHEMAS[table],
                adds,
                mode="error",
                partition_by=[PARTITIONED[table]],
                configuration=CONFIGURATION,
                storage_options=self._options(),
                commit_properties=_properties(note),
                post_commithook_properties=_HOOKS,
            )
        except DeltaError as error:
            # deltalake has no separate error for a table that another writer created.
            if self.is_ahead(dataset, table, NONE):
                raise CommitRefused from error
            raise

    def _uri(self, dataset: Dataset, table: TableName) -> str:
        return self._store.connection.table_uri(dataset.layout.table(table))

    def _entry(self, dataset: Dataset, table: TableName, version: int) -> str:
        return dataset.layout.delta_log(dataset.layout.table(table), version)

    def _options(self) -> dict[str, str]:
        return self._store.connection.delta_options()


def after(parent: Table | None, version: int, added: Sequence[File], removed: Sequence[str]) -> Table:
    """Return a table as a snapshot lists it: the parent's files without `removed`, and `added`."""
    removed_paths = set(removed)
    kept = tuple(file for file in parent.files if file.path not in removed_paths) if parent is not None else ()
    return Table(
        version=version,
        files=(*kept, *added),
        added=tuple(file.path for file in added),
        removed=tuple(removed),
    )


def _properties(note: dict[str, str]) -> CommitProperties:
    return CommitProperties(custom_metadata={"tarn": note}, max_commit_retries=0)


def _add(file: File, moment: datetime) -> AddAction:
    return AddAction(
        file.path, file.size, file.partition, int(moment.timestamp() * 1000), data_change=True, stats=_statistics(file)
    )


def _remove(file: File, moment: datetime) -> RemoveAction:
    return RemoveAction(
        path=file.path,
        data_change=True,
        deletion_timestamp=int(moment.timestamp() * 1000),
        partition_values=dict(file.partition),
        size=file.size,
    )


def _statistics(file: File) -> str:
    """Return the file's statistics in Delta's format, which Delta readers use for pruning."""
    columns = file.columns
    stats: dict[str, Any] = {
        "numRecords": file.rows,
        "minValues": {name: column.min for name, column in columns.items() if column.min is not None},
        "maxValues": {name: column.max for name, column in columns.items() if column.max is not None},
        "nullCount": {name: column.nulls for name, column in columns.items() if column.nulls is not None},
    }
    return orjson.dumps(stats).decode()


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Translate deltalake's errors into Tarn's."""
    try:
        yield
    except CommitFailedError as error:
        raise CommitRefused from error
    except (DeltaError, TableNotFoundError, OSError) as error:
        if "No space left" in str(error) or "StorageFull" in str(error):
            raise StorageFull("the store has no space left") from error
        raise Unavailable(f"cannot access the Delta table: {type(error).__name__}", retry_after=2) from error
