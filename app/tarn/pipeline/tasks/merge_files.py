"""What one Spark task does with files of the store: fold some into fewer, or copy their rows as they are.

What is live is said in `tarn.lake.live.sql`: the newest row of an identity, unless a later mark deletes it. Rows meet
by
their key, and whatever was moved to another key left a mark under the one it had; so a range of keys can be folded by
itself.
"""

# ruff: noqa: S608 - put together from constants, names and paths of ours

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import duckdb
import pyarrow as pa

from tarn.lake.table_schemas import PARTITIONED, PRUNING, SCHEMAS
from tarn.model.names import DatasetName
from tarn.model.ranges import Range
from tarn.model.snapshot import TableName, Tally
from tarn.pipeline.tasks.data_files import LARGEST_GROUP, ROW_GROUP, DataFileWriter, FilePuts
from tarn.storage.layout import DatasetLayout
from tarn.storage.store import Store

SORTED = "ORDER BY bucket, canonical_id, id"

STATEMENT = (
    "bucket, canonical_id, id, entity_id, schema, prop, value, lang, original_value, external, {first} AS first_seen, "
    "{last} AS last_seen, NULL::BIGINT AS deleted_at, {ord} AS ord, {origin} AS origin"
)
MARK = (
    "bucket, canonical_id, id, entity_id, origin, epoch_us(first_seen) AS first_seen, "
    "epoch_us(last_seen) AS last_seen, epoch_us(deleted_at) AS deleted_at, ord"
)

FOLDED = """
WITH rows AS ({rows})
SELECT {columns} FROM rows LEFT JOIN twice ON twice.id = rows.id LEFT JOIN after ON after.id = rows.id
WHERE (twice.ord IS NULL OR rows.ord = twice.ord) AND after.ended IS NOT TRUE AND {kept}
"""


