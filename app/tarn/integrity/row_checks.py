"""Rows of a snapshot, looked over in DuckDB: in bounded memory, whatever their number."""

# ruff: noqa: S608 - put together from constants, names and paths of ours

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
from tarn.lake.delta_tables import folder_of
from tarn.lake.live import invalid_sql
from tarn.lake.live import sql as fold_sql
from tarn.lake.recorded_history import is_kept
from tarn.lake.table_schemas import PARTITIONED, PRUNING
from tarn.model.cancellation import check, checked, interrupting
from tarn.model.finding import FindingKind
from tarn.model.job import Progress, Report
from tarn.model.snapshot import Column, File, Snapshot, TableName
from tarn.model.statement import EPOCH
from tarn.settings import Settings
from tarn.storage.store import Missing, Store

KEY = "(bucket, canonical_id, id)"
MOMENTS = ("first_seen", "last_seen")
STEP = 20
"""Files between two reports."""

NO_ROWS = (
    "SELECT NULL::BLOB AS id, NULL::VARCHAR AS origin, NULL::TIMESTAMPTZ AS first_seen, "
    "NULL::TIMESTAMPTZ AS last_seen, NULL::BIGINT AS ord WHERE false"
)

LIVE_COLUMNS = ("id", "origin", "kind", "first_seen", "last_seen", "ord")
"""What is read of files to tell what is live."""

MOST_INVALID = 10
"""Invalid entities that a finding names; all of them are counted."""

DANGLING = """
WITH oldest AS (SELECT id, origin, min(ord) AS ord FROM ({rows}) GROUP BY ALL)
SELECT count(*), any_value(hex(marks.id)) FROM ({marks}) AS marks LEFT JOIN oldest USING (id, origin)
WHERE oldest.ord IS NULL OR oldest.ord > marks.ord
"""
"""Marks without a row of their statement that is as old as they are."""


class Moved(NamedTuple):
    """What is live in a state, and what differs from the one before."""

    live: int
    added: int
    ended: int


class Unreadable(Exception):
    """A file cannot be read, though it is there. A signal for the code that asked."""


