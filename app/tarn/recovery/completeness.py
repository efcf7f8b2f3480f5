"""Completeness of snapshots in the lake: the manifest, the files it names, and Delta logs that open at its versions."""

from collections.abc import Iterator

from tarn.datasets.registry import Dataset
from tarn.errors import ManifestInvalid
from tarn.integrity.delta_checks import UnreadableTable, sizes_at
from tarn.lake import snapshots
from tarn.lake.commit import TABLES
from tarn.lake.delta_logs import LOG_FILE
from tarn.lake.delta_tables import NONE
from tarn.model.datasets.snapshot import Snapshot, TableName
from tarn.storage.store import Store


class StoredSnapshots:
    """The objects of a dataset's snapshots in the lake, listed once, while no process writes."""

    def __init__(self, store: Store, dataset: Dataset) -> None:
        self._store = store
        self._dataset = dataset
        self._sizes: dict[str, int] = {}
        self._logged: dict[TableName, set[tuple[int, bool]]] = {table: set() for table in TABLES}
        for table in TABLES:
            folder = dataset.layout.table(table)
            for entry in store.list(folder):
                named = LOG_FILE.fullmatch(entry.path.rsplit("/", 1)[-1])
                if named is not None and entry.path.startswith(f"{folder}/_delta_log/"):
                    self._logged[table].add((int(named[1]), named[2] != "json"))
                else:
                    self._sizes[entry.path] = entry.size
        self.numbers = sorted(self._listed())

    def readable_manifest(self, seq: int) -> Snapshot | None:
        """Return the manifest with a number if it can be read and belongs to this dataset, else None."""
        try:
            manifest = snapshots.read_if_exists(self._store, self._dataset, seq)
        except ManifestInvalid:
            return None
        is_own = manifest is not None and (manifest.dataset_id, manifest.seq) == (self._dataset.id, seq)
        return manifest if is_own else None

    def first_missing_part(self, manifest: Snapshot) -> str | None:
        """Return the first missing part of a snapshot, or None if it is complete by names and sizes."""
        for table in TABLES:
            folder, reference = self._dataset.layout.table(table), manifest.table(table)
            for file in reference.files:
                size = self._sizes.get(f"{folder}/{file.path}")
                if size != file.size:
                    problem = "is missing" if size is None else f"has {size} bytes instead of {file.size}"
                    return f"{folder}/{file.path} {problem}"
            if (version := self._gap(table, reference.version)) is not None:
                return f"{self._dataset.layout.delta_log(folder, version)} is missing"
        return None

    def table_difference(self, manifest: Snapshot) -> str | None:
        """Open the tables of a complete snapshot, and return how they differ from its manifest, or None."""
        for table in TABLES:
            reference = manifest.table(table)
            try:
                listed = sizes_at(self._store, self._dataset, table, reference.version)
            except UnreadableTable as error:
                return f"cannot open {table} at version {reference.version}: {error}"
            if listed != {file.path: file.size for file in reference.files}:
                return f"{table} has different files at version {reference.version}"
        return None

    def _gap(self, table: TableName, version: int) -> int | None:
        """Return the first entry that the log lacks to be opened at a version, or None."""
        if version == NONE:
            return None
        logged = self._logged[table]
        begin = max((one + 1 for one, is_checkpoint in logged if is_checkpoint and one <= version), default=0)
        return next((one for one in range(begin, version + 1) if (one, False) not in logged), None)

    def _listed(self) -> Iterator[int]:
        folder = self._dataset.layout.snapshots
        for entry in self._store.list(folder):
            name = entry.path.removeprefix(f"{folder}/").removesuffix(".json")
            if name.isdecimal() and entry.path == self._dataset.layout.snapshot(int(name)):
                yield int(name)
