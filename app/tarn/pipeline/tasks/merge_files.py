"""Fold and copy tasks: merge files of the tables into fewer, or copy their rows unchanged.

Live rows are defined in `tarn.lake.live`. Rows and marks are matched by key, and a row that moved to another key left a
mark under its old key; so a key range can be folded independently of all others. The `ord` of a live row is that of the
last event on its statement, so that later events still count as later.
"""

# ruff: noqa: S608 - composed of constants, validated names and paths

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa

from tarn.lake.live import sql
from tarn.lake.scans import IDENTITY, MARK, ROW, PartitionFile, Scans, within
from tarn.model.datasets.ranges import Range
from tarn.model.datasets.snapshot import TableName, Tally
from tarn.pipeline.tasks.data_files import LARGEST_GROUP, ROW_GROUP
from tarn.pipeline.tasks.task import PendingFiles, TableTask, TaskContext
from tarn.storage.duckdb_sql import quote_literal
from tarn.storage.layout import DatasetLayout

STATEMENT = ("bucket", *ROW)
CHANGE = ("bucket", "canonical_id", "id", "entity_id", "origin", "first_seen", "last_seen", "deleted_at", "ord")


@dataclass(frozen=True, slots=True)
class FoldRange(TableTask):
    """Fold a range of keys: only its live rows are written."""

    within: Range
    statements: tuple[PartitionFile, ...]
    marks: tuple[PartitionFile, ...]
    """Files of the translog with the kinds `seen` and `delete`."""
    erased: tuple[str, ...] = ()
    """Entities that are left out, live or not."""

    def run(self, context: TaskContext) -> PendingFiles:
        return _RangeFold(self, context).run()


@dataclass(frozen=True, slots=True)
class CopyRows(TableTask):
    """Copy the rows of files of one partition, except those in some ranges of keys."""

    table: TableName
    partition: str
    paths: tuple[str, ...]
    outside: tuple[Range, ...] = ()

    def run(self, context: TaskContext) -> PendingFiles:
        files = _InputFiles(self, context)
        writer = self.writer(self.table, context)
        where = " AND ".join(f"NOT ({within(keys)})" for keys in self.outside) or "true"
        columns, extra = (CHANGE, "") if self.table == "translog" else (STATEMENT, ", NULL::BIGINT AS deleted_at")
        own = [PartitionFile(path, self.partition) for path in self.paths]
        rows = files.scans.select(self.table, own, columns, f"WHERE {where}")
        query = f"SELECT *{extra} FROM ({rows}) {sql.SORTED}"
        writer.write(self.partition, files.stream(query, self.table, self.paths))
        return PendingFiles({self.table: writer}, Tally(), [])


class _InputFiles:
    """Reads a task's input files with DuckDB."""

    def __init__(self, task: TableTask, context: TaskContext) -> None:
        self.duck = context.duckdb_connection
        self.scans = Scans(context.store.connection, DatasetLayout(task.dataset))

    def stream(self, query: str, table: TableName, paths: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        rows = self._rows_at_once(table, paths)
        return iter(self.duck.execute(query).fetch_record_batch(rows))

    def _rows_at_once(self, table: TableName, paths: tuple[str, ...]) -> int:
        """Return the number of rows of a row group: fewer where values are long."""
        if table == "translog":
            return ROW_GROUP
        size, rows = map(int, self.duck.execute(self.scans.value_sizes(table, paths)).fetchall()[0])
        return max(1, min(ROW_GROUP, LARGEST_GROUP * max(1, rows) // max(1, size)))


class _RangeFold:
    """A fold in progress."""

    def __init__(self, task: FoldRange, context: TaskContext) -> None:
        self._task = task
        self._context = context
        self._files = _InputFiles(task, context)
        self._duck = context.duckdb_connection
        self._where = f"WHERE {within(task.within)}"

    def run(self) -> PendingFiles:
        """Write the live rows. The tally has the number of live statements that were left out as erased."""
        task = self._task
        rows = task.writer("statements", self._context)
        marks = self._files.scans.select("translog", task.marks, MARK, self._where)
        self._duck.execute(f"CREATE OR REPLACE TEMP TABLE range_marks AS {marks}")
        self._duck.execute("CREATE OR REPLACE TEMP TABLE erased AS SELECT unnest(?::VARCHAR[])", [list(task.erased)])
        erased = 0
        for origin, group in groupby(sorted(task.statements, key=_partition), _partition):
            files = list(group)
            erased += self._count_erased(files)
            query = f"SELECT *, NULL::BIGINT AS deleted_at FROM ({self._live(files, STATEMENT)}) WHERE {self._kept()}"
            paths = tuple(file.path for file in files)
            rows.write(origin, self._files.stream(f"{query} {sql.SORTED}", "statements", paths))
        return PendingFiles({"statements": rows}, Tally(ended=erased), [])

    def _count_erased(self, files: list[PartitionFile]) -> int:
        """Count the live statements that are left out as erased."""
        if not self._task.erased:
            return 0
        live = self._live(files, (*IDENTITY, "entity_id", "canonical_id", "first_seen", "last_seen"))
        (count,) = self._duck.execute(f"SELECT count(*) FROM ({live}) WHERE NOT ({self._kept()})").fetchall()[0]
        return int(count)

    def _kept(self) -> str:
        if not self._task.erased:
            return "true"
        return "entity_id NOT IN (FROM erased) AND canonical_id NOT IN (FROM erased)"

    def _live(self, files: list[PartitionFile], columns: Iterable[str]) -> str:
        """Return a query for the live rows of files of one origin."""
        select = self._files.scans.select
        return sql.stored_live(
            select("statements", files, columns, self._where),
            f"FROM range_marks WHERE origin = {quote_literal(files[0].partition)}",
            select("statements", files, IDENTITY, self._where),
        )


def _partition(file: PartitionFile) -> str:
    return file.partition
