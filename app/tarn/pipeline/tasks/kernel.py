"""What one Spark task does with its slice of the journal: fold it, split it, write it.

Vectorised in DuckDB, on the executor's own thread and within its memory; the rows stay in Arrow from the database to
the file. What is live is defined in `tarn.lake.live.reference`; this is the same, set by set (a property test holds
them equal)."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import duckdb
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from adbc_driver_manager import Error as DriverError
from adbc_driver_manager import OperationalError

from tarn.errors import Unavailable
from tarn.lake.live import sql as fold_sql
from tarn.lake.table_schemas import PARTITIONED, PRUNING, SCHEMAS
from tarn.model.cancellation import interrupting
from tarn.model.names import DatasetName, Origin
from tarn.model.shards import shard_of
from tarn.model.snapshot import File, TableName, Tally
from tarn.model.timestamps import FIRST_MOMENT, LAST_MOMENT
from tarn.pipeline.tasks.append_only_fold import fold
from tarn.pipeline.tasks.compare_snapshots import Compare, TakeBack, _Comparison
from tarn.pipeline.tasks.crawl_tasks import FetchedFiles, FetchFiles
from tarn.pipeline.tasks.data_files import LARGEST_GROUP, ROW_GROUP, DataFileWriter, FilePuts
from tarn.pipeline.tasks.export_tasks import ExportedRange, ExportRange, Recount
from tarn.pipeline.tasks.journal_slice import Journal, JournalReader, JournalSlice
from tarn.pipeline.tasks.mapping_tasks import MappedRows, MapRows
from tarn.pipeline.tasks.merge_files import Copy, FoldRange, Merging
from tarn.storage.connection import Connection
from tarn.storage.layout import DatasetLayout
from tarn.storage.store import Store

TRANSIENT_ERRORS = (OperationalError, duckdb.IOException, duckdb.HTTPException)
"""What databases and stores raise while they are away."""

Result = TypeVar("Result")

MOMENTS = {"first": FIRST_MOMENT, "last": LAST_MOMENT}

TASKS_AHEAD = 4
"""Tasks that may be begun before the files of an earlier one are in their places."""

IN_MEMORY = 128 << 20
"""Bytes of events up to which a task holds them itself."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task: a dataset, which segments of it, which entities, and the head it is built on."""

    number: int
    dataset: DatasetName
    dataset_id: str
    after: int
    upto: int
    shards: tuple[int, int]
    head: int | None
    """The number of the manifest; None: there is none yet."""
    moment: int
    """When statements that end here count as deleted: microseconds since 1970."""
    target_file_bytes: int
    checksum: bool


AnyTask = Task | FoldRange | Copy | Compare | TakeBack | ExportRange | Recount | FetchFiles | MapRows


class Fault(NamedTuple):
    """An event that cannot be written."""

    ord: int
    reason: str


class Output(NamedTuple):
    """What a task made: files that are durable, and named by nothing yet."""

    files: dict[TableName, list[File]]
    tally: Tally
    faults: list[Fault]
    exported: ExportedRange | None = None
    fetched: FetchedFiles | None = None
    mapped: MappedRows | None = None


