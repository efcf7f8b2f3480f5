"""Data files, looked over: that they are there, as large as they should be, and what they should be.

The folders are listed once. Of each file the footer is read; all of it only where there is a checksum to compare.
"""

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.integrity.findings import Findings
from tarn.lake.commit import TABLES
from tarn.lake.delta_tables import folder_of
from tarn.lake.recorded_history import is_kept
from tarn.lake.table_schemas import PARTITIONED, SCHEMAS
from tarn.model.cancellation import checked, current
from tarn.model.finding import FindingKind
from tarn.model.job import Progress, Report
from tarn.model.snapshot import File, Snapshot, TableName
from tarn.storage.store import Missing, Store

AT_ONCE = 8
"""Files that are read at once."""

STEP = 200
"""Files between two reports."""

TAIL = 64 << 10
"""Bytes of a file's end that are read for its footer, at first."""

ENDING = 8
"""Bytes after the footer: its length, and what shows that this is Parquet."""

Wrong = tuple[FindingKind, str] | None


class ReferencedFile(NamedTuple):
    """A file that a kept snapshot names."""

    table: TableName
    file: File
    last: int
    """The number of the newest snapshot that does: it is kept for longest."""


class ReferencedFiles:
    """Every file that kept snapshots name, by its path in the lake."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.files: dict[str, ReferencedFile] = {}

    def add(self, snapshot: Snapshot) -> None:
        """Add the files of a snapshot that is newer than those before."""
        for table in TABLES:
            folder = folder_of(self._dataset, table)
            for file in snapshot.table(table).files:
                self.files[f"{folder}/{file.path}"] = ReferencedFile(table, file, snapshot.seq)

    @property
    def size(self) -> int:
        return sum(wanted.file.size for wanted in self.files.values())


def check(
    database: Database, store: Store, dataset: Dataset, named: ReferencedFiles, found: Findings, report: Report
) -> set[str]:
    """Tell what is wrong with the files, and return the paths of those that cannot be trusted."""
    sizes = {
        entry.path: entry.size
        for table in TABLES
        for entry in checked(store.list(folder_of(dataset, table)))
        if entry.path in named.files
    }
    cancellation = current()

    def look(one: tuple[str, ReferencedFile]) -> Wrong:
        with cancellation.active():  # in a thread of the pool
            return _problem(store, one[0], one[1], sizes.get(one[0]))

    broken: set[str] = set()
    left = iter(sorted(named.files.items()))
    done = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while some := list(islice(left, STEP)):
            report(Progress(done=done, total=len(named.files), unit="files"))
            looked = pool.map(look, some)
            for (path, wanted), wrong in zip(some, checked(looked), strict=True):
                if wrong is None:
                    continue
                broken.add(path)
                # A vacuum may have taken it meanwhile, with the last snapshot that names it.
                if wrong[0] is not FindingKind.FILE_MISSING or is_kept(database, dataset, wanted.last):
                    found.add(*wrong, path)
            done += len(some)
    return broken


def _problem(store: Store, path: str, wanted: ReferencedFile, size: int | None) -> Wrong:
    """The first thing that is wrong with a file."""
    file = wanted.file
    if size is None:
        entry = store.head(path)
        if entry is None:
            return FindingKind.FILE_MISSING, f"snapshot {wanted.last} names it, and it is not there"
        size = entry.size
    if size != file.size:
        return FindingKind.FILE_SIZE, f"it has {size} bytes, and should have {file.size}"
    try:
        if file.checksum is not None and _digest(store.stream(path)) != file.checksum:
            return FindingKind.FILE_CHECKSUM, "its bytes are not those that were written"
        footer = _footer(store, path, size)
    except Missing:
        return FindingKind.FILE_MISSING, f"snapshot {wanted.last} names it, and it is not there"
    return _mismatch(footer, wanted)


def _digest(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in checked(chunks):
        digest.update(chunk)
    return digest.hexdigest()


def _footer(store: Store, path: str, size: int) -> bytes:
    """The bytes at the end of a file that say what is in it, or what should be those."""
    tail = store.get_range(path, max(0, size - TAIL), size)
    needed = int.from_bytes(tail[-ENDING : 4 - ENDING], "little") + ENDING
    if len(tail) < needed <= size:
        tail = store.get_range(path, size - needed, size)
    return tail[-needed:]


def _mismatch(footer: bytes, wanted: ReferencedFile) -> Wrong:
    try:
        metadata = pq.read_metadata(pa.BufferReader(footer))
        schema = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        return FindingKind.FILE_UNREADABLE, f"its footer cannot be read: {str(error).splitlines()[0]}"
    if list(_columns(schema)) != list(_columns(SCHEMAS[wanted.table], PARTITIONED[wanted.table])):
        return FindingKind.FILE_SCHEMA, f"its columns are not those of {wanted.table}"
    if metadata.num_rows != wanted.file.rows:
        return FindingKind.FILE_ROWS, f"it has {metadata.num_rows} rows, and should have {wanted.file.rows}"
    return None


def _columns(schema: pa.Schema, partition: str | None = None) -> Iterator[tuple[str, pa.DataType]]:
    return ((field.name, field.type) for field in schema if field.name != partition)
