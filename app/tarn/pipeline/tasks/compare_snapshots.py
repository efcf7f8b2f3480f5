"""What one Spark task does with states of a dataset: compare two, or take back what lies between two of them."""

# ruff: noqa: S608 - put together from constants, names and paths of ours

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from tarn.lake.live import sql as fold_sql
from tarn.lake.table_schemas import PARTITIONED, PRUNING, SCHEMAS
from tarn.model.names import DatasetName
from tarn.model.snapshot import Snapshot, TableName, Tally
from tarn.pipeline.tasks.data_files import ROW_GROUP, DataFileWriter, FilePuts
from tarn.pipeline.tasks.key_ranges import marks_of
from tarn.pipeline.tasks.merge_files import Part, Rewrite
from tarn.storage.layout import DatasetLayout
from tarn.storage.store import Store

CONTENT = ("bucket", "canonical_id", "schema", "value", "lang", "original_value", "external", "first_seen", "last_seen")
"""What may be different of a statement that two states have."""

ROW = (
    "bucket, canonical_id, id, entity_id, schema, prop, value, lang, original_value, external, "
    "epoch_us(first_seen) AS first_seen, epoch_us(last_seen) AS last_seen, ord, {origin} AS origin"
)
NO_ROWS = (
    "SELECT NULL::VARCHAR AS bucket, NULL::VARCHAR AS canonical_id, NULL::BLOB AS id, NULL::VARCHAR AS entity_id, "
    "NULL::VARCHAR AS schema, NULL::VARCHAR AS prop, NULL::VARCHAR AS value, NULL::VARCHAR AS lang, "
    "NULL::VARCHAR AS original_value, NULL::BOOLEAN AS external, NULL::BIGINT AS first_seen, "
    "NULL::BIGINT AS last_seen, NULL::BIGINT AS ord, NULL::VARCHAR AS origin WHERE false"
)
NO_MARKS = (
    "SELECT NULL::BLOB AS id, NULL::VARCHAR AS origin, NULL::VARCHAR AS kind, NULL::BIGINT AS first_seen, "
    "NULL::BIGINT AS last_seen, NULL::BIGINT AS ord WHERE false"
)

SORTED = "ORDER BY bucket, canonical_id, id"

TAKEN_BACK = """
CREATE OR REPLACE TEMP TABLE taken_back AS
WITH changed AS (
    SELECT id, origin FROM before FULL JOIN done USING (id, origin)
    WHERE before.ord IS NULL OR done.ord IS NULL OR {before_done}
),
-- What changed again since is left as it is.
untouched AS (
    SELECT id, origin FROM changed LEFT JOIN done USING (id, origin) LEFT JOIN present USING (id, origin)
    WHERE (done.ord IS NULL) = (present.ord IS NULL) AND (done.ord IS NULL OR NOT ({done_present}))
),
ended AS (FROM untouched ANTI JOIN before USING (id, origin) SEMI JOIN present USING (id, origin))
SELECT id, origin FROM untouched
ANTI JOIN (
    -- Of an entity's BASE statements one lives: the one that is there since.
    SELECT before.id, before.origin FROM before
    JOIN (FROM present ANTI JOIN ended USING (id, origin)) AS other USING (entity_id, origin)
    WHERE before.prop = 'id' AND other.prop = 'id' AND before.id <> other.id
) USING (id, origin)
"""
"""The statements that one state changed from the one before it, as far as they are at present what it made of them."""

ROWS = f"""
SELECT before.* REPLACE ($ord::BIGINT AS ord), NULL::BIGINT AS deleted_at
FROM before SEMI JOIN taken_back USING (id, origin) {SORTED}
"""

DELETES = f"""
SELECT present.bucket, present.canonical_id, id, present.entity_id, origin, present.first_seen, present.last_seen,
    $moment::BIGINT AS deleted_at, $ord::BIGINT AS ord
FROM present SEMI JOIN taken_back USING (id, origin) LEFT JOIN before USING (id, origin)
WHERE before.ord IS NULL OR (before.bucket, before.canonical_id) <> (present.bucket, present.canonical_id) {SORTED}
"""


class SnapshotFiles(NamedTuple):
    """The files that say what is live in a snapshot."""

    statements: tuple[Part, ...] = ()
    marks: tuple[Part, ...] = ()

    @classmethod
    def of(cls, snapshot: Snapshot | None) -> "SnapshotFiles":
        if snapshot is None:
            return cls()
        return cls(
            tuple(Part(file.path, file.partition["origin"]) for file in snapshot.statements.files),
            tuple(Part(file.path, file.partition["kind"]) for file in marks_of(snapshot)),
        )


@dataclass(frozen=True, slots=True)
class Compare(Rewrite):
    """Count the statements that are live in the one state and not in the other: `added` here, `ended` there."""

    wanted: SnapshotFiles
    present: SnapshotFiles


@dataclass(frozen=True, slots=True)
class TakeBack(Rewrite):
    """Take back what was done between two states, as far as it is at present as it was then."""

    before: SnapshotFiles
    done: SnapshotFiles
    present: SnapshotFiles
    ord: int
    """The place in history of what is written."""
    moment: int


