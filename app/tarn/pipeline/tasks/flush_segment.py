"""Flush task: fold a slice of the journal over the live rows, and write the result to new files of the tables.

It is vectorised in DuckDB, on the executor's thread and within its memory limit; rows stay in Arrow from the database
to the file. Live statements are defined in `tarn.lake.live.reference`; this is the set-based equivalent (a property
test checks that both agree).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from adbc_driver_manager import Error as DriverError

from tarn.lake.live import sql
from tarn.lake.scans import MARK, Scans, prune, select_marks
from tarn.model.datasets.ranges import closed_range
from tarn.model.datasets.shards import shard_of
from tarn.model.datasets.snapshot import File, Snapshot, TableName, Tally
from tarn.model.names import Origin
from tarn.model.timestamps import FIRST_MOMENT, LAST_MOMENT
from tarn.pipeline.tasks.append_only_fold import fold
from tarn.pipeline.tasks.data_files import LARGEST_GROUP, ROW_GROUP, DataFileWriter
from tarn.pipeline.tasks.journal_slice import JournalReader, JournalSlice
from tarn.pipeline.tasks.task import InvalidEvent, PendingFiles, TableTask, TaskContext
from tarn.storage.layout import DatasetLayout

MOMENTS = {"first": FIRST_MOMENT, "last": LAST_MOMENT}

ERASED_ORIGINS = "SELECT DISTINCT origin FROM events WHERE kind = 3 AND entity_id IS NULL"
CONCERNED = """
CREATE OR REPLACE TEMP TABLE concerned AS SELECT DISTINCT entity_id FROM events WHERE entity_id IS NOT NULL
"""

IN_MEMORY = 128 << 20
"""Bytes of events that a task holds in Arrow at most; more go to DuckDB, which can spill to disk."""


@dataclass(frozen=True, slots=True)
class FlushSegment(TableTask):
    """Write a slice of a dataset's journal into the tables: closed segments, and the entities of some shards."""

    dataset_id: str
    after: int
    upto: int
    shards: tuple[int, int]
    head: int | None
    """Number of the manifest that the task builds on; None if there is none yet."""
    moment: int
    """When statements that end here count as deleted: microseconds since 1970."""

    def run(self, context: TaskContext) -> PendingFiles:
        return _SegmentFlush(self, context).run()


class _SliceStatistics(NamedTuple):
    """Statistics of a slice of the journal."""

    adds: int
    deletes: int
    others: int
    """Events that do not add, including those that another task counts."""
    characters: float
    """Average length of a value."""
    origins: list[str]
    schemata: list[str]
    may_have_invalid: bool
    """Whether some events may have to be rejected."""


