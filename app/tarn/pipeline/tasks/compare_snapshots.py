"""Compare and undo tasks: count the differences of two snapshots, or undo the changes between two snapshots."""

# ruff: noqa: S608 - composed of constants, validated names and paths

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from tarn.lake.live import sql
from tarn.lake.scans import MARK, ROW, PartitionFile, Scans, partition_files, select_marks
from tarn.model.datasets.snapshot import Snapshot, Tally
from tarn.model.names import DatasetName
from tarn.pipeline.tasks.data_files import ROW_GROUP
from tarn.pipeline.tasks.task import PendingFiles, TableTask, TaskContext
from tarn.storage.layout import DatasetLayout

CONTENT = ("bucket", "canonical_id", "schema", "value", "lang", "original_value", "external", "first_seen", "last_seen")
"""Columns in which a statement may differ between two snapshots."""

UNDONE = """
CREATE OR REPLACE TEMP TABLE undone AS
WITH changed AS (
    SELECT id, origin FROM before FULL JOIN done USING (id, origin)
    WHERE before.ord IS NULL OR done.ord IS NULL OR {before_done}
),
-- What has changed again since stays as it is.
untouched AS (
    SELECT id, origin FROM changed LEFT JOIN done USING (id, origin) LEFT JOIN present USING (id, origin)
    WHERE (done.ord IS NULL) = (present.ord IS NULL) AND (done.ord IS NULL OR NOT ({done_present}))
),
ended AS (FROM untouched ANTI JOIN before USING (id, origin) SEMI JOIN present USING (id, origin))
SELECT id, origin FROM untouched
ANTI JOIN (
    -- Of an entity's BASE statements only one is live: the one that was added since.
    SELECT before.id, before.origin FROM before
    JOIN (FROM present ANTI JOIN ended USING (id, origin)) AS other USING (entity_id, origin)
    WHERE before.prop = 'id' AND other.prop = 'id' AND before.id <> other.id
) USING (id, origin)
"""
"""The statements that differ between `before` and `done` and are at present as in `done`."""

ROWS = f"""
SELECT before.* REPLACE ($ord::BIGINT AS ord), NULL::BIGINT AS deleted_at
FROM before SEMI JOIN undone USING (id, origin) {sql.SORTED}
"""

DELETES = f"""
SELECT present.bucket, present.canonical_id, id, present.entity_id, origin, present.first_seen, present.last_seen,
    $moment::BIGINT AS deleted_at, $ord::BIGINT AS ord
FROM present SEMI JOIN undone USING (id, origin) LEFT JOIN before USING (id, origin)
WHERE before.ord IS NULL OR (before.bucket, before.canonical_id) <> (present.bucket, present.canonical_id) {sql.SORTED}
"""


class SnapshotFiles(NamedTuple):
    """The files of a snapshot that decide what is live."""

    statements: tuple[PartitionFile, ...] = ()
    marks: tuple[PartitionFile, ...] = ()

    @classmethod
    def of(cls, snapshot: Snapshot | None) -> "SnapshotFiles":
        if snapshot is None:
            return cls()
        return cls(
            partition_files("statements", snapshot.statements.files),
            partition_files("translog", select_marks(snapshot.translog.files)),
        )


@dataclass(frozen=True, slots=True)
class CompareSnapshots(TableTask):
    """Count the statements that a revert to `target` adds (`added` of the tally) and deletes (`ended`)."""

    target: SnapshotFiles
    present: SnapshotFiles

    def run(self, context: TaskContext) -> PendingFiles:
        return PendingFiles({}, _Comparison(self, context).count(self.target, self.present), [])


@dataclass(frozen=True, slots=True)
class UndoChanges(TableTask):
    """Undo the changes between two snapshots, except for statements that have changed again since."""

    before: SnapshotFiles
    done: SnapshotFiles
    present: SnapshotFiles
    ord: int
    """Position in the event order of everything that is written."""
    moment: int
    """When statements that end here count as deleted: microseconds since 1970."""

    def run(self, context: TaskContext) -> PendingFiles:
        return _Comparison(self, context).undo(self)


