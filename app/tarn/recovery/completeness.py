"""Which snapshots the lake has whole: their manifest, every file that they name, and logs that open where they pin."""

from collections.abc import Iterator

from tarn.datasets.registry import Dataset
from tarn.errors import ManifestInvalid
from tarn.integrity.delta_checks import UnreadableTable, sizes_at
from tarn.lake import snapshots
from tarn.lake.commit import TABLES
from tarn.lake.delta_logs import LOG_FILE
from tarn.lake.delta_tables import NONE, folder_of
from tarn.model.snapshot import Snapshot, TableName
from tarn.storage.store import Store


class StoredSnapshots:
    """What the lake has of a dataset's snapshots, listed once, while nobody writes."""

    def __init__(self, store: Store, dataset: Dataset) -> None:
        self._store = store
        self._dataset = dataset
        self._sizes: dict[str, int] = {}
        self._logged: dict[TableName, set[tuple[int, bool]]] = {table: set() for table in TABLES}
        for table in TABLES:
            folder = folder_of(dataset, table)
            for entry in store.list(folder):
                named = LOG_FILE.fullmatch(entry.path.rsplit("/", 1)[-1])
                if named is not None and entry.path.startswith(f"{folder}/_delta_log/"):
                    self._logged[table].add((int(named[1]), named[2] != "json"))
                else:
                    self._sizes[entry.path] = entry.size
        self.numbers = sorted(self._listed())

    def own(self, seq: int) -> Snapshot | None:
        """The manifest with a number, if it can be read and is of this dataset."""
        try:
            found = snapshots.read_if_exists(self._store, self._dataset, seq)
        except ManifestInvalid:
            return None
        is_own = found is not None and (found.dataset_id, found.seq) == (self._dataset.id, seq)
        return found if is_own else None

    def lacks(self, manifest: Snapshot) -> str | None:
        """The first thing that is missing of a snapshot; None: it is whole, as far as names and sizes tell."""
        for table in TABLES:
            folder, made = folder_of(self._dataset, table), manifest.table(table)
            for file in made.files:
                size = self._sizes.get(f"{folder}/{file.path}")
                if size != file.size:
                    said = "is not there" if size is None else f"has {size} bytes instead of {file.size}"
                    return f"{folder}/{file.path} {said}"
            if (version := self._gap(table, made.version)) is not None:
                return f"{self._dataset.layout.delta_log(folder, version)} is not there"
        return None

    def differs(self, manifest: Snapshot) -> str | None:
        """What is wrong with a whole snapshot's tables, opened."""
        for table in TABLES:
            made = manifest.table(table)
            try:
                listed = sizes_at(self._store, self._dataset, table, made.version)
            except UnreadableTable as error:
                return f"{table} does not open at version {made.version}: {error}"
            if listed != {file.path: file.size for file in made.files}:
                return f"{table} has other files at version {made.version}"
        return None

    def _gap(self, table: TableName, version: int) -> int | None:
        """The first entry that the log lacks to be opened at a version."""
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