class _SegmentFlush:
    """A flush in progress, in the temporary tables of DuckDB that `lake.live.sql` describes."""

    def __init__(self, task: FlushSegment, context: TaskContext) -> None:
        self._task = task
        self._context = context
        self._store = context.store
        self._buckets = context.buckets
        self._layout = DatasetLayout(task.dataset)
        self._scans = Scans(context.store.connection, self._layout)
        self._rows_at_once = ROW_GROUP

    @property
    def _duck(self) -> duckdb.DuckDBPyConnection:
        # Opened on first use: a flush that only adds does without.
        return self._context.fold_connection

    @property
    def _journal(self) -> JournalReader:
        return self._context.journal_reader

    def run(self) -> PendingFiles:
        manifest = self._manifest()
        events = self._read()
        if manifest is None and events is not None:
            rows = fold(events, self._buckets, _is_origin)
            if rows is not None:
                return self._write_appended(rows, len(events))
        if events is not None:
            self._load(events)
        slice_ = self._slice_statistics()
        rejected: list[InvalidEvent] = []
        if slice_.may_have_invalid or not self._is_known(slice_):
            rejected = self._reject(slice_)
            slice_ = self._slice_statistics()
        self._rows_at_once = max(1, min(ROW_GROUP, LARGEST_GROUP // max(1, int(slice_.characters))))
        self._find_live(manifest)
        self._fold()
        writers, added, ended = self._write()
        return PendingFiles(writers, Tally(added, slice_.adds - added, slice_.deletes, len(rejected), ended), rejected)

    # Reading

    def _read(self) -> pa.Table | None:
        """Return the slice, or None if it is too large for memory: then it is in DuckDB, which can spill to disk."""
        task = self._task
        slice_ = JournalSlice(task.dataset_id, task.after, task.upto, task.shards)
        try:
            with self._journal.events(slice_) as incoming:
                batches, size = [], 0
                for batch in incoming:
                    batches.append(batch)
                    size += batch.nbytes
                    if size > IN_MEMORY:
                        remaining = pa.RecordBatchReader.from_batches(incoming.schema, chain(batches, incoming))
                        self._load(remaining)
                        return None
                events = pa.Table.from_batches(batches, incoming.schema)
                if self._journal.is_sqlite:
                    # SQLite stores any bytes as text, and its driver does not check them.
                    events.validate(full=True)
                return _without_type_row(events)
        except (pa.ArrowInvalid, DriverError, duckdb.ConversionException, duckdb.InvalidInputException) as error:
            if not self._journal.is_sqlite or not _is_invalid_data(error):
                raise
            return _without_type_row(self._journal.readable_events(slice_))

    def _load(self, incoming: Any) -> None:
        invalid_columns = "" if "invalid_columns" in incoming.schema.names else ", NULL::VARCHAR AS invalid_columns"
        self._duck.register("incoming", incoming)
        try:
            query = f"SELECT *{invalid_columns} FROM incoming WHERE ord <> 0"  # noqa: S608 - a constant
            self._duck.execute(f"CREATE OR REPLACE TEMP TABLE events AS {query}")
        finally:
            self._duck.unregister("incoming")

    def _slice_statistics(self) -> _SliceStatistics:
        # Events that every task reads are counted by the first.
        return _SliceStatistics(*self._one(sql.SLICE_STATISTICS, {**MOMENTS, "is_first": self._task.shards[0] == 0}))

    def _is_known(self, slice_: _SliceStatistics) -> bool:
        return all(map(_is_origin, slice_.origins)) and self._buckets.keys() >= set(slice_.schemata)

    def _reject(self, slice_: _SliceStatistics) -> list[InvalidEvent]:
        """Remove events that cannot be written, so that the others can be."""
        invalid = self._all(
            sql.FAULTS,
            {
                "bad": [origin for origin in slice_.origins if not _is_origin(origin)],
                "unknown": [schema for schema in slice_.schemata if schema not in self._buckets],
                **MOMENTS,
            },
        )
        if invalid:
            self._duck.execute("DELETE FROM events WHERE ord IN (SELECT unnest(?))", [[ord_ for ord_, _ in invalid]])
        return [InvalidEvent(*row) for row in invalid]

    # The live rows before

    def _find_live(self, manifest: Snapshot | None) -> None:
        """Fold the stored rows of the entities that the slice changes into the table `stored`."""
        self._duck.execute("DELETE FROM stored")
        if manifest is None:
            return
        erased = {origin for (origin,) in self._all(ERASED_ORIGINS)}
        self._duck.execute(CONCERNED)
        if erased:
            files = manifest.statements.files
            self._add_entities_of([file for file in files if None in erased or file.partition["origin"] in erased])
        least, most = self._one("SELECT min(entity_id), max(entity_id) FROM concerned")
        if least is None:
            return
        concerned = [closed_range(least, most)]
        rows = prune(manifest.statements.files, column="entity_id", keys=concerned)
        marks = prune(select_marks(manifest.translog.files), column="entity_id", keys=concerned)
        where = "WHERE entity_id IN (SELECT entity_id FROM concerned)"
        self._duck.execute(
            sql.insert_stored(
                self._scans.select("statements", rows, sql.STORED_COLUMNS, where),
                self._scans.select("translog", marks, MARK, where) if marks else None,
            )
        )

    def _add_entities_of(self, files: list[File]) -> None:
        """Add every entity of these files that is in this task's shards to the table `concerned`."""
        source = self._scans.select("statements", files, ["entity_id"])
        low, high = self._task.shards
        entities = self._duck.execute(f"SELECT DISTINCT entity_id FROM ({source})").fetch_record_batch(100_000)  # noqa: S608
        entity_files = [
            pa.record_batch(
                {"entity_id": [name for name in batch.column(0).to_pylist() if low <= shard_of(name) <= high]},
                schema=pa.schema([("entity_id", pa.string())]),
            )
            for batch in entities
        ]
        for batch in entity_files:
            self._duck.register("more", pa.Table.from_batches([batch]))
            self._duck.execute(
                "INSERT INTO concerned SELECT entity_id FROM more EXCEPT SELECT entity_id FROM concerned"
            )
            self._duck.unregister("more")

    def _manifest(self) -> Snapshot | None:
        if self._task.head is None:
            return None
        path = self._layout.snapshot(self._task.head)
        return Snapshot.from_json(path, self._store.get(path))

    # The fold

    def _fold(self) -> None:
        for statement in sql.ENDINGS:
            self._duck.execute(statement)
        (any_live,) = self._one("SELECT count(*) > 0 FROM stored")
        self._duck.execute(sql.RUN if any_live else sql.FIRST_RUN)

    # Writing

    def _write_appended(self, table: pa.Table, adds: int) -> PendingFiles:
        rows, log = self._task.writer("statements", self._context), self._task.writer("translog", self._context)
        at_once = max(1, min(ROW_GROUP, len(table) * LARGEST_GROUP // max(1, table.nbytes)))
        batches = table.combine_chunks().to_batches(max_chunksize=at_once)
        rows.write(table.column("origin")[0].as_py(), batches)
        log.write("insert", batches)
        return PendingFiles({"statements": rows, "translog": log}, Tally(len(table), adds - len(table)), [])

    def _write(self) -> tuple[dict[TableName, DataFileWriter], int, int]:
        """Write the results of the fold. Returns the writers, and how many statements were added and ended."""
        rows, log = self._task.writer("statements", self._context), self._task.writer("translog", self._context)
        for (origin,) in self._all("SELECT DISTINCT origin FROM run WHERE full_row ORDER BY origin"):
            rows.write(origin, self._stream(f"{sql.ROWS} AND events.origin = ? {sql.SORTED}", [origin]))
        log.write("insert", self._stream(f"{sql.ROWS} {sql.SORTED}", []))
        log.write("seen", self._stream(sql.SEEN, []))
        log.write("delete", self._stream(sql.DELETES, [self._task.moment] * 2))
        (added,) = self._one("SELECT count(*) FROM run WHERE is_new")
        (ended,) = self._one(
            "SELECT count(*) FROM stored JOIN ended USING (id, origin) ANTI JOIN run USING (id, origin)"
        )
        return {"statements": rows, "translog": log}, added, ended

    def _stream(self, query: str, parameters: list[Any]) -> Iterator[pa.RecordBatch]:
        return iter(self._duck.execute(query, parameters).fetch_record_batch(self._rows_at_once))

    def _one(self, query: str, parameters: Any = None) -> tuple[Any, ...]:
        row = self._duck.execute(query, parameters).fetchone()
        assert row is not None
        return row

    def _all(self, query: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        return self._duck.execute(query, parameters).fetchall()


def _is_invalid_data(error: Exception) -> bool:
    """Return whether the data is invalid, and not the database unavailable."""
    return not isinstance(error, DriverError) or "mismatch" in str(error)


def _without_type_row(events: pa.Table) -> pa.Table:
    """Remove the row from which SQLite's driver takes the types of columns."""
    return events.filter(pc.not_equal(events.column("ord"), 0)) if events.num_rows else events


def _is_origin(name: str) -> bool:
    try:
        Origin(name)
    except ValueError:
        return False
    return True
