"""Checks of the data files that kept snapshots name: presence, size, checksum, Parquet footer, columns and rows.

The folders are listed once. Of each file only the footer is read; all of it only if there is a checksum to compare.
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
from tarn.lake.recorded_history import is_kept
from tarn.lake.table_schemas import PARTITIONED, SCHEMAS
from tarn.model.datasets.finding import FindingKind
from tarn.model.datasets.snapshot import File, Snapshot, TableName
from tarn.model.work.cancellation import checked, current
from tarn.model.work.job import Progress, Report
from tarn.storage.store import ObjectMissing, Store

AT_ONCE = 8
"""Files that are read concurrently."""

STEP = 200
"""Files between two progress reports."""

TAIL = 64 << 10
"""Bytes at the end of a file that are read first, to get its footer."""

ENDING = 8
"""Bytes after the footer: its length, and Parquet's magic number."""

Wrong = tuple[FindingKind, str] | None


class ReferencedFile(NamedTuple):
    """A file that a kept snapshot names."""

    table: TableName
    file: File
    last: int
    """The number of the newest snapshot that names it, which is kept the longest."""


class ReferencedFiles:
    """The files that kept snapshots name, by path in the lake."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.files: dict[str, ReferencedFile] = {}

    def add(self, snapshot: Snapshot) -> None:
        """Add the files of a snapshot. Snapshots must be added oldest first."""
        for table in TABLES:
            folder = self._dataset.layout.table(table)
            for file in snapshot.table(table).files:
                self.files[f"{folder}/{file.path}"] = ReferencedFile(table, file, snapshot.seq)

    @property
    def size(self) -> int:
        return sum(referenced.file.size for referenced in self.files.values())


def check(
    database: Database, store: Store, dataset: Dataset, named: ReferencedFiles, findings: Findings, report: Report
) -> set[str]:
    """Add a finding for every damaged file, and return the paths of those that cannot be read safely."""
    sizes = {
        entry.path: entry.size
        for table in TABLES
        for entry in checked(store.list(dataset.layout.table(table)))
        if entry.path in named.files
    }
    cancellation = current()

    def check_one(one: tuple[str, ReferencedFile]) -> Wrong:
        with cancellation.active():  # in a thread of the pool
            return _problem(store, one[0], one[1], sizes.get(one[0]))

    broken: set[str] = set()
    left = iter(sorted(named.files.items()))
    done = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while some := list(islice(left, STEP)):
            report(Progress(done=done, total=len(named.files), unit="files"))
            problems = pool.map(check_one, some)
            for (path, referenced), wrong in zip(some, checked(problems), strict=True):
                if wrong is None:
                    continue
                broken.add(path)
                # A vacuum may have deleted it meanwhile, with the last snapshot that names it.
                if wrong[0] is not FindingKind.FILE_MISSING or is_kept(database, dataset, referenced.last):
                    findings.add(*wrong, path)
            done += len(some)
    return broken


def _problem(store: Store, path: str, referenced: ReferencedFile, size: int | None) -> Wrong:
    """Return the first problem of a file, or None."""
    file = referenced.file
    if size is None:
        entry = store.head(path)
        if entry is None:
            return FindingKind.FILE_MISSING, f"snapshot {referenced.last} names it, but it is missing"
        size = entry.size
    if size != file.size:
        return FindingKind.FILE_SIZE, f"it has {size} bytes instead of {file.size}"
    try:
        if file.checksum is not None and _digest(store.stream(path)) != file.checksum:
            return FindingKind.FILE_CHECKSUM, "its checksum differs from the one that was recorded when it was written"
        footer = _footer(store, path, size)
    except ObjectMissing:
        return FindingKind.FILE_MISSING, f"snapshot {referenced.last} names it, but it is missing"
    return _mismatch(footer, referenced)


def _digest(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in checked(chunks):
        digest.update(chunk)
    return digest.hexdigest()


def _footer(store: Store, path: str, size: int) -> bytes:
    """Return the bytes of a Parquet file's footer, or arbitrary bytes if it is not Parquet."""
    tail = store.get_range(path, max(0, size - TAIL), size)
    needed = int.from_bytes(tail[-ENDING : 4 - ENDING], "little") + ENDING
    if len(tail) < needed <= size:
        tail = store.get_range(path, size - needed, size)
    return tail[-needed:]


def _mismatch(footer: bytes, referenced: ReferencedFile) -> Wrong:
    try:
        metadata = pq.read_metadata(pa.BufferReader(footer))
        schema = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        return FindingKind.FILE_UNREADABLE, f"its footer cannot be read: {str(error).splitlines()[0]}"
    if list(_columns(schema)) != list(_columns(SCHEMAS[referenced.table], PARTITIONED[referenced.table])):
        return FindingKind.FILE_SCHEMA, f"its columns differ from those of {referenced.table}"
    if metadata.num_rows != referenced.file.rows:
        return FindingKind.FILE_ROWS, f"it has {metadata.num_rows} rows instead of {referenced.file.rows}"
    return None


def _columns(schema: pa.Schema, partition: str | None = None) -> Iterator[tuple[str, pa.DataType]]:
    return ((field.name, field.type) for field in schema if field.name != partition)
