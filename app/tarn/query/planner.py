"""Which files a read needs, by origin and by the bounds that their writers saw; and the SQL that reads them."""

# ruff: noqa: S608 - put together from constants, names and paths of ours; what users send is bound

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import groupby
from typing import NamedTuple

from tarn.datasets.registry import Dataset
from tarn.model.ranges import EVERYTHING as EVERY_KEY
from tarn.model.ranges import Range, span
from tarn.model.snapshot import File, Snapshot
from tarn.storage.store import Store

ROW = (
    "canonical_id, entity_id, id, schema, prop, value, lang, original_value, external, {origin} AS origin, "
    "epoch_us(first_seen) AS first_seen, epoch_us(last_seen) AS last_seen, ord"
)
IDENTITY = "id, {origin} AS origin, ord"
MARK = "id, origin, {kind} AS kind, epoch_us(first_seen) AS first_seen, epoch_us(last_seen) AS last_seen, ord"

NO_ROWS = (
    "SELECT NULL::VARCHAR AS canonical_id, NULL::VARCHAR AS entity_id, NULL::BLOB AS id, NULL::VARCHAR AS schema, "
    "NULL::VARCHAR AS prop, NULL::VARCHAR AS value, NULL::VARCHAR AS lang, NULL::VARCHAR AS original_value, "
    "NULL::BOOLEAN AS external, NULL::VARCHAR AS origin, NULL::BIGINT AS first_seen, NULL::BIGINT AS last_seen, "
    "NULL::BIGINT AS ord WHERE false"
)
NO_MARKS = (
    "SELECT NULL::BLOB AS id, NULL::VARCHAR AS origin, NULL::VARCHAR AS kind, NULL::BIGINT AS first_seen, "
    "NULL::BIGINT AS last_seen, NULL::BIGINT AS ord WHERE false"
)


class Query(NamedTuple):
    """SQL, and what is bound in it."""

    sql: str
    parameters: tuple[str, ...] = ()

    def then(self, other: "Query") -> "Query":
        if NOTHING in (self, other):
            return self if other == NOTHING else other
        return Query(f"{self.sql} UNION ALL {other.sql}", self.parameters + other.parameters)


EVERYTHING = Query("")
NOTHING = Query(NO_ROWS)
"""What is stored where no file can hold it: there is no need to ask."""


class ScanPlan:
    """The files of one snapshot, or of some of its origins or a range of its keys, and how to read them."""

    def __init__(
        self,
        store: Store,
        dataset: Dataset,
        snapshot: Snapshot | None,
        origin: str | None = None,
        within: Range = EVERY_KEY,
    ) -> None:
        self._store = store
        self._dataset = dataset
        statements = () if snapshot is None else snapshot.statements.files
        translog = () if snapshot is None else snapshot.translog.files
        self.within = Query("" if within == EVERY_KEY else f"WHERE {_among(within)}")
        """What every scan of a range needs: files may lie across its bounds."""
        self.statements = [
            file for file in statements if origin in (None, file.partition["origin"]) and span(file).meets(within)
        ]
        self.marks = [file for file in translog if file.partition["kind"] != "insert" and span(file).meets(within)]
        """What happened after a row was written; `insert` repeats what the row itself says."""
        self.is_once = snapshot is not None and sum(file.rows for file in statements) == snapshot.rows.live
        """Every row is live and the only one of its identity."""

    def rows(
        self,
        where: Query = EVERYTHING,
        ids: Sequence[str] | None = None,
        by: str = "canonical_id",
        columns: str = ROW,
    ) -> Query:
        """The rows of statements, from files that may hold one of these ids in a column."""
        files = _holding(self.statements, ids, by)
        if not files:
            return NOTHING
        folder = self._dataset.layout.statements
        origins = {file.partition["origin"] for file in files}
        if len(origins) == 1:
            source, origin = self._parquet(folder, files), quoted(origins.pop())
        else:
            named = ", ".join(
                f"({quoted(self._url(folder, file))}, {quoted(file.partition['origin'])})" for file in files
            )
            source = (
                f"{self._parquet(folder, files, named=True)} "
                f"LEFT JOIN (VALUES {named}) AS files (filename, origin) USING (filename)"
            )
            # A file under a name that was not asked for must not be passed over.
            origin = "coalesce(files.origin, error('an unknown file: ' || filename))"
        return Query(f"SELECT {columns.format(origin=origin)} FROM {source} {where.sql}", where.parameters)

    def happened(self, where: Query = EVERYTHING, ids: Sequence[str] | None = None) -> Query | None:
        """What happened to rows since they were written; None if nothing did."""
        files = _holding(self.marks, ids, "entity_id")
        folder = self._dataset.layout.translog

        def kind(file: File) -> str:
            return file.partition["kind"]

        scans = [
            Query(
                f"SELECT {MARK.format(kind=quoted(name))} FROM {self._parquet(folder, group)} {where.sql}",
                where.parameters,
            )
            for name, group in groupby(sorted(files, key=kind), kind)
        ]
        return reduce(Query.then, scans) if scans else None

    def entities_of(self, files: Iterable[File], marks: Iterable[File]) -> str:
        """SQL for the ids of the entities that some files of the two tables speak of."""
        found = {self._dataset.layout.statements: [*files], self._dataset.layout.translog: [*marks]}
        scans = [
            f"SELECT entity_id FROM {self._parquet(folder, some)} {self.within.sql}"
            for folder, some in found.items()
            if some
        ]
        return " UNION ".join(scans) or "SELECT NULL::VARCHAR AS entity_id WHERE false"

    def _parquet(self, folder: str, files: Iterable[File], named: bool = False) -> str:
        urls = ", ".join(quoted(self._url(folder, file)) for file in files)
        return f"read_parquet([{urls}], hive_partitioning = false{', filename = true' if named else ''})"

    def _url(self, folder: str, file: File) -> str:
        return self._store.connection.file_url(f"{folder}/{file.path}")


def quoted(text: str) -> str:
    """Text of ours, such as a path in the lake, as SQL has it."""
    return "'" + text.replace("'", "''") + "'"


def _among(keys: Range) -> str:
    above = f"canonical_id >= {quoted(keys.low)}"
    return above if keys.high is None else f"{above} AND canonical_id < {quoted(keys.high)}"


def _holding(files: Sequence[File], ids: Sequence[str] | None, by: str) -> list[File]:
    """The files whose bounds leave room for one of these ids, which are sorted, in a column."""
    return list(files) if ids is None else [file for file in files if _may_hold(file, by, ids)]


def _may_hold(file: File, column: str, ids: Sequence[str]) -> bool:
    bounds = file.columns.get(column)
    if bounds is None or bounds.min is None or bounds.max is None:
        return True
    first = bisect_left(ids, str(bounds.min))
    return first < len(ids) and ids[first] <= str(bounds.max)