@contextmanager
def opened(store: Store, settings: Settings) -> Iterator[duckdb.DuckDBPyConnection]:
    """DuckDB for one verification, with room on the disk for what outgrows its memory."""
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
        self._keys = store.connection.keys()

    def check_files(
        self, database: Database, snapshot: Snapshot, broken: set[str], found: Findings, report: Report
    ) -> bool:
        """Look at the files of a snapshot one by one. Whether all of them can be read."""
        files = [(table, file) for table in TABLES for file in snapshot.table(table).files]
        whole = True
        for number, (table, file) in enumerate(files):
            path = self._path(table, file)
            if number % STEP == 0:
                report(Progress(done=number, total=len(files), unit="files of the head"))
            if path in broken:
                whole = False
                continue
            try:
                wrong = list(self._wrong(path, file))
            except Missing:
                whole = False
                if is_kept(database, self._dataset, snapshot.seq):
                    found.add(FindingKind.FILE_MISSING, f"snapshot {snapshot.seq} names it, and it is not there", path)
            except Unreadable as error:
                whole = False
                found.add(FindingKind.FILE_UNREADABLE, f"its rows cannot be read: {error}", path)
            else:
                for kind, detail in wrong:
                    found.add(kind, detail, path)
        return whole

    def check_fold(self, database: Database, snapshot: Snapshot, found: Findings) -> None:
        """Look at all rows of a snapshot together; every file can be read."""
        try:
            live = self.live(snapshot)
            dangling, example = self._dangling(snapshot)
            invalid, ids = self._invalid(snapshot)
        except Unavailable:
            # Its files could be read a moment ago. A vacuum may have taken them, with the snapshot.
            if is_kept(database, self._dataset, snapshot.seq):
                raise
            return
        path = self._dataset.layout.snapshot(snapshot.seq)
        if live != snapshot.rows.live:
            found.add(FindingKind.LIVE_WRONG, f"{live} statements are live, and {snapshot.rows.live} counted", path)
        if dangling:
            found.add(FindingKind.MARK_DANGLING, f"{dangling} marks have no statement, such as {example.lower()}", path)
        if invalid:
            detail = f"the statements of {invalid} entities do not assemble, as their schemata have nothing in common"
            found.add(FindingKind.ENTITIES_INVALID, detail, path, invalid, ids)

    def live(self, snapshot: Snapshot) -> int:
        """How many statements are live in a snapshot. Raises Unavailable."""
        (count,) = self._one(
            f"SELECT count(*) FROM ({self._stored(snapshot.statements.files, snapshot.translog.files)})"
        )
        return int(count)

    def change(self, parent: Snapshot | None, statements: Iterable[File], translog: Iterable[File]) -> Moved:
        """What is live in these files, and what that changes against a snapshot. Raises Unavailable."""
        before = self._stored(*((), ()) if parent is None else (parent.statements.files, parent.translog.files))
        after = self._stored(statements, translog)
        query = (
            "SELECT count(is_after), count(*) - count(is_before), count(*) - count(is_after) "
            f"FROM (SELECT id, origin, true AS is_before FROM ({before})) "
            f"FULL JOIN (SELECT id, origin, true AS is_after FROM ({after})) USING (id, origin)"
        )
        return Moved(*self._one(query))

    def _wrong(self, path: str, file: File) -> Iterator[tuple[FindingKind, str]]:
        names = [name for name in PRUNING if name in file.columns]
        measured = "".join(
            f", {_number(name, f'min({name})')}, {_number(name, f'max({name})')}, count(*) - count({name})"
            for name in names
        )
        # Rows come in the file's own order: one thread reads them, and the window keeps nothing but the last.
        unsorted, *values = self._one(
            f"SELECT count(*) FILTER (before IS NOT NULL AND {KEY} < before){measured} "
            f"FROM (SELECT *, lag({KEY}) OVER () AS before FROM {self._parquet([path])})",
            path,
        )
        if unsorted:
            yield FindingKind.ROWS_UNSORTED, f"{unsorted} rows are not in their place"
        for place, name in enumerate(names):
            least, most, nulls = values[3 * place : 3 * place + 3]
            if not _bounds(file.columns[name], least, most, nulls):
                yield FindingKind.BOUNDS_WRONG, f"{name}: values lie outside of what is said of them"

    def _dangling(self, snapshot: Snapshot) -> tuple[int, str]:
        rows = self._scan("statements", snapshot.statements.files)
        marks = self._scan("translog", snapshot.translog.files, "id, origin, ord")
        if marks is None:
            return 0, ""
        count, example = self._one(DANGLING.format(rows=rows or NO_ROWS, marks=marks))
        return int(count), str(example)

    def _invalid(self, snapshot: Snapshot) -> tuple[int, list[str]]:
        """Count the entities whose statements do not assemble; the ids of the first ones. Raises Unavailable."""
        if not snapshot.statements.files:
            return 0, []
        needed = ", ".join(name for name in (*LIVE_COLUMNS, "canonical_id", "schema") if _has("statements", name))
        live = self._stored(snapshot.statements.files, snapshot.translog.files, needed)
        count, ids = self._one(
            f"SELECT count(*), coalesce(min(canonical_id, {MOST_INVALID}), []) "
            f"FROM ({invalid_sql.invalid(f'({live})', 'canonical_id')})"
        )
        return int(count), list(ids)

    def _stored(self, statements: Iterable[File], translog: Iterable[File], columns: str | None = None) -> str:
        """SQL for what is live in these files, with these columns of the statements."""
        rows = self._scan("statements", statements, columns)
        marks = self._scan("translog", [file for file in translog if file.partition["kind"] != "insert"])
        return fold_sql.STORED.format(rows=rows or NO_ROWS, marks=marks or fold_sql.NO_MARKS, materialized="")

    def _scan(self, table: TableName, files: Iterable[File], columns: str | None = None) -> str | None:
        """SQL that reads files of a table, one partition after the other."""
        partition = PARTITIONED[table]
        by_value: dict[str, list[str]] = {}
        for file in files:
            by_value.setdefault(file.partition[partition], []).append(self._path(table, file))
        kept = columns or ", ".join(name for name in LIVE_COLUMNS if _has(table, name))
        parts = [
            f"SELECT {kept} FROM (SELECT *, {_quoted(value)} AS {partition} FROM {self._parquet(paths)})"
            for value, paths in sorted(by_value.items())
        ]
        return " UNION ALL ".join(parts) if parts else None

    def _parquet(self, paths: Iterable[str]) -> str:
        urls = ", ".join(_quoted(self._store.connection.file_url(path)) for path in paths)
        return f"read_parquet([{urls}], hive_partitioning = false)"

    def _path(self, table: TableName, file: File) -> str:
        return f"{folder_of(self._dataset, table)}/{file.path}"

    def _one(self, query: str, path: str | None = None) -> tuple[Any, ...]:
        """One row, of one file or of many.

        Raises Unavailable if the store or DuckDB's memory give out, or one of many files is gone; of the one, Missing
        and Unreadable.
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
            # Raises if it is gone, or if the store does not answer.
            for _ in checked(self._store.stream(path)):
                pass
            raise Unreadable(str(error).splitlines()[0]) from error
        assert row is not None
        return row


def _has(table: TableName, name: str) -> bool:
    return name != "kind" or table == "translog"


def _number(name: str, value: str) -> str:
    return f"epoch_us({value})" if name in MOMENTS else value


def _bounds(said: Column, least: Any, most: Any, nulls: int) -> bool:
    """Whether what is said of a column is true of its values."""
    if said.nulls is not None and said.nulls != nulls:
        return False
    low, high = _measured(said.min, least), _measured(said.max, most)
    return least is None or ((low is None or low <= least) and (high is None or high >= most))


def _measured(bound: Any, like: Any) -> Any:
    """A bound as DuckDB has it: moments as microseconds since 1970. What cannot be compared bounds nothing."""
    if isinstance(bound, str) and isinstance(like, int):
        since = datetime.fromisoformat(bound) - EPOCH
        return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return bound


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
