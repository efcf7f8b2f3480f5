"""The two Delta tables of a dataset: their columns, and the one way in which they are changed.

deltalake is given no retries of its own: it would rebase silently on a stranger's commit. So a commit makes exactly the
version after the one that was loaded, or is refused.
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
from tarn.model.ids import now
from tarn.model.snapshot import File, Table, TableName
from tarn.storage.store import Store

CHECKPOINT_EVERY = 10
"""Versions of a log after which deltalake sums it up, so that opening a table stays cheap."""

CONFIGURATION = {
    # Delta's own clean-up would delete versions that snapshots pin.
    "delta.enableExpiredLogCleanup": "false",
    "delta.checkpointInterval": str(CHECKPOINT_EVERY),
}

NONE = -1
"""The version of a table that is not there. A dataset without snapshots has its tables at this one."""

_SCHEMAS = {name: Schema.from_arrow(schema) for name, schema in SCHEMAS.items()}
_HOOKS = PostCommitHookProperties(cleanup_expired_logs=False)


class CommitRefused(Exception):
    """Another writer's commit is at the version that ours was to have."""


class DeltaStore:
    """The tables of datasets on one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def is_ahead(self, dataset: Dataset, table: TableName, version: int) -> bool:
        """Whether the table's log goes on after a version: one call, whatever its length."""
        return self._store.head(self._entry(dataset, table, version + 1)) is not None

    def restore(self, dataset: Dataset, table: TableName, version: int, why: dict[str, str]) -> int:
        """Put a table back to a version, in a commit of its own, and return the version which that made.

        Raises Refused if another writer was first.
        """
        with _answering():
            loaded = DeltaTable(self._uri(dataset, table), storage_options=self._options())
            # Not the version that it has afterwards: that may be of another writer, who came right after us.
            before = int(loaded.version())
            if version == NONE:
                # Without files there is nothing to delete, and no commit.
                made = before + (1 if loaded.file_uris() else 0)
                loaded.delete(commit_properties=_properties(why), post_commithook_properties=_HOOKS)
            else:
                made = before + 1
                loaded.restore(version, commit_properties=_properties(why), post_commithook_properties=_HOOKS)
        self.sync(dataset, {table: made})
        return made

    def commit(
        self,
        dataset: Dataset,
        table: TableName,
        version: int,
        added: Sequence[File],
        removed: Sequence[File],
        note: dict[str, str],
    ) -> int:
        """Add and remove files in one commit on a version, and return the next one. Raises Refused.

        A table that is not there yet is made with its first files. On a disk it is durable after `sync`.
        """
        moment = now()
        adds = [_add(file, moment) for file in added]
        with _answering():
            if version == NONE:
                self._make(dataset, table, adds, note)
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

    def sync(self, dataset: Dataset, made: Mapping[TableName, int]) -> None:
        """Make log entries durable, and the checkpoints that deltalake may have made after them."""
        written = []
        for table, version in made.items():
            written.append(self._entry(dataset, table, version))
            # It counts versions, and the first of them is 0.
            if (version + 1) % CHECKPOINT_EVERY == 0:
                written += dataset.layout.delta_checkpoint(folder_of(dataset, table), version)
        self._store.sync(written)

    def _make(self, dataset: Dataset, table: TableName, adds: list[AddAction], note: dict[str, str]) -> None:
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
            # Somebody else's table has no error of its own.
            if self.is_ahead(dataset, table, NONE):
                raise CommitRefused from error
            raise

    def _uri(self, dataset: Dataset, table: TableName) -> str:
        return self._store.connection.table_uri(folder_of(dataset, table))

    def _entry(self, dataset: Dataset, table: TableName, version: int) -> str:
        return dataset.layout.delta_log(folder_of(dataset, table), version)

    def _options(self) -> dict[str, str]:
        return self._store.connection.delta_options()


def after(parent: Table | None, version: int, added: Sequence[File], removed: Sequence[str]) -> Table:
    """A table as a snapshot has it, from the parent's and what changes."""
    gone = set(removed)
    kept = tuple(file for file in parent.files if file.path not in gone) if parent is not None else ()
    return Table(
        version=version,
        files=(*kept, *added),
        added=tuple(file.path for file in added),
        removed=tuple(removed),
    )


def folder_of(dataset: Dataset, table: TableName) -> str:
    return dataset.layout.statements if table == "statements" else dataset.layout.translog


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
    """What Delta readers prune by, in Delta's own form."""
    columns = file.columns
    found: dict[str, Any] = {
        "numRecords": file.rows,
        "minValues": {name: column.min for name, column in columns.items() if column.min is not None},
        "maxValues": {name: column.max for name, column in columns.items() if column.max is not None},
        "nullCount": {name: column.nulls for name, column in columns.items() if column.nulls is not None},
    }
    return orjson.dumps(found).decode()


@contextmanager
def _answering() -> Iterator[None]:
    """Errors of deltalake in our own terms."""
    try:
        yield
    except CommitFailedError as error:
        raise CommitRefused from error
    except (DeltaError, TableNotFoundError, OSError) as error:
        if "No space left" in str(error) or "StorageFull" in str(error):
            raise StorageFull("the store has no room left") from error
        raise Unavailable(f"the Delta table cannot be used: {type(error).__name__}", retry_after=2) from error
