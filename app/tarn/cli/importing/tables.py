"""Reader of an ftm-lakehouse directory's Delta tables: open, check and read statements in bounded memory.

All damage is found before anything is sent: in the log, in the files that it names, in the columns, and, by
counting the live statements, in every page that the import will read.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tarn.cli.failures import Misuse
from tarn.cli.importing import live_sql
from tarn.cli.importing.layouts import DatasetDirectory

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa
    from deltalake import DeltaTable

MEMORY, THREADS = "1GB", 2
"""Limits of DuckDB; what does not fit into memory is spilled to disk."""

BATCH_ROWS = 4096
DEFAULT_ORIGIN = "default"
"""The origin of statements without one, as on the server."""


@dataclass
class ImportCounts:
    """The number of live statements and entities, in total and by origin."""

    statements: int = 0
    entities: int = 0
    origins: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Statements and entities of each origin."""


@dataclass
class HiddenStatements:
    """The number of statements that a source with a translog has stored but hides."""

    unlisted: int = 0
    rewritten: int = 0


class SourceStatements:
    """The live statements of one dataset, at the version at which it was opened."""

    def __init__(self, directory: DatasetDirectory, hidden: bool = False) -> None:
        """Open the tables. Raises Misuse if they cannot be read or have an unknown layout."""
        self._folder = directory.statements
        self._hidden = hidden
        self._table = None if self._folder is None else _opened(self._folder)
        self._log = None if directory.translog is None else _opened(directory.translog)
        self.layout = None
        if self._table is not None and self._folder is not None:
            columns = [field.name for field in self._table.schema().fields]
            log = None if self._log is None else [field.name for field in self._log.schema().fields]
            self.layout = live_sql.detect_layout(self._folder, columns, log)
            for table in filter(None, (self._table, self._log)):
                _require_files(table)

    @property
    def identity(self) -> str | None:
        """The id of the table."""
        return None if self._table is None else str(self._table.metadata().id)

    @property
    def version(self) -> list[int]:
        """The versions of its tables that are read."""
        return [table.version() for table in (self._table, self._log) if table is not None]

    def origins(self) -> list[str]:
        """Return the origins of all statements, live or not. Raises Misuse if the data is damaged."""
        with self._connection() as connection:
            return [] if connection is None else [origin or DEFAULT_ORIGIN for origin in self._origins(connection)]

    def count(self) -> ImportCounts:
        """Count the live statements. Raises Misuse if the data is damaged."""
        counts = ImportCounts()
        with self._connection() as connection:
            if connection is None or self.layout is None:
                return counts
            connection.execute("CREATE TEMP TABLE entities (id VARCHAR)")
            live = live_sql.live(self.layout, self._hidden)
            for origin in self._origins(connection):
                connection.execute(f"CREATE OR REPLACE TEMP TABLE one AS {live_sql.counted(live)}", {"origin": origin})
                statements, entities = _row(connection, "SELECT coalesce(sum(rows), 0)::BIGINT, count(*) FROM one")
                connection.execute("INSERT INTO entities SELECT entity_id FROM one")
                if statements:
                    before = counts.origins.get(origin or DEFAULT_ORIGIN, (0, 0))
                    counts.origins[origin or DEFAULT_ORIGIN] = (before[0] + statements, before[1] + entities)
                    counts.statements += statements
            (counts.entities,) = _row(connection, "SELECT count(DISTINCT id) FROM entities")
        return counts

    def hidden(self) -> HiddenStatements:
        """Count the hidden statements. Raises Misuse if the data is damaged."""
        total = HiddenStatements()
        with self._connection() as connection:
            if connection is None or self._log is None:
                return total
            for origin in self._origins(connection):
                unlisted, again = _row(connection, live_sql.hidden_rows(), {"origin": origin})
                total.unlisted += unlisted
                total.rewritten += again
        return total

    def roles(self) -> int:
        """Return the number of rows with a role, which Tarn does not store."""
        if self.layout is None or "role" not in self.layout.columns:
            return 0
        with self._connection() as connection:
            assert connection is not None
            (named,) = _row(connection, "SELECT count(*) FROM raw WHERE role <> ''")
        return int(named)

    def batches(self, renamed: dict[str, str]) -> Iterator["pa.RecordBatch"]:
        """Yield the live statements in small batches, with the columns that Tarn reads. Raises Misuse."""
        with self._connection() as connection:
            if connection is None or self.layout is None:
                return
            for origin in self._origins(connection):
                name = renamed.get(origin or DEFAULT_ORIGIN, origin or DEFAULT_ORIGIN)
                parameters = {"origin": origin, "name": name}
                rows = connection.execute(live_sql.rows(self.layout, self._hidden), parameters)
                yield from rows.to_arrow_reader(BATCH_ROWS)

    def _origins(self, connection: "duckdb.DuckDBPyConnection") -> list[str | None]:
        return [origin for (origin,) in connection.execute("SELECT DISTINCT origin FROM raw ORDER BY ALL").fetchall()]

    @contextmanager
    def _connection(self) -> Iterator["duckdb.DuckDBPyConnection | None"]:
        """Yield a DuckDB connection to the tables, or None if there are none."""
        if self._table is None:
            yield None
            return
        with open_duckdb() as connection, _report_damage(self._folder or ""):
            connection.register("raw", self._table.to_pyarrow_dataset())
            if self._log is not None:
                connection.register("log", self._log.to_pyarrow_dataset())
            yield connection


@contextmanager
def open_duckdb() -> Iterator["duckdb.DuckDBPyConnection"]:
    """Open DuckDB in this process with bounded memory; its temporary files are deleted afterwards."""
    import duckdb

    folder = tempfile.mkdtemp(prefix="tarn-import-")
    config: dict[str, Any] = {"memory_limit": MEMORY, "threads": THREADS, "temp_directory": folder}
    try:
        with duckdb.connect(":memory:", config=config) as connection:
            connection.execute("SET preserve_insertion_order = false")
            yield connection
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _row(
    connection: "duckdb.DuckDBPyConnection", query: str, parameters: dict[str, Any] | None = None
) -> tuple[Any, ...]:
    row = connection.execute(query, parameters or {}).fetchone()
    assert row is not None
    return row


def _opened(folder: str) -> "DeltaTable":
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        return DeltaTable(folder)
    except (DeltaError, OSError, ValueError) as error:
        raise Misuse(f"{folder} cannot be read as a Delta table, its log is damaged: {_first_line(error)}") from None


def _require_files(table: "DeltaTable") -> None:
    named = table.file_uris()
    missing = [path for path in named if not os.path.isfile(path)]
    if missing:
        raise Misuse(f"{len(missing)} of {len(named)} files that the Delta log names are missing, such as {missing[0]}")


@contextmanager
def _report_damage(folder: str) -> Iterator[None]:
    import duckdb
    import pyarrow as pa
    from deltalake.exceptions import DeltaError

    try:
        yield
    except (duckdb.Error, pa.ArrowException, DeltaError, OSError) as error:
        raise Misuse(f"the data in {folder} cannot be read: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
