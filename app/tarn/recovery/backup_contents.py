"""What belongs to a backup of a dataset: exactly what the database names at one moment, and documents as they are.

While a backup is made others flush, compact and vacuum. So of snapshots, data files and Delta logs only that is taken
which belongs to the moment of the dump: a manifest of later would name files that were listed before they were there.
Everything else lies in the lake under its own name, and says nothing of a snapshot.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import orjson
from sqlalchemy import Connection

from tarn.datasets import registry as datasets
from tarn.datasets.registry import Dataset
from tarn.errors import ManifestInvalid
from tarn.lake import retention, snapshots
from tarn.lake.commit import TABLES
from tarn.lake.delta_logs import LOG_FILE
from tarn.lake.delta_tables import NONE, folder_of
from tarn.model.names import Checksum
from tarn.model.recovery import Lacking
from tarn.model.snapshot import Head, Snapshot, TableName
from tarn.storage.store import Entry, Missing, Store

READERS = 8
"""Manifests that are read at once."""

MANIFEST = re.compile(r"(\d{12,})\.json")
ARCHIVED = re.compile(r"archive/../../../([0-9a-f]{64})/(.+)")


class ArchivedFiles(NamedTuple):
    """The files of a dataset's archive: their ids, and the checksums of their contents."""

    ids: set[str]
    checksums: set[str]


class DumpedDataset(NamedTuple):
    """A dataset at the moment of a dump."""

    dataset: Dataset
    head: Head
    first: int | None
    """The oldest snapshot that is kept."""


def dumped_datasets(connection: Connection) -> list[DumpedDataset]:
    """Every dataset there is, in the caller's transaction."""
    found = datasets.page(connection, lambda _: True, None, None)
    return [
        DumpedDataset(one, snapshots.recorded(connection, one), retention.first_kept(connection, one)) for one in found
    ]


class DatasetContents:
    """What a dataset has that a backup needs, and what of it the lake does not have."""

    def __init__(self, store: Store, one: DumpedDataset, archived: ArchivedFiles) -> None:
        self._store = store
        self._archived = archived
        self._blobs: set[str] = set()
        """Checksums of the contents that are there."""
        self._dataset = one.dataset
        self._kept = range(0) if one.head.id is None or one.first is None else range(one.first, one.head.seq + 1)
        self._needed: dict[str, int] = {}
        """Data files by path, with their sizes, until they are found."""
        self._oldest: dict[TableName, int] = dict.fromkeys(TABLES, NONE)
        self._newest: dict[TableName, int] = dict.fromkeys(TABLES, NONE)
        self._logged: dict[TableName, set[tuple[int, bool]]] = {table: set() for table in TABLES}
        self.lacking: list[Lacking] = []

    def entries(self) -> Iterator[Entry]:
        """The objects that are needed, as they are found. At the end `lacking` says what is not there."""
        self._read_manifests()
        has_config = False
        for entry in self._store.list(self._dataset.layout.root):
            if self._is_needed(entry):
                has_config |= entry.path == self._dataset.layout.config
                yield entry
        for checksum in sorted(self._archived.checksums - self._blobs):
            self.lack(
                self._dataset.layout.blob_data(Checksum(checksum)), "a file has this content, and it is not there"
            )
        if not has_config:
            self.lack(self._dataset.layout.config, "it says what the dataset is, and is not there")
        for path in self._needed:
            self.lack(path, "a kept snapshot names it, and it is not there")
        for table in TABLES:
            self._check_log(table)

    def went_away(self, entry: Entry) -> None:
        """An object was deleted after it was listed. Mirrors, records and former versions may be."""
        layout = self._dataset.layout
        vital = (layout.statements, layout.translog, layout.snapshots, layout.config)
        if entry.path.startswith(vital) or (entry.path.startswith(layout.archive) and entry.path.endswith("/data")):
            self.lack(entry.path, "it went away while it was copied")

    def lack(self, path: str, detail: str) -> None:
        self.lacking.append(Lacking(path=path, detail=detail))

    def _read_manifests(self) -> None:
        def read(seq: int) -> Snapshot | None:
            try:
                return snapshots.read(self._store, self._dataset, seq)
            except ManifestInvalid as error:
                self.lack(self._dataset.layout.snapshot(seq), error.detail)
                return None

        with ThreadPoolExecutor(READERS) as pool:
            for manifest in pool.map(read, self._kept):
                if manifest is not None:
                    self._add(manifest)

    def _add(self, manifest: Snapshot) -> None:
        for table in TABLES:
            folder, made = folder_of(self._dataset, table), manifest.table(table)
            self._needed.update({f"{folder}/{file.path}": file.size for file in made.files})
            if self._oldest[table] == NONE:
                self._oldest[table] = made.version
            self._newest[table] = made.version

    def _is_needed(self, entry: Entry) -> bool:
        path, layout = entry.path, self._dataset.layout
        for table in TABLES:
            folder = folder_of(self._dataset, table)
            if path.startswith(f"{folder}/_delta_log/"):
                return self._is_logged(table, path)
            if path.startswith(f"{folder}/"):
                return self._needed.pop(path, None) == entry.size
        if path.startswith(f"{layout.snapshots}/"):
            named = MANIFEST.fullmatch(path.rsplit("/", 1)[-1])
            return named is None or int(named[1]) in self._kept
        if found := ARCHIVED.fullmatch(path.removeprefix(f"{layout.root}/")):
            return self._is_archived(found[1], found[2])
        return path != layout.lock and not path.startswith(f"{layout.export_parts}/")

    def _is_archived(self, checksum: str, name: str) -> bool:
        """Whether what lies in the archive is of a file that the dump has: a record of later would bring its file
        back."""
        if name == "data":
            self._blobs.add(checksum)
        is_record = name.endswith(".json")
        return checksum in self._archived.checksums and (not is_record or name[: -len(".json")] in self._archived.ids)

    def _is_logged(self, table: TableName, path: str) -> bool:
        """Whether an entry of a log is of a version that the head pins, or of an earlier one."""
        if (named := LOG_FILE.fullmatch(path.rsplit("/", 1)[-1])) is not None:
            version = int(named[1])
            self._logged[table].add((version, named[2] != "json"))
        else:
            version = self._last_checkpoint(path)
        return version <= self._newest[table]

    def _last_checkpoint(self, path: str) -> int:
        """The version that the hint at a checkpoint tells; one that is none is left out."""
        try:
            return int(orjson.loads(self._store.get(path))["version"])
        except (Missing, ValueError, KeyError, TypeError):
            return 1 << 62

    def _check_log(self, table: TableName) -> None:
        """Whether the log opens at every version that is pinned: from a checkpoint on, entries without a gap."""
        oldest, newest = self._oldest[table], self._newest[table]
        if newest == NONE:
            return
        logged = self._logged[table]
        begin = max(
            (version + 1 for version, is_checkpoint in logged if is_checkpoint and version <= oldest), default=0
        )
        for version in range(begin, newest + 1):
            if (version, False) not in logged:
                path = self._dataset.layout.delta_log(folder_of(self._dataset, table), version)
                self.lack(path, f"{table} does not open without it at a version that a kept snapshot pins")