class _Comparison:
    """One such task at work."""

    def __init__(self, task: Compare | TakeBack, store: Store, duck: duckdb.DuckDBPyConnection, puts: FilePuts) -> None:
        self._task = task
        self._store = store
        self._duck = duck
        self._puts = puts
        self._layout = DatasetLayout(task.dataset)

    def made(self) -> tuple[dict[TableName, DataFileWriter], Tally]:
        if isinstance(self._task, Compare):
            return {}, self._compared(self._task)
        return self._taken_back(self._task)

    def _compared(self, task: Compare) -> Tally:
        self._touch(task.wanted, task.present)
        self._show("wanted", task.wanted)
        self._show("present", task.present)
        added = self._count("FROM wanted ANTI JOIN present USING (id, origin)")
        ended = self._count("FROM present ANTI JOIN wanted USING (id, origin)")
        return Tally(added=added, ended=ended)

    def _taken_back(self, task: TakeBack) -> tuple[dict[TableName, DataFileWriter], Tally]:
        self._touch(task.before, task.done)
        for name, state in (("before", task.before), ("done", task.done), ("present", task.present)):
            self._show(name, state)
        self._duck.execute(
            TAKEN_BACK.format(before_done=_differ("before", "done"), done_present=_differ("done", "present"))
        )
        rows, log = self._writer("statements"), self._writer("translog")
        placed = {"ord": task.ord}
        found = self._duck.execute("SELECT DISTINCT origin FROM before SEMI JOIN taken_back USING (id, origin)")
        for (origin,) in sorted(found.fetchall()):
            rows.write(
                origin,
                self._stream(f"SELECT * FROM ({ROWS}) WHERE origin = $origin {SORTED}", placed | {"origin": origin}),
            )
        log.write("insert", self._stream(ROWS, placed))
        log.write("delete", self._stream(DELETES, placed | {"moment": task.moment}))
        added = self._count("FROM before SEMI JOIN taken_back USING (id, origin) ANTI JOIN present USING (id, origin)")
        ended = self._count("FROM present SEMI JOIN taken_back USING (id, origin) ANTI JOIN before USING (id, origin)")
        return {"statements": rows, "translog": log}, Tally(added=added, ended=ended)

    def _touch(self, one: SnapshotFiles, other: SnapshotFiles) -> None:
        """Find the entities that may differ: those that a file speaks of which only one of the two has."""
        tables: tuple[TableName, ...] = ("statements", "translog")
        scans = []
        for table, differing in zip(
            tables, (set(one.statements) ^ set(other.statements), set(one.marks) ^ set(other.marks)), strict=True
        ):
            if differing:
                scans.append(f"SELECT entity_id FROM {self._parquet(table, differing)}")
        self._duck.execute(
            f"CREATE OR REPLACE TEMP TABLE touched AS {' UNION '.join(scans) or 'SELECT NULL::VARCHAR AS entity_id'}"
        )

    def _show(self, name: str, state: SnapshotFiles) -> None:
        """Make a table of what is live in a state of the entities that may differ."""
        rows = self._scan("statements", state.statements, ROW) or NO_ROWS
        mark = "id, origin, {kind} AS kind, epoch_us(first_seen) AS first_seen, epoch_us(last_seen) AS last_seen, ord"
        marks = self._scan("translog", state.marks, mark) or NO_MARKS
        live = fold_sql.STORED.format(materialized="MATERIALIZED", rows=rows, marks=marks)
        self._duck.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS {live}")

    def _scan(self, table: TableName, parts: tuple[Part, ...], columns: str) -> str:
        def partition(part: Part) -> str:
            return part.partition

        return " UNION ALL ".join(
            f"SELECT {columns.format(**{PARTITIONED[table]: _quoted(value)})} FROM {self._parquet(table, some)} "
            "WHERE entity_id IN (FROM touched)"
            for value, some in groupby(sorted(parts, key=partition), partition)
        )

    def _parquet(self, table: TableName, parts: Any) -> str:
        folder = self._layout.statements if table == "statements" else self._layout.translog
        connection = self._store.connection
        urls = ", ".join(_quoted(connection.file_url(f"{folder}/{part.path}")) for part in parts)
        return f"read_parquet([{urls}], hive_partitioning = false)"

    def _count(self, source: str) -> int:
        (count,) = self._duck.execute(f"SELECT count(*) {source}").fetchall()[0]
        return int(count)

    def _stream(self, query: str, parameters: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        return iter(self._duck.execute(query, parameters).fetch_record_batch(ROW_GROUP))

    def _writer(self, table: TableName) -> DataFileWriter:
        folder = self._layout.statements if table == "statements" else self._layout.translog
        task = self._task
        return DataFileWriter(
            self._store,
            folder,
            SCHEMAS[table],
            PARTITIONED[table],
            PRUNING,
            task.target_file_bytes,
            task.checksum,
            self._puts,
        )


def compare(dataset: DatasetName, wanted: Snapshot | None, present: Snapshot | None) -> Compare:
    """The task that counts what reverting to a state does."""
    return Compare(0, dataset, 0, checksum=False, wanted=SnapshotFiles.of(wanted), present=SnapshotFiles.of(present))


def _differ(one: str, other: str) -> str:
    return " OR ".join(f"{one}.{name} IS DISTINCT FROM {other}.{name}" for name in CONTENT)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
