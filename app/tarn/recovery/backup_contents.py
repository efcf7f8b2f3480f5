"""The objects of a dataset that a backup needs: exactly what the database names at the dump, and current documents.

While a backup is made, others flush, compact and vacuum. So of snapshots, data files and Delta logs only those of the
moment of the dump are taken: a later manifest would name files that did not exist when the folders were listed.
Everything else has a name of its own in the lake, and does not depend on a snapshot.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import orjson
from sqlalchemy import Connection

from tarn.datasets import registry
from tarn.datasets.head import recorded_head
from tarn.datasets.registry import Dataset
from tarn.errors import ManifestInvalid
from tarn.lake import retention, snapshots
from tarn.lake.commit import TABLES
from tarn.lake.delta_logs import LOG_FILE
from tarn.lake.delta_tables import NONE
from tarn.model.datasets.recovery import MissingFile
from tarn.model.datasets.snapshot import Head, Snapshot, TableName
from tarn.model.names import Checksum
from tarn.storage.store import Entry, ObjectMissing, Store

READERS = 8
"""Manifests that are read concurrently."""

MANIFEST = re.compile(r"(\d{12,})\.json")
ARCHIVED = re.compile(r"archive/../../../([0-9a-f]{64})/(.+)")


class ArchivedFiles(NamedTuple):
    """The ids of the files in a dataset's archive, and the checksums of their contents."""

    ids: set[str]
    checksums: set[str]


class DumpedDataset(NamedTuple):
    """The state of a dataset at the moment of a dump."""

    dataset: Dataset
    head: Head
    first: int | None
    """The oldest snapshot that is kept."""


def dumped_datasets(connection: Connection) -> list[DumpedDataset]:
    """Return the state of every dataset, in the caller's transaction."""
    datasets = registry.page(connection, lambda _: True, None, None)
    return [
        DumpedDataset(one, recorded_head(connection, one), retention.first_kept(connection, one)) for one in datasets
    ]


class DatasetContents:
    """The objects of one dataset that a backup needs, and those of them that the lake lacks."""

    def __init__(self, store: Store, one: DumpedDataset, archived: ArchivedFiles) -> None:
        self._store = store
        self._archived = archived
        self._blobs: set[str] = set()
        """Checksums of the contents that exist."""
        self._dataset = one.dataset
        self._retained = range(0) if one.head.id is None or one.first is None else range(one.first, one.head.seq + 1)
        self._needed: dict[str, int] = {}
        """Sizes of the data files not yet listed, by path."""
        self._oldest: dict[TableName, int] = dict.fromkeys(TABLES, NONE)
        self._newest: dict[TableName, int] = dict.fromkeys(TABLES, NONE)
        self._logged: dict[TableName, set[tuple[int, bool]]] = {table: set() for table in TABLES}
        self.missing: list[MissingFile] = []

    def entries(self) -> Iterator[Entry]:
        """Yield the needed objects in the order of the listing. At the end `missing` lists the missing ones."""
        self._read_manifests()
        has_config = False
        for entry in self._store.list(self._dataset.layout.root):
            if self._is_needed(entry):
                has_config |= entry.path == self._dataset.layout.config
                yield entry
        for checksum in sorted(self._archived.checksums - self._blobs):
            self._add_missing(
                self._dataset.layout.blob_data(Checksum(checksum)), "a file has this content, but it is missing"
            )
        if not has_config:
            self._add_missing(self._dataset.layout.config, "the dataset's configuration is missing")
        for path in self._needed:
            self._add_missing(path, "a kept snapshot names it, but it is missing")
        for table in TABLES:
            self._check_log(table)

    def record_deleted(self, entry: Entry) -> None:
        """Record that an object was deleted after it was listed. Mirrors, records and former versions may be."""
        layout = self._dataset.layout
        required = (layout.statements, layout.translog, layout.snapshots, layout.config)
        if entry.path.startswith(required) or (entry.path.startswith(layout.archive) and entry.path.endswith("/data")):
            self._add_missing(entry.path, "it was deleted while it was copied")

    def _add_missing(self, path: str, detail: str) -> None:
        self.missing.append(MissingFile(path=path, detail=detail))

    def _read_manifests(self) -> None:
        def read(seq: int) -> Snapshot | None:
            try:
                return snapshots.read(self._store, self._dataset, seq)
            except ManifestInvalid as error:
                self._add_missing(self._dataset.layout.snapshot(seq), error.detail)
                return None

        with ThreadPoolExecutor(READERS) as pool:
            for manifest in pool.map(read, self._retained):
                if manifest is not None:
                    self._add(manifest)

    def _add(self, manifest: Snapshot) -> None:
        for table in TABLES:
            folder, reference = self._dataset.layout.table(table), manifest.table(table)
            self._needed.update({f"{folder}/{file.path}": file.size for file in reference.files})
            if self._oldest[table] == NONE:
                self._oldest[table] = reference.version
            self._newest[table] = reference.version

    def _is_needed(self, entry: Entry) -> bool:
        path, layout = entry.path, self._dataset.layout
        for table in TABLES:
            folder = self._dataset.layout.table(table)
            if path.startswith(f"{folder}/_delta_log/"):
                return self._is_logged(table, path)
            if path.startswith(f"{folder}/"):
                return self._needed.pop(path, None) == entry.size
        if path.startswith(f"{layout.snapshots}/"):
            named = MANIFEST.fullmatch(path.rsplit("/", 1)[-1])
            return named is None or int(named[1]) in self._retained
        if match := ARCHIVED.fullmatch(path.removeprefix(f"{layout.root}/")):
            return self._is_archived(match[1], match[2])
        return path != layout.lock and not path.startswith(f"{layout.export_parts}/")

    def _is_archived(self, checksum: str, name: str) -> bool:
        """Return whether an object of the archive belongs to a file of the dump: a later record would bring its file
        back."""
        if name == "data":
            self._blobs.add(checksum)
        is_record = name.endswith(".json")
        return checksum in self._archived.checksums and (not is_record or name[: -len(".json")] in self._archived.ids)

    def _is_logged(self, table: TableName, path: str) -> bool:
        """Return whether an entry of a log belongs to the version that the head pins, or to an earlier one."""
        if (named := LOG_FILE.fullmatch(path.rsplit("/", 1)[-1])) is not None:
            version = int(named[1])
            self._logged[table].add((version, named[2] != "json"))
        else:
            version = self._last_checkpoint(path)
        return version <= self._newest[table]

    def _last_checkpoint(self, path: str) -> int:
        """Return the version that the hint to the last checkpoint names; if invalid, one that is never needed."""
        try:
            return int(orjson.loads(self._store.get(path))["version"])
        except (ObjectMissing, ValueError, KeyError, TypeError):
            return 1 << 62

    def _check_log(self, table: TableName) -> None:
        """Check that the log opens at every pinned version: entries without a gap, from a checkpoint on."""
        oldest, newest = self._oldest[table], self._newest[table]
        if newest == NONE:
            return
        logged = self._logged[table]
        begin = max(
            (version + 1 for version, is_checkpoint in logged if is_checkpoint and version <= oldest), default=0
        )
        for version in range(begin, newest + 1):
            if (version, False) not in logged:
                path = self._dataset.layout.delta_log(self._dataset.layout.table(table), version)
                self._add_missing(path, f"{table} cannot be opened without it at a version that a kept snapshot pins")