class _Comparison:
    """A comparison of snapshots in progress. Only entities in files that differ are read."""

    def __init__(self, task: CompareSnapshots | UndoChanges, context: TaskContext) -> None:
        self._task = task
        self._context = context
        self._scans = Scans(context.store.connection, DatasetLayout(task.dataset))
        self._duck = context.duckdb_connection

    def count(self, target: SnapshotFiles, present: SnapshotFiles) -> Tally:
        self._find_touched(target, present)
        self._load("target", target)
        self._load("present", present)
        added = self._count("FROM target ANTI JOIN present USING (id, origin)")
        ended = self._count("FROM present ANTI JOIN target USING (id, origin)")
        return Tally(added=added, ended=ended)

    def undo(self, task: UndoChanges) -> PendingFiles:
        self._find_touched(task.before, task.done)
        for name, files in (("before", task.before), ("done", task.done), ("present", task.present)):
            self._load(name, files)
        self._duck.execute(
            UNDONE.format(before_done=_differ("before", "done"), done_present=_differ("done", "present"))
        )
        rows, log = task.writer("statements", self._context), task.writer("translog", self._context)
        parameters = {"ord": task.ord}
        origins = self._duck.execute("SELECT DISTINCT origin FROM before SEMI JOIN undone USING (id, origin)")
        for (origin,) in sorted(origins.fetchall()):
            rows.write(
                origin,
                self._stream(
                    f"SELECT * FROM ({ROWS}) WHERE origin = $origin {sql.SORTED}", parameters | {"origin": origin}
                ),
            )
        log.write("insert", self._stream(ROWS, parameters))
        log.write("delete", self._stream(DELETES, parameters | {"moment": task.moment}))
        added = self._count("FROM before SEMI JOIN undone USING (id, origin) ANTI JOIN present USING (id, origin)")
        ended = self._count("FROM present SEMI JOIN undone USING (id, origin) ANTI JOIN before USING (id, origin)")
        return PendingFiles({"statements": rows, "translog": log}, Tally(added=added, ended=ended), [])

    def _find_touched(self, one: SnapshotFiles, other: SnapshotFiles) -> None:
        """Put the entities that may differ into the table `touched`: those in files that only one of the two has."""
        rows = self._scans.select("statements", set(one.statements) ^ set(other.statements), ["entity_id"])
        marks = self._scans.select("translog", set(one.marks) ^ set(other.marks), ["entity_id"])
        self._duck.execute(f"CREATE OR REPLACE TEMP TABLE touched AS {rows} UNION {marks}")

    def _load(self, name: str, files: SnapshotFiles) -> None:
        """Create a table of the live rows of a snapshot, of the entities that may differ."""
        where = "WHERE entity_id IN (FROM touched)"
        rows = self._scans.select("statements", files.statements, ("bucket", *ROW), where)
        marks = self._scans.select("translog", files.marks, MARK, where)
        self._duck.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS {sql.stored_live(rows, marks)}")

    def _count(self, source: str) -> int:
        (count,) = self._duck.execute(f"SELECT count(*) {source}").fetchall()[0]
        return int(count)

    def _stream(self, query: str, parameters: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        return iter(self._duck.execute(query, parameters).fetch_record_batch(ROW_GROUP))


def compare(dataset: DatasetName, target: Snapshot | None, present: Snapshot | None) -> CompareSnapshots:
    """Return the task that counts what a revert to `target` would add and delete."""
    return CompareSnapshots(
        0, dataset, 0, checksum=False, target=SnapshotFiles.of(target), present=SnapshotFiles.of(present)
    )


def _differ(one: str, other: str) -> str:
    return " OR ".join(f"{one}.{name} IS DISTINCT FROM {other}.{name}" for name in CONTENT)
