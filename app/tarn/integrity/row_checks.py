"""Checks of the rows of a snapshot with DuckDB, in bounded memory whatever their number."""

# ruff: noqa: S608 - composed from our own constants, names and paths

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

import duckdb

from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.errors import Unavailable
from tarn.integrity.findings import Findings
from tarn.lake.commit import TABLES
from tarn.lake.live import invalid_sql, sql
from tarn.lake.recorded_history import is_kept
from tarn.lake.scans import IDENTITY, MARK, Scans, select_marks
from tarn.lake.table_schemas import PRUNING
from tarn.model.datasets.finding import FindingKind
from tarn.model.datasets.snapshot import Column, File, Snapshot, TableName
from tarn.model.timestamps import since_epoch
from tarn.model.work.cancellation import check, checked, interrupting
from tarn.model.work.job import Progress, Report
from tarn.settings import Settings
from tarn.storage.duckdb_sql import scan_parquet
from tarn.storage.store import ObjectMissing, Store

KEY = "(bucket, canonical_id, id)"
MOMENTS = ("first_seen", "last_seen")
STEP = 20
"""Files between two progress reports."""

LIVE_COLUMNS = ("id", "origin", "first_seen", "last_seen", "ord")
"""Columns of statement rows that are read to determine which of them are live."""

MOST_INVALID = 10
"""Invalid entities that a finding names; all of them are counted."""

DANGLING = """
WITH oldest AS (SELECT id, origin, min(ord) AS ord FROM ({rows}) GROUP BY ALL)
SELECT count(*), any_value(hex(marks.id)) FROM ({marks}) AS marks LEFT JOIN oldest USING (id, origin)
WHERE oldest.ord IS NULL OR oldest.ord > marks.ord
"""
"""Marks of the translog whose statement has no row that is at least as old."""


class LiveRowCounts(NamedTuple):
    """The number of live statements in a state, and the numbers added and ended since the one before."""

    live: int
    added: int
    ended: int


class UnreadableFile(Exception):
    """A file exists but cannot be read. Internal: callers turn it into a finding."""


