"""Clean-up of Delta logs: find the entries and checkpoints that no kept snapshot needs.

Delta's own clean-up goes by age and is disabled: it would delete versions that snapshots pin. Opening a version needs
the newest checkpoint at or below it, and the entries from there on.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import structlog
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from tarn.datasets.registry import Dataset
from tarn.errors import Unavailable
from tarn.lake.delta_tables import CHECKPOINT_EVERY
from tarn.model.datasets.snapshot import Table, TableName
from tarn.model.work.cancellation import checked
from tarn.storage.store import Entry, Store

log = structlog.get_logger(__name__)

LOG_FILE = re.compile(r"(\d{20})\.(json|checkpoint\.parquet)")


class LogFile(NamedTuple):
    """A file of a Delta log: the entry of a version, or a checkpoint."""

    version: int
    is_checkpoint: bool
    entry: Entry


class DeltaLogs:
    """The Delta logs of the datasets on one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def unneeded_entries(
        self,
        dataset: Dataset,
        table: TableName,
        oldest: Table,
        *,
        change: bool = True,
        checkpoint_every: int = CHECKPOINT_EVERY,
    ) -> list[Entry]:
        """Return the files of a log that are not needed to open this state of the table or a later one, oldest first.

        With `change`, write a checkpoint if the last one is `checkpoint_every` or more versions back. The state is
        opened before anything is reported, so that a damaged checkpoint never leads to deletions: the result is then
        empty.
        """
        folder = dataset.layout.table(table)
        files = list(self._list_log(folder))
        checkpoint = max(
            (file.version for file in files if file.is_checkpoint and file.version <= oldest.version), default=-1
        )
        is_first = all(file.version >= oldest.version for file in files)
        if change and not is_first and oldest.version - checkpoint >= checkpoint_every:
            self._checkpoint(dataset, folder, oldest.version)
            checkpoint = oldest.version
        unneeded_entries = [file.entry for file in files if file.version < checkpoint]
        if unneeded_entries and not self._matches(folder, oldest):
            log.error(
                "a Delta table does not match its snapshot; its log is not cleaned up",
                dataset=dataset.name,
                table=table,
            )
            return []
        if unneeded_entries:
            self._store.sync(dataset.layout.delta_checkpoint(folder, checkpoint))
        return unneeded_entries

    def _list_log(self, folder: str) -> Iterator[LogFile]:
        for entry in checked(self._store.list(f"{folder}/_delta_log")):
            if (match := LOG_FILE.fullmatch(entry.path.rsplit("/", 1)[-1])) is not None:
                yield LogFile(int(match[1]), match[2] != "json", entry)

    def _checkpoint(self, dataset: Dataset, folder: str, version: int) -> None:
        try:
            self._table(folder, version).create_checkpoint()
        except (DeltaError, TableNotFoundError, OSError) as error:
            raise Unavailable(
                f"cannot write a checkpoint of the Delta log: {type(error).__name__}", retry_after=2
            ) from error
        self._store.sync(dataset.layout.delta_checkpoint(folder, version))

    def _matches(self, folder: str, pinned: Table) -> bool:
        try:
            listed = self._table(folder, pinned.version).file_uris()
        except (DeltaError, TableNotFoundError, OSError):
            return False
        return {_name(uri) for uri in listed} == {_name(file.path) for file in pinned.files}

    def _table(self, folder: str, version: int) -> DeltaTable:
        connection = self._store.connection
        return DeltaTable(connection.table_uri(folder), version=version, storage_options=connection.delta_options())


def _name(path: str) -> str:
    """Return a data file's own name, which is unique: writers differ in how they quote the folders before it."""
    return path.rsplit("/", 1)[-1]
