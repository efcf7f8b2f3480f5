"""Base of all tasks: what a task is, what it may use of the process that runs it, and what it returns.

Cheap to import, as every task's module imports it: it opens nothing and does not import FtM.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import duckdb

from tarn.lake.live import sql
from tarn.lake.table_schemas import PARTITIONED, PRUNING, SCHEMAS
from tarn.model.datasets.snapshot import File, TableName, Tally
from tarn.model.names import DatasetName
from tarn.model.work.cancellation import interrupting
from tarn.pipeline.tasks.data_files import DataFileWriter, FilePuts
from tarn.pipeline.tasks.journal_slice import Journal, JournalReader
from tarn.storage.layout import DatasetLayout
from tarn.storage.store import Store

if TYPE_CHECKING:
    from tarn.journal.stage_parts import StagePartWriter

Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True)
class TaskContext:
    """What tasks may use of the process that runs them. What takes time to open is opened by the first task that uses
    it, and shared by all that follow."""

    store: Store
    puts: FilePuts
    journal: Journal
    buckets: dict[str, str]
    """Buckets of all schemata that FtM knows. Importing FtM takes a second, which executors are spared."""
    memory: str
    threads: int
    scratch: str
    opened: ExitStack

    @cached_property
    def duckdb_connection(self) -> duckdb.DuckDBPyConnection:
        """DuckDB with access to the store."""
        return self.opened.enter_context(self._connect())

    @cached_property
    def fold_connection(self) -> duckdb.DuckDBPyConnection:
        """The same DuckDB, with the temporary tables of `lake.live.sql`."""
        for statement in sql.TABLES:
            self.duckdb_connection.execute(statement)
        families = [list(self.buckets), list(self.buckets.values())]
        self.duckdb_connection.execute("INSERT INTO families SELECT unnest(?), unnest(?)", families)
        return self.duckdb_connection

    @cached_property
    def journal_reader(self) -> JournalReader:
        return self.opened.enter_context(self.journal.open_reader())

    @cached_property
    def stage_parts(self) -> "StagePartWriter":
        """Writer of parts of stages."""
        return self.opened.enter_context(self.journal.open_writer())

    @contextmanager
    def _connect(self) -> Iterator[duckdb.DuckDBPyConnection]:
        settings: dict[str, str | bool | int | float | list[str]] = {
            "threads": self.threads,
            "memory_limit": f"{self.memory}b",
            "temp_directory": self.scratch,
            "preserve_insertion_order": False,
        }
        with duckdb.connect(config=settings) as connection, interrupting(connection.interrupt):
            self.store.connection.prepare(connection)
            yield connection


@dataclass(frozen=True, slots=True)
class Task(ABC, Generic[Result]):
    """A piece of work for one executor. It is pickled, with everything it needs to know."""

    number: int
    dataset: DatasetName

    @abstractmethod
    def run(self, context: TaskContext) -> Callable[[], Result]:
        """Do the work. Returns a function that returns the result, after the files that the task wrote are durable.

        The next task runs while the files are put: with small files, most of the time is spent waiting for the store.
        """


class InvalidEvent(NamedTuple):
    """An event that cannot be written."""

    ord: int
    reason: str


class TableFiles(NamedTuple):
    """New files of the tables: durable, but not in any snapshot yet."""

    files: dict[TableName, list[File]]
    tally: Tally
    rejected: list[InvalidEvent]


@dataclass(frozen=True, slots=True)
class TableTask(Task[TableFiles]):
    """A task that writes files of a dataset's tables."""

    target_file_bytes: int
    checksum: bool

    def writer(self, table: TableName, context: TaskContext) -> DataFileWriter:
        return DataFileWriter(
            context.store,
            DatasetLayout(self.dataset).table(table),
            SCHEMAS[table],
            PARTITIONED[table],
            PRUNING,
            self.target_file_bytes,
            self.checksum,
            context.puts,
        )


@dataclass(frozen=True, slots=True)
class PendingFiles:
    """Files of the tables that are still being put. Calling it waits until they are durable."""

    writers: dict[TableName, DataFileWriter]
    tally: Tally
    rejected: list[InvalidEvent]

    def __call__(self) -> TableFiles:
        return TableFiles({table: writer.files() for table, writer in self.writers.items()}, self.tally, self.rejected)