@contextmanager
def opened(store: Store, settings: Settings) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a DuckDB connection for one verification, with a temporary folder to spill to."""
    with tempfile.TemporaryDirectory(prefix="tarn-verify-") as scratch:
        config: dict[str, Any] = {
            "threads": 1,
            "memory_limit": f"{settings.kernel_memory}b",
            "temp_directory": scratch,
        }
        with duckdb.connect(config=config) as duck, interrupting(duck.interrupt):
            store.connection.prepare(duck)
            yield duck


class SnapshotRows:
    """The rows of snapshots of one dataset."""

    def __init__(self, duck: duckdb.DuckDBPyConnection, store: Store, dataset: Dataset) -> None:
        self._duck = duck
        self._store = store
        self._dataset = dataset
        self._scans = Scans(store.connection, dataset.layout)
        self._keys = store.connection.keys()

    def check_files(
        self, database: Database, snapshot: Snapshot, broken: set[str], findings: Findings, report: Report
    ) -> bool:
        """Check the files of a snapshot one by one. Return whether all of them can be read."""
        files = [(table, file) for table in TABLES for file in snapshot.table(table).files]
        all_readable = True
        for number, (table, file) in enumerate(files):
            path = self._path(table, file)
            if number % STEP == 0:
                report(Progress(done=number, total=len(files), unit="files of the head"))
            if path in broken:
                all_readable = False
                continue
            try:
                wrong = list(self._wrong(path, file))
            except ObjectMissing:
                all_readable = False
                if is_kept(database, self._dataset, snapshot.seq):
                    findings.add(FindingKind.FILE_MISSING, f"snapshot {snapshot.seq} names it, but it is missing", path)
            except UnreadableFile as error:
                all_readable = False
                findings.add(FindingKind.FILE_UNREADABLE, f"its rows cannot be read: {error}", path)
            else:
                for kind, detail in wrong:
                    findings.add(kind, detail, path)
        return all_readable

    def check_fold(self, database: Database, snapshot: Snapshot, findings: Findings) -> None:
        """Check all rows of a snapshot together. Every file must be readable."""
        try:
            live = self.live(snapshot)
            dangling, example = self._dangling(snapshot)
            invalid, ids = self._invalid(snapshot)
        except Unavailable:
            # Its files were readable a moment ago. A vacuum may have deleted them with the snapshot.
            if is_kept(database, self._dataset, snapshot.seq):
                raise
            return
        path = self._dataset.layout.snapshot(snapshot.seq)
        if live != snapshot.rows.live:
            findings.add(
                FindingKind.LIVE_WRONG,
                f"{live} statements are live, but the manifest counts {snapshot.rows.live}",
                path,
            )
        if dangling:
            findings.add(
                FindingKind.MARK_DANGLING, f"{dangling} marks have no statement, for example {example.lower()}", path
            )
        if invalid:
            detail = f"the statements of {invalid} entities do not assemble, as their schemata have nothing in common"
            findings.add(FindingKind.ENTITIES_INVALID, detail, path, invalid, ids)

    def live(self, snapshot: Snapshot) -> int:
        """Count the live statements of a snapshot. Raises Unavailable."""
        (count,) = self._one(
            f"SELECT count(*) FROM ({self._stored(snapshot.statements.files, snapshot.translog.files)})"
        )
        return int(count)

    def change(self, parent: Snapshot | None, statements: Iterable[File], translog: Iterable[File]) -> LiveRowCounts:
        """Count the live statements of these files, and those added and ended since a snapshot. Raises Unavailable."""
        before = self._stored(*((), ()) if parent is None else (parent.statements.files, parent.translog.files))
        after = self._stored(statements, translog)
        query = (
            "SELECT count(is_after), count(*) - count(is_before), count(*) - count(is_after) "
            f"FROM (SELECT id, origin, true AS is_before FROM ({before})) "
            f"FULL JOIN (SELECT id, origin, true AS is_after FROM ({after})) USING (id, origin)"
        )
        return LiveRowCounts(*self._one(query))

    def _wrong(self, path: str, file: File) -> Iterator[tuple[FindingKind, str]]:
        names = [name for name in PRUNING if name in file.columns]
        measured = "".join(
            f", {_number(name, f'min({name})')}, {_number(name, f'max({name})')}, count(*) - count({name})"
            for name in names
        )
        # Rows come in the order of the file: one thread reads them, and the window keeps only the previous row.
        source = scan_parquet([self._store.connection.file_url(path)])
        unsorted, *values = self._one(
            f"SELECT count(*) FILTER (before IS NOT NULL AND {KEY} < before){measured} "
            f"FROM (SELECT *, lag({KEY}) OVER () AS before FROM {source})",
            path,
        )
        if unsorted:
            yield FindingKind.ROWS_UNSORTED, f"{unsorted} rows are out of order"
        for place, name in enumerate(names):
            least, most, nulls = values[3 * place : 3 * place + 3]
            if not _bounds(file.columns[name], least, most, nulls):
                yield FindingKind.BOUNDS_WRONG, f"{name}: values contradict the recorded bounds or null count"

    def _dangling(self, snapshot: Snapshot) -> tuple[int, str]:
        if not snapshot.translog.files:
            return 0, ""
        rows = self._scans.select("statements", snapshot.statements.files, IDENTITY)
        marks = self._scans.select("translog", snapshot.translog.files, IDENTITY)
        count, example = self._one(DANGLING.format(rows=rows, marks=marks))
        return int(count), str(example)

    def _invalid(self, snapshot: Snapshot) -> tuple[int, list[str]]:
        """Return the number of entities whose statements do not assemble, and the first ids. Raises Unavailable."""
        if not snapshot.statements.files:
            return 0, []
        needed = (*LIVE_COLUMNS, "canonical_id", "schema")
        live = self._stored(snapshot.statements.files, snapshot.translog.files, needed)
        count, ids = self._one(
            f"SELECT count(*), coalesce(min(canonical_id, {MOST_INVALID}), []) "
            f"FROM ({invalid_sql.invalid(f'({live})', 'canonical_id')})"
        )
        return int(count), list(ids)

    def _stored(
        self, statements: Iterable[File], translog: Iterable[File], columns: Iterable[str] = LIVE_COLUMNS
    ) -> str:
        """Return SQL for the live statements of these files, with these columns of the statements."""
        statements, marks = list(statements), select_marks(translog)
        return sql.stored_live(
            self._scans.select("statements", statements, columns),
            self._scans.select("translog", marks, MARK) if marks else None,
            self._scans.select("statements", statements, IDENTITY),
        )

    def _path(self, table: TableName, file: File) -> str:
        return f"{self._dataset.layout.table(table)}/{file.path}"

    def _one(self, query: str, path: str | None = None) -> tuple[Any, ...]:
        """Run a query that returns one row, on the one file `path` or on many.

        Raises Unavailable if the store does not respond, DuckDB runs out of memory, or one of many files is missing;
        for a single file, ObjectMissing and UnreadableFile.
        """
        keys = self._store.connection.keys()
        if keys != self._keys:
            self._store.connection.prepare(self._duck)
            self._keys = keys
        try:
            row = self._duck.execute(query).fetchone()
        except duckdb.Error as error:
            check()
            if path is None or isinstance(error, duckdb.OutOfMemoryException):
                raise Unavailable(f"rows cannot be read: {type(error).__name__}", retry_after=5) from error
            # Raises if the file is missing, or if the store does not respond.
            for _ in checked(self._store.stream(path)):
                pass
            raise UnreadableFile(str(error).splitlines()[0]) from error
        assert row is not None
        return row


def _number(name: str, value: str) -> str:
    return f"epoch_us({value})" if name in MOMENTS else value


def _bounds(recorded: Column, least: Any, most: Any, nulls: int) -> bool:
    """Return whether the recorded bounds and null count of a column hold for its values."""
    if recorded.nulls is not None and recorded.nulls != nulls:
        return False
    low, high = _measured(recorded.min, least), _measured(recorded.max, most)
    return least is None or ((low is None or low <= least) and (high is None or high >= most))


def _measured(bound: Any, like: Any) -> Any:
    """Convert a bound to DuckDB's value: times to microseconds since 1970. Others are returned unchanged."""
    if isinstance(bound, str) and isinstance(like, int):
        return since_epoch(datetime.fromisoformat(bound))
    return bound