@dataclass(frozen=True)
class Kernel:
    """Runs tasks one after the other in one process. Pickled, it means the same in another."""

    journal: Journal
    connection: Connection
    buckets: dict[str, str]
    """Of every schema that FtM knows. FtM itself is a second's import, which executors can do without."""
    memory: str
    threads: int = 1

    def run(self, tasks: Iterable[AnyTask], scratch: str) -> Iterator[tuple[AnyTask, Output | Exception]]:
        """The output of each task, or why it failed: one dataset's trouble is not another's.

        Files of a task are put while the next one is at work: for small ones most of the time goes to the disk.
        """
        store = Store(self.connection)
        under_way: deque[tuple[AnyTask, _Made | Exception]] = deque()
        with FilePuts() as puts, ExitStack() as opened:
            # What only adds does without DuckDB, what only rewrites without the journal, and what reads without tables.
            reading = cache(lambda: opened.enter_context(self._duckdb(scratch)))
            duck = cache(lambda: self._with_tables(reading()))
            journal = cache(lambda: opened.enter_context(self.journal.opened()))
            parts = cache(lambda: opened.enter_context(self.journal.writing()))

            def made(task: AnyTask) -> _Made:
                if isinstance(task, Task):
                    return _Work(task, store, duck, journal(), self.buckets, puts).made()
                if isinstance(task, ExportRange | Recount):
                    # With FtM it is a second's import, which executors that only flush do without.
                    from tarn.pipeline.tasks.export_parts import exported

                    return _Made({}, Tally(), [], exported(task, store, reading(), scratch))
                if isinstance(task, FetchFiles):
                    from tarn.pipeline.tasks.crawl_files import fetch_files as fetched

                    return _Made({}, Tally(), [], fetched=fetched(task, store))
                if isinstance(task, MapRows):
                    from tarn.pipeline.tasks.mapping_rows import map_rows as mapped

                    return _Made({}, Tally(), [], mapped=mapped(task, store, parts()))
                if isinstance(task, FoldRange | Copy):
                    return _Made(*Merging(task, store, duck(), puts).made(), [])
                return _Made(*_Comparison(task, store, duck(), puts).made(), [])

            for task in tasks:
                under_way.append((task, _attempt(partial(made, task))))
                if len(under_way) > TASKS_AHEAD:
                    yield _finished(*under_way.popleft())
            while under_way:
                yield _finished(*under_way.popleft())

    @contextmanager
    def _duckdb(self, scratch: str) -> Iterator[duckdb.DuckDBPyConnection]:
        settings: dict[str, str | bool | int | float | list[str]] = {
            "threads": self.threads,
            "memory_limit": f"{self.memory}b",
            "temp_directory": scratch,
            "preserve_insertion_order": False,
        }
        with duckdb.connect(config=settings) as duck, interrupting(duck.interrupt):
            self.connection.prepare(duck)
            yield duck

    def _with_tables(self, duck: duckdb.DuckDBPyConnection) -> duckdb.DuckDBPyConnection:
        """With the tables that `fold_sql` works on."""
        for statement in fold_sql.TABLES:
            duck.execute(statement)
        families = [list(self.buckets), list(self.buckets.values())]
        duck.execute("INSERT INTO families SELECT unnest(?), unnest(?)", families)
        return duck


class _Made(NamedTuple):
    """What a task made, while its files are still on their way to the store."""

    writers: dict[TableName, DataFileWriter]
    tally: Tally
    faults: list[Fault]
    exported: ExportedRange | None = None
    fetched: FetchedFiles | None = None
    mapped: MappedRows | None = None

    def output(self) -> Output:
        files = {table: writer.files() for table, writer in self.writers.items()}
        return Output(files, self.tally, self.faults, self.exported, self.fetched, self.mapped)


class _Glance(NamedTuple):
    """What a slice is like."""

    adds: int
    deletes: int
    others: int
    """Events that do not add, counted or not."""
    characters: float
    """Of a value, on average."""
    origins: list[str]
    schemata: list[str]
    is_suspicious: bool