class Part(NamedTuple):
    """A file of a table, below the table's folder, and its partition."""

    path: str
    partition: str


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A task on files of the store."""

    number: int
    dataset: DatasetName
    target_file_bytes: int
    checksum: bool


@dataclass(frozen=True, slots=True)
class FoldRange(Rewrite):
    """Fold the rows of a range of keys: what is live of them, and nothing else, is written."""

    within: Range
    statements: tuple[Part, ...]
    marks: tuple[Part, ...]
    """Of the translog, what was seen again and deleted."""
    erased: tuple[str, ...] = ()
    """Entities that are left out, whatever is known of them."""


@dataclass(frozen=True, slots=True)
class Copy(Rewrite):
    """Copy the rows of files of one partition, but for some ranges of keys."""

    table: TableName
    partition: str
    paths: tuple[str, ...]
    outside: tuple[Range, ...] = ()


class Merging:
    """One such task at work."""

    def __init__(self, task: FoldRange | Copy, store: Store, duck: duckdb.DuckDBPyConnection, puts: FilePuts) -> None:
        self._task = task
        self._store = store
        self._duck = duck
        self._puts = puts
        self._layout = DatasetLayout(task.dataset)

    def made(self) -> tuple[dict[TableName, DataFileWriter], Tally]:
        """The files on their way; the tally says how many live statements were left out."""
        if isinstance(self._task, Copy):
            return self._copied(self._task), Tally()
        return self._folded(self._task)

    def _copied(self, task: Copy) -> dict[TableName, DataFileWriter]:
        writer = self._writer(task.table)
        source = self._parquet(task.table, task.paths)
        where = " AND ".join(f"NOT ({_within(one)})" for one in task.outside) or "true"
        columns = MARK if task.table == "translog" else _statement("NULL::VARCHAR")
        query = f"SELECT {columns} FROM {source} WHERE {where} {SORTED}"
        writer.write(task.partition, self._stream(query, task.table, task.paths))
        return {task.table: writer}

    def _folded(self, task: FoldRange) -> tuple[dict[TableName, DataFileWriter], Tally]:
        rows = self._writer("statements")
        self._take_marks(task)
        self._duck.execute("CREATE OR REPLACE TEMP TABLE erased AS SELECT unnest(?::VARCHAR[])", [list(task.erased)])
        by_origin = {
            origin: tuple(part.path for part in parts)
            for origin, parts in groupby(sorted(task.statements, key=_partition), _partition)
        }
        erased = 0
        for origin, paths in by_origin.items():
            erased += self._find_ended(task, origin, paths)
            rows.write(origin, self._live(task, origin, paths))
        return {"statements": rows}, Tally(ended=erased)

    def _take_marks(self, task: FoldRange) -> None:
        self._duck.execute(
            "CREATE OR REPLACE TEMP TABLE marks (id BLOB, origin VARCHAR, kind VARCHAR, first_seen BIGINT, "
            "last_seen BIGINT, ord BIGINT)"
        )
        for kind, parts in groupby(sorted(task.marks, key=_partition), _partition):
            source = self._parquet("translog", tuple(part.path for part in parts))
            self._duck.execute(
                f"INSERT INTO marks SELECT id, origin, ?, epoch_us(first_seen), epoch_us(last_seen), ord FROM {source} "
                f"WHERE {_within(task.within)}",
                [kind],
            )

    def _find_ended(self, task: FoldRange, origin: str, paths: tuple[str, ...]) -> int:
        """Find the identities of an origin that have more than one row, and what the marks do to the newest one.

        Returns how many live statements are left out as erased.
        """
        source = f"SELECT id, ord FROM {self._parquet('statements', paths)} WHERE {_within(task.within)}"
        self._duck.execute(
            f"CREATE OR REPLACE TEMP TABLE twice AS SELECT id, max(ord) AS ord FROM ({source}) "
            "GROUP BY id HAVING count(*) > 1"
        )
        self._duck.execute(
            f"""
            CREATE OR REPLACE TEMP TABLE after AS
            WITH own AS (FROM marks WHERE origin = ?),
            newest AS (SELECT id, max(ord) AS ord FROM ({source}) SEMI JOIN own USING (id) GROUP BY id)
            SELECT id, bool_or(own.kind = 'delete') AS ended, min(own.first_seen) AS first_seen,
                max(own.last_seen) AS last_seen, max(own.ord) AS ord
            FROM newest JOIN own USING (id) WHERE own.ord > newest.ord GROUP BY id
            """,
            [origin],
        )
        if not task.erased:
            return 0
        query = self._query(task, origin, paths, "count(*)", kept="NOT ({kept})")
        (count,) = self._duck.execute(query).fetchall()[0]
        return int(count)

    def _live(self, task: FoldRange, origin: str, paths: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        # Its place in history is that of the last event on it: of all that was seen, a later event is later still.
        columns = STATEMENT.format(
            first="least(epoch_us(rows.first_seen), after.first_seen)",
            last="greatest(epoch_us(rows.last_seen), after.last_seen)",
            ord="greatest(rows.ord, after.ord)",
            origin=_quoted(origin),
        ).replace(" id,", " rows.id,")
        query = self._query(task, origin, paths, columns)
        return self._stream(f"{query} ORDER BY bucket, canonical_id, rows.id", "statements", paths)

    def _query(self, task: FoldRange, origin: str, paths: tuple[str, ...], columns: str, kept: str = "{kept}") -> str:
        rows = f"SELECT * FROM {self._parquet('statements', paths)} WHERE {_within(task.within)}"
        known = "entity_id NOT IN (FROM erased) AND canonical_id NOT IN (FROM erased)" if task.erased else "true"
        return FOLDED.format(rows=rows, columns=columns, kept=kept.format(kept=known))

    def _stream(self, query: str, table: TableName, paths: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        at_once = self._rows_at_once(table, paths)
        return iter(self._duck.execute(query).fetch_record_batch(at_once))

    def _rows_at_once(self, table: TableName, paths: tuple[str, ...]) -> int:
        """As many rows as a row group takes, fewer where texts are long."""
        if table == "translog":
            return ROW_GROUP
        urls = ", ".join(_quoted(self._url(table, path)) for path in paths)
        size, rows = self._duck.execute(
            "SELECT sum(total_uncompressed_size), sum(num_values) "
            f"FROM parquet_metadata([{urls}]) WHERE path_in_schema = 'value'"
        ).fetchall()[0]
        return max(1, min(ROW_GROUP, LARGEST_GROUP * int(rows or 1) // max(1, int(size or 1))))

    def _parquet(self, table: TableName, paths: tuple[str, ...]) -> str:
        urls = ", ".join(_quoted(self._url(table, path)) for path in paths)
        return f"read_parquet([{urls}], hive_partitioning = false)"

    def _url(self, table: TableName, path: str) -> str:
        return self._store.connection.file_url(f"{self._folder(table)}/{path}")

    def _folder(self, table: TableName) -> str:
        return self._layout.statements if table == "statements" else self._layout.translog

    def _writer(self, table: TableName) -> DataFileWriter:
        return DataFileWriter(
            self._store,
            self._folder(table),
            SCHEMAS[table],
            PARTITIONED[table],
            PRUNING,
            self._task.target_file_bytes,
            self._task.checksum,
            self._puts,
        )


def _statement(origin: str) -> str:
    return STATEMENT.format(first="epoch_us(first_seen)", last="epoch_us(last_seen)", ord="ord", origin=origin)


def _within(keys: Range) -> str:
    above = f"canonical_id >= {_quoted(keys.low)}"
    return above if keys.high is None else f"{above} AND canonical_id < {_quoted(keys.high)}"


def _partition(part: Part) -> str:
    return part.partition


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
