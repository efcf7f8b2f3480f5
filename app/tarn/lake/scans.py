"""Scans of a dataset's two tables: which data files a query needs, and the SQL that reads them.

Data files do not contain the column that their table is partitioned by: it is added from the manifest. Times are read
as microseconds since 1970. Light to import, for executors.
"""

# ruff: noqa: S608 - SQL is built from constants, valid names and paths in the lake

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from tarn.lake.table_schemas import PARTITIONED, SCHEMAS
from tarn.model.datasets.ranges import EVERYTHING, Range, span
from tarn.model.datasets.snapshot import File, TableName
from tarn.storage.connection import Connection
from tarn.storage.duckdb_sql import quote_literal, scan_parquet
from tarn.storage.layout import DatasetLayout

IDENTITY = ("id", "origin", "ord")
ROW = (
    "canonical_id",
    "entity_id",
    "id",
    "schema",
    "prop",
    "value",
    "lang",
    "original_value",
    "external",
    "origin",
    "first_seen",
    "last_seen",
    "ord",
)
MARK = ("id", "origin", "kind", "first_seen", "last_seen", "ord")
"""Columns that identify a statement's row, that readers need of a row, and that decide what a mark does to it."""

TYPES = {pa.string(): "VARCHAR", pa.binary(): "BLOB", pa.bool_(): "BOOLEAN", pa.int64(): "BIGINT"}
"""DuckDB's names of the columns' types. All others are times."""


class PartitionFile(NamedTuple):
    """A data file: its path in the table's folder, and its value of the column that the table is partitioned by."""

    path: str
    partition: str


@dataclass(frozen=True, slots=True)
class Scans:
    """Builds SQL that reads the data files of one dataset."""

    connection: Connection
    layout: DatasetLayout

    def read(self, table: TableName, paths: Iterable[str], *, filename: bool = False) -> str:
        """Return the table function that reads these files of a table."""
        return scan_parquet((self._url(table, path) for path in paths), filename=filename)

    def select(
        self, table: TableName, files: Iterable[File | PartitionFile], columns: Iterable[str], where: str = ""
    ) -> str:
        """Return a query for these columns of the files' rows that meet the condition `where`."""
        scanned, columns = partition_files(table, files), tuple(columns)
        if not scanned:
            return _select_nothing(table, columns)
        partitions = {file.partition for file in scanned}
        if len(partitions) == 1 or PARTITIONED[table] not in columns:
            source, partition = self.read(table, (file.path for file in scanned)), quote_literal(partitions.pop())
        else:
            named = ", ".join(
                f"({quote_literal(self._url(table, file.path))}, {quote_literal(file.partition)})" for file in scanned
            )
            source = (
                f"{self.read(table, (file.path for file in scanned), filename=True)} "
                f"LEFT JOIN (VALUES {named}) AS files (filename, partition) USING (filename)"
            )
            # Fail if DuckDB reports a file name that is not in the list, instead of losing the partition.
            partition = "coalesce(files.partition, error('file is not in the scan list: ' || filename))"
        selected = ", ".join(_expression(table, name, partition) for name in columns)
        return f"SELECT {selected} FROM {source} {where}"

    def value_sizes(self, table: TableName, paths: Iterable[str]) -> str:
        """Return a query for the uncompressed bytes and the number of all values of statements in these files."""
        listed = ", ".join(quote_literal(self._url(table, path)) for path in paths)
        return (
            "SELECT coalesce(sum(total_uncompressed_size), 0)::BIGINT, coalesce(sum(num_values), 0)::BIGINT "
            f"FROM parquet_metadata([{listed}]) WHERE path_in_schema = 'value'"
        )

    def _url(self, table: TableName, path: str) -> str:
        return self.connection.file_url(f"{self.layout.table(table)}/{path}")


def within(keys: Range) -> str:
    """Return the condition on rows in a range of keys, which a scan needs as files may extend beyond it."""
    above = f"canonical_id >= {quote_literal(keys.low)}"
    return above if keys.high is None else f"{above} AND canonical_id < {quote_literal(keys.high)}"


def prune(
    files: Iterable[File],
    *,
    origin: str | None = None,
    keys: Sequence[Range] = (EVERYTHING,),
    ids: Sequence[str] | None = None,
    column: str = "canonical_id",
) -> list[File]:
    """Return the files that may have rows of this origin with values of `column` in these ranges and among sorted ids.

    A file without recorded bounds is always among them.
    """
    return [
        file
        for file in files
        if (origin is None or file.partition["origin"] == origin)
        and any(each == EVERYTHING or span(file, column).meets(each) for each in keys)
        and (ids is None or _may_hold(file, column, ids))
    ]


def partition_files(table: TableName, files: Iterable[File | PartitionFile]) -> tuple[PartitionFile, ...]:
    """Return what a scan needs to know of these files of a table."""
    return tuple(
        file if isinstance(file, PartitionFile) else PartitionFile(file.path, file.partition[PARTITIONED[table]])
        for file in files
    )


def select_marks(files: Iterable[File]) -> list[File]:
    """Return the files of the translog that change rows after they were written; `insert` only repeats the rows."""
    return [file for file in files if file.partition["kind"] != "insert"]


def _may_hold(file: File, column: str, ids: Sequence[str]) -> bool:
    first, last = span(file, column)
    position = bisect_left(ids, first)
    return position < len(ids) and (last is None or ids[position] <= last)


def _expression(table: TableName, name: str, partition: str) -> str:
    if name == PARTITIONED[table]:
        return f"{partition} AS {name}"
    return name if SCHEMAS[table].field(name).type in TYPES else f"epoch_us({name}) AS {name}"


def _select_nothing(table: TableName, columns: Iterable[str]) -> str:
    types = {name: TYPES.get(SCHEMAS[table].field(name).type, "BIGINT") for name in columns}
    return f"SELECT {', '.join(f'NULL::{kind} AS {name}' for name, kind in types.items())} WHERE false"
