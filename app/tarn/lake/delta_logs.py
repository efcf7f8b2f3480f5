"""Delta logs that do not grow for ever: entries that no kept snapshot needs.

Delta's own clean-up goes by age and is off: it would delete versions that snapshots pin. A reader of a version needs
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
from tarn.model.cancellation import checked
from tarn.model.snapshot import Table, TableName
from tarn.storage.store import Entry, Store

log = structlog.get_logger(__name__)

LOG_FILE = re.compile(r"(\d{20})\.(json|checkpoint\.parquet)")


class LogFile(NamedTuple):
    """A file of a log: the entry of a version, or the checkpoint at one."""

    version: int
    is_checkpoint: bool
    entry: Entry


class DeltaLogs:
    """The logs of datasets on one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def superfluous(
        self, dataset: Dataset, table: TableName, oldest: Table, *, change: bool = True, within: int = CHECKPOINT_EVERY
    ) -> list[Entry]:
        """The files of a log that nobody needs who opens this state of the table, or a later one, oldest first.

        With `change`, a checkpoint is made where the last one is not `within` so many versions. The state is opened
        first, with what would be left: whatever is wrong with its checkpoint, nothing is superfluous then.
        """
        folder = dataset.layout.statements if table == "statements" else dataset.layout.translog
        logged = list(self._logged(folder))
        checkpoint = max(
            (one.version for one in logged if one.is_checkpoint and one.version <= oldest.version), default=-1
        )
        is_first = all(one.version >= oldest.version for one in logged)
        if change and not is_first and oldest.version - checkpoint >= within:
            self._checkpoint(dataset, folder, oldest.version)
            checkpoint = oldest.version
        found = [one.entry for one in logged if one.version < checkpoint]
        if found and not self._opens(folder, oldest):
            log.error("a Delta table is not what its snapshot says", dataset=dataset.name, table=table)
            return []
        if found:
            self._store.sync(dataset.layout.delta_checkpoint(folder, checkpoint))
        return found

    def _logged(self, folder: str) -> Iterator[LogFile]:
        for entry in checked(self._store.list(f"{folder}/_delta_log")):
            if (named := LOG_FILE.fullmatch(entry.path.rsplit("/", 1)[-1])) is not None:
                yield LogFile(int(named[1]), named[2] != "json", entry)

    def _checkpoint(self, dataset: Dataset, folder: str, version: int) -> None:
        try:
            self._table(folder, version).create_checkpoint()
        except (DeltaError, TableNotFoundError, OSError) as error:
            raise Unavailable(f"the Delta log cannot be summed up: {type(error).__name__}", retry_after=2) from error
        self._store.sync(dataset.layout.delta_checkpoint(folder, version))

    def _opens(self, folder: str, pinned: Table) -> bool:
        try:
            opened = self._table(folder, pinned.version).file_uris()
        except (DeltaError, TableNotFoundError, OSError):
            return False
        return {_name(uri) for uri in opened} == {_name(file.path) for file in pinned.files}

    def _table(self, folder: str, version: int) -> DeltaTable:
        connection = self._store.connection
        return DeltaTable(connection.table_uri(folder), version=version, storage_options=connection.delta_options())


def _name(path: str) -> str:
    """A data file's own name, which no other has: writers differ in how they quote the folders before it."""
    return path.rsplit("/", 1)[-1]