class _Work:
    """One task on its way, in tables of DuckDB that `fold_sql` names."""

    def __init__(
        self,
        task: Task,
        store: Store,
        duck: Callable[[], duckdb.DuckDBPyConnection],
        journal: JournalReader,
        buckets: dict[str, str],
        puts: FilePuts,
    ) -> None:
        self._task = task
        self._store = store
        self._open_duck = duck
        self._journal = journal
        self._buckets = buckets
        self._puts = puts
        self._layout = DatasetLayout(task.dataset)
        self._rows_at_once = ROW_GROUP

    @property
    def _duck(self) -> duckdb.DuckDBPyConnection:
        return self._open_duck()

    def made(self) -> _Made:
        manifest = self._manifest()
        events = self._read()
        if manifest is None and events is not None:
            plain = fold(events, self._buckets, _is_origin)
            if plain is not None:
                return self._write_plain(plain, len(events))
        if events is not None:
            self._take(events)
        seen = self._glance()
        faults: list[Fault] = []
        if seen.is_suspicious or not self._knows(seen):
            faults = self._set_aside(seen)
            seen = self._glance()
        self._rows_at_once = max(1, min(ROW_GROUP, LARGEST_GROUP // max(1, int(seen.characters))))
        self._find_live(manifest)
        self._fold()
        writers, added, ended = self._write()
        return _Made(writers, Tally(added, seen.adds - added, seen.deletes, len(faults), ended), faults)

    # Reading

    def _read(self) -> pa.Table | None:
        """The slice in memory, or, where that is too little for it, None: then it is in DuckDB, which may spill."""
        task = self._task
        wanted = JournalSlice(task.dataset_id, task.after, task.upto, task.shards)
        try:
            with self._journal.events(wanted) as incoming:
                held, size = [], 0
                for batch in incoming:
                    held.append(batch)
                    size += batch.nbytes
                    if size > IN_MEMORY:
                        rest = pa.RecordBatchReader.from_batches(incoming.schema, chain(held, incoming))
                        self._take(rest)
                        return None
                events = pa.Table.from_batches(held, incoming.schema)
                if self._journal.is_sqlite:
                    # It keeps whatever bytes somebody put there as text, and its driver hands them on.
                    events.validate(full=True)
                return _real(events)
        except (pa.ArrowInvalid, DriverError, duckdb.ConversionException, duckdb.InvalidInputException) as error:
            if not self._journal.is_sqlite or not _is_of_data(error):
                raise
            return _real(self._journal.readable_events(wanted))

    def _take(self, incoming: Any) -> None:
        poison = "" if "poison" in incoming.schema.names else ", NULL::VARCHAR AS poison"
        self._duck.register("incoming", incoming)
        try:
            query = f"SELECT *{poison} FROM incoming WHERE ord <> 0"  # noqa: S608 - constants of ours
            self._duck.execute(f"CREATE OR REPLACE TEMP TABLE events AS {query}")
        finally:
            self._duck.unregister("incoming")

    def _glance(self) -> "_Glance":
        # What every task sees is counted by the first.
        return _Glance(*self._one(fold_sql.SLICE_STATISTICS, {**MOMENTS, "is_first": self._task.shards[0] == 0}))

    def _knows(self, seen: "_Glance") -> bool:
        return all(map(_is_origin, seen.origins)) and self._buckets.keys() >= set(seen.schemata)

    def _set_aside(self, seen: "_Glance") -> list[Fault]:
        """Take out what cannot be written: it must not keep the rest waiting."""
        found = self._all(
            fold_sql.FAULTS,
            {
                "bad": [origin for origin in seen.origins if not _is_origin(origin)],
                "unknown": [schema for schema in seen.schemata if schema not in self._buckets],
                **MOMENTS,
            },
        )
        if found:
            self._duck.execute("DELETE FROM events WHERE ord IN (SELECT unnest(?))", [[ord_ for ord_, _ in found]])
        return [Fault(*row) for row in found]

    # What is live before

    def _find_live(self, manifest: dict[str, Any] | None) -> None:
        """What the store holds of the entities that the slice speaks of, folded."""
        self._duck.execute("DELETE FROM stored")
        if manifest is None:
            return
        wide = self._all("SELECT DISTINCT origin FROM events WHERE kind = 3 AND entity_id IS NULL")
        everything = any(origin is None for (origin,) in wide)
        statements, translog = manifest["statements"]["files"], manifest["translog"]["files"]
        self._duck.execute(
            """
            CREATE OR REPLACE TEMP TABLE concerned AS
            SELECT DISTINCT entity_id FROM events WHERE entity_id IS NOT NULL
            """
        )
        if wide:
            ended = [file for file in statements if everything or (file["partition"]["origin"],) in wide]
            self._concern_all(ended)
        least, most = self._one("SELECT min(entity_id), max(entity_id) FROM concerned")
        if least is None:
            return
        rows = self._scan("statements", [file for file in statements if _may_hold(file, least, most)])
        marks = self._scan(
            "translog",
            [file for file in translog if file["partition"]["kind"] != "insert" and _may_hold(file, least, most)],
        )
        if rows is None:
            return
        self._duck.execute(fold_sql.LIVE.format(rows=rows, marks=marks or fold_sql.NO_MARKS))

    def _concern_all(self, files: list[dict[str, Any]]) -> None:
        """Every entity of these files that is in this task's shards."""
        source = self._scan("statements", files, filtered=False)
        if source is None:
            return
        low, high = self._task.shards
        found = self._duck.execute(f"SELECT DISTINCT entity_id FROM ({source})").fetch_record_batch(100_000)  # noqa: S608
        kept = [
            pa.record_batch(
                {"entity_id": [name for name in batch.column(0).to_pylist() if low <= shard_of(name) <= high]},
                schema=pa.schema([("entity_id", pa.string())]),
            )
            for batch in found
        ]
        for batch in kept:
            self._duck.register("more", pa.Table.from_batches([batch]))
            self._duck.execute(
                "INSERT INTO concerned SELECT entity_id FROM more EXCEPT SELECT entity_id FROM concerned"
            )
            self._duck.unregister("more")

    def _manifest(self) -> dict[str, Any] | None:
        if self._task.head is None:
            return None
        found: dict[str, Any] = orjson.loads(self._store.get(self._layout.snapshot(self._task.head)))
        return found

    def _scan(self, table: TableName, files: list[dict[str, Any]], filtered: bool = True) -> str | None:
        """SQL that reads files of a table, with their partition as a column, of the concerned entities only."""
        if not files:
            return None
        folder = self._layout.statements if table == "statements" else self._layout.translog
        partition = PARTITIONED[table]
        urls = {self._store.connection.file_url(f"{folder}/{file['path']}"): file for file in files}
        name = f"{table}_files"
        self._duck.execute(f"CREATE OR REPLACE TEMP TABLE {name} (filename VARCHAR, {partition} VARCHAR)")
        self._duck.execute(
            f"INSERT INTO {name} SELECT unnest(?), unnest(?)",
            [list(urls), [file["partition"][partition] for file in urls.values()]],
        )
        listed = ", ".join(_quoted(url) for url in urls)
        where = "WHERE entity_id IN (SELECT entity_id FROM concerned)" if filtered else ""
        return (
            # A file under a name that was not asked for must not be passed over.
            f"SELECT data.*, coalesce({name}.{partition}, error('an unknown file: ' || filename)) AS {partition} "  # noqa: S608
            f"FROM read_parquet([{listed}], filename = true, hive_partitioning = false) AS data "
            f"LEFT JOIN {name} USING (filename) {where}"
        )

    # The fold

    def _fold(self) -> None:
        for statement in fold_sql.ENDINGS:
            self._duck.execute(statement)
        (any_live,) = self._one("SELECT count(*) > 0 FROM stored")
        self._duck.execute(fold_sql.RUN if any_live else fold_sql.FIRST_RUN)

    # Writing

    def _write_plain(self, plain: pa.Table, adds: int) -> _Made:
        rows, log = self._writer("statements"), self._writer("translog")
        at_once = max(1, min(ROW_GROUP, len(plain) * LARGEST_GROUP // max(1, plain.nbytes)))
        batches = plain.combine_chunks().to_batches(max_chunksize=at_once)
        rows.write(plain.column("origin")[0].as_py(), batches)
        log.write("insert", batches)
        return _Made({"statements": rows, "translog": log}, Tally(len(plain), adds - len(plain)), [])

    def _write(self) -> tuple[dict[TableName, DataFileWriter], int, int]:
        """Write everything that the fold found; how many statements are new, and how many ended."""
        rows, log = self._writer("statements"), self._writer("translog")
        for (origin,) in self._all("SELECT DISTINCT origin FROM run WHERE full_row ORDER BY origin"):
            rows.write(origin, self._stream(f"{fold_sql.ROWS} AND events.origin = ? {fold_sql.SORTED}", [origin]))
        log.write("insert", self._stream(f"{fold_sql.ROWS} {fold_sql.SORTED}", []))
        log.write("seen", self._stream(fold_sql.SEEN, []))
        log.write("delete", self._stream(fold_sql.DELETES, [self._task.moment] * 2))
        (added,) = self._one("SELECT count(*) FROM run WHERE is_new")
        (ended,) = self._one(
            "SELECT count(*) FROM stored JOIN dead USING (id, origin) ANTI JOIN run USING (id, origin)"
        )
        return {"statements": rows, "translog": log}, added, ended

    def _writer(self, table: TableName) -> DataFileWriter:
        folder = self._layout.statements if table == "statements" else self._layout.translog
        return DataFileWriter(
            self._store,
            folder,
            SCHEMAS[table],
            PARTITIONED[table],
            PRUNING,
            self._task.target_file_bytes,
            self._task.checksum,
            self._puts,
        )

    def _stream(self, query: str, parameters: list[Any]) -> Iterator[pa.RecordBatch]:
        return iter(self._duck.execute(query, parameters).fetch_record_batch(self._rows_at_once))

    def _one(self, query: str, parameters: Any = None) -> tuple[Any, ...]:
        row = self._duck.execute(query, parameters).fetchone()
        assert row is not None
        return row

    def _all(self, query: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        return self._duck.execute(query, parameters).fetchall()


def _attempt(step: Callable[[], Result]) -> Result | Exception:
    """What a step of a task makes, or its failure, for the driver to decide upon."""
    try:
        return step()
    except TRANSIENT_ERRORS as error:
        return Unavailable(f"a task could not read or write: {type(error).__name__}", retry_after=2)
    except Exception as error:  # noqa: BLE001 - told to the driver
        return error


def _finished(task: AnyTask, made: _Made | Exception) -> tuple[AnyTask, Output | Exception]:
    return task, made if isinstance(made, Exception) else _attempt(made.output)


def _is_of_data(error: Exception) -> bool:
    """Whether it is the data that cannot be read, and not the database."""
    return not isinstance(error, DriverError) or "mismatch" in str(error)


def _real(events: pa.Table) -> pa.Table:
    """Without the row that is there for its types."""
    return events.filter(pc.not_equal(events.column("ord"), 0)) if events.num_rows else events


def _may_hold(file: dict[str, Any], least: str, most: str) -> bool:
    """Whether the file's bounds leave room for an entity between these two."""
    bounds = file.get("columns", {}).get("entity_id", {})
    return bool(bounds.get("min", least) <= most and bounds.get("max", most) >= least)


def _is_origin(name: str) -> bool:
    try:
        Origin(name)
    except ValueError:
        return False
    return True


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
