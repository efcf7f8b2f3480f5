"""The statements of a lakehouse directory: its Delta tables opened, checked, and read in bounded memory.

Everything that can be wrong with them is found before anything is sent: the log, the files that it names, the columns,
and by counting what is live, every page that will be read again.
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
"""What DuckDB may take; what does not fit goes to the disk."""

BATCH_ROWS = 4096
DEFAULT_ORIGIN = "default"
"""The origin of what names none, here as at the server."""


@dataclass
class ImportCounts:
    """How much is live."""

    statements: int = 0
    entities: int = 0
    origins: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Statements and entities of each origin."""


@dataclass
class HiddenStatements:
    """Statements that a source with a translog holds and does not show."""

    unlisted: int = 0
    said_again: int = 0


class SourceStatements:
    """The live statements of one dataset, as they were when it was opened."""

    def __init__(self, place: DatasetDirectory, hidden: bool = False) -> None:
        """Raises Misuse if the tables cannot be read or are of a layout that is not known."""
        self._folder = place.statements
        self._hidden = hidden
        self._table = None if self._folder is None else _opened(self._folder)
        self._log = None if place.translog is None else _opened(place.translog)
        self.layout = None
        if self._table is not None and self._folder is not None:
            columns = [field.name for field in self._table.schema().fields]
            log = None if self._log is None else [field.name for field in self._log.schema().fields]
            self.layout = live_sql.detect_layout(self._folder, columns, log)
            for table in filter(None, (self._table, self._log)):
                _require_files(table)

    @property
    def identity(self) -> str | None:
        """What tells this table from every other."""
        return None if self._table is None else str(self._table.metadata().id)

    @property
    def version(self) -> list[int]:
        """The versions of its tables that are read."""
        return [table.version() for table in (self._table, self._log) if table is not None]

    def origins(self) -> list[str]:
        """Who says something, live or not. Raises Misuse if the data is damaged."""
        with self._connection() as found:
            return [] if found is None else [origin or DEFAULT_ORIGIN for origin in self._origins(found)]

    def count(self) -> ImportCounts:
        """How much is live. Raises Misuse if the data is damaged."""
        counts = ImportCounts()
        with self._connection() as found:
            if found is None or self.layout is None:
                return counts
            found.execute("CREATE TEMP TABLE entities (id VARCHAR)")
            live = live_sql.live(self.layout, self._hidden)
            for origin in self._origins(found):
                found.execute(f"CREATE OR REPLACE TEMP TABLE one AS {live_sql.counted(live)}", {"origin": origin})
                statements, entities = _row(found, "SELECT coalesce(sum(rows), 0)::BIGINT, count(*) FROM one")
                found.execute("INSERT INTO entities SELECT entity_id FROM one")
                if statements:
                    before = counts.origins.get(origin or DEFAULT_ORIGIN, (0, 0))
                    counts.origins[origin or DEFAULT_ORIGIN] = (before[0] + statements, before[1] + entities)
                    counts.statements += statements
            (counts.entities,) = _row(found, "SELECT count(DISTINCT id) FROM entities")
        return counts

    def hidden(self) -> HiddenStatements:
        """What the source does not show. Raises Misuse if the data is damaged."""
        total = HiddenStatements()
        with self._connection() as found:
            if found is None or self._log is None:
                return total
            for origin in self._origins(found):
                unlisted, again = _row(found, live_sql.hidden_rows(), {"origin": origin})
                total.unlisted += unlisted
                total.said_again += again
        return total

    def roles(self) -> int:
        """How many rows name who said them, which Tarn has no place for."""
        if self.layout is None or "role" not in self.layout.columns:
            return 0
        with self._connection() as found:
            assert found is not None
            (named,) = _row(found, "SELECT count(*) FROM raw WHERE role <> ''")
        return int(named)

    def batches(self, renamed: dict[str, str]) -> Iterator["pa.RecordBatch"]:
        """The live statements in small batches, with the columns that Tarn takes. Raises Misuse."""
        with self._connection() as found:
            if found is None or self.layout is None:
                return
            for origin in self._origins(found):
                name = renamed.get(origin or DEFAULT_ORIGIN, origin or DEFAULT_ORIGIN)
                asked = {"origin": origin, "name": name}
                yield from found.execute(live_sql.rows(self.layout, self._hidden), asked).to_arrow_reader(BATCH_ROWS)

    def _origins(self, found: "duckdb.DuckDBPyConnection") -> list[str | None]:
        return [origin for (origin,) in found.execute("SELECT DISTINCT origin FROM raw ORDER BY ALL").fetchall()]

    @contextmanager
    def _connection(self) -> Iterator["duckdb.DuckDBPyConnection | None"]:
        """DuckDB over the tables, or nothing if there are none."""
        if self._table is None:
            yield None
            return
        with engine() as found, _damage_told(self._folder or ""):
            found.register("raw", self._table.to_pyarrow_dataset())
            if self._log is not None:
                found.register("log", self._log.to_pyarrow_dataset())
            yield found


@contextmanager
def engine() -> Iterator["duckdb.DuckDBPyConnection"]:
    """DuckDB in this process, bounded in memory, its temporary files gone afterwards."""
    import duckdb

    folder = tempfile.mkdtemp(prefix="tarn-import-")
    config: dict[str, Any] = {"memory_limit": MEMORY, "threads": THREADS, "temp_directory": folder}
    try:
        with duckdb.connect(":memory:", config=config) as connection:
            connection.execute("SET preserve_insertion_order = false")
            yield connection
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _row(found: "duckdb.DuckDBPyConnection", query: str, asked: dict[str, Any] | None = None) -> tuple[Any, ...]:
    row = found.execute(query, asked or {}).fetchone()
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
def _damage_told(folder: str) -> Iterator[None]:
    import duckdb
    import pyarrow as pa
    from deltalake.exceptions import DeltaError

    try:
        yield
    except (duckdb.Error, pa.ArrowException, DeltaError, OSError) as error:
        raise Misuse(f"the data in {folder} cannot be read: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
