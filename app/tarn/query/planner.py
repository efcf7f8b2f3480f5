"""Scan planner: choose the data files that a read needs, by origin and column bounds, and build the SQL for them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tarn.datasets.registry import Dataset
from tarn.lake.scans import IDENTITY, MARK, ROW, Scans, prune, select_marks, within
from tarn.model.datasets.ranges import EVERYTHING as EVERY_KEY
from tarn.model.datasets.ranges import Range
from tarn.model.datasets.snapshot import File, Snapshot
from tarn.storage.store import Store


class SqlQuery(NamedTuple):
    """SQL and its parameters."""

    sql: str
    parameters: tuple[str, ...] = ()


EVERYTHING = SqlQuery("")


class ScanPlan:
    """The files of one snapshot, or of one of its origins or a range of its keys, and the SQL to read them."""

    def __init__(
        self,
        store: Store,
        dataset: Dataset,
        snapshot: Snapshot | None,
        origin: str | None = None,
        keys: Range = EVERY_KEY,
    ) -> None:
        self._scans = Scans(store.connection, dataset.layout)
        statements = () if snapshot is None else snapshot.statements.files
        translog = () if snapshot is None else snapshot.translog.files
        self.within = EVERYTHING if keys == EVERY_KEY else SqlQuery(f"WHERE {within(keys)}")
        """The condition that every scan of a range needs, because files may extend beyond its bounds."""
        self.statements = prune(statements, origin=origin, keys=[keys])
        self.marks = prune(select_marks(translog), keys=[keys])
        self.is_each_once = snapshot is not None and sum(file.rows for file in statements) == snapshot.rows.live
        """Whether every row is live and the only one of its identity."""

    def rows(
        self, where: SqlQuery = EVERYTHING, ids: Sequence[str] | None = None, by: str = "canonical_id"
    ) -> SqlQuery | None:
        """Return a query for statement rows, from the files that may have one of the sorted ids in the column `by`.

        Return None if there are no such files.
        """
        files = prune(self.statements, ids=ids, column=by)
        return SqlQuery(self._scans.select("statements", files, ROW, where.sql), where.parameters) if files else None

    def identities(self, where: SqlQuery = EVERYTHING) -> SqlQuery:
        """Return a query for the identities of statement rows."""
        return SqlQuery(self._scans.select("statements", self.statements, IDENTITY, where.sql), where.parameters)

    def changes(self, where: SqlQuery = EVERYTHING, ids: Sequence[str] | None = None) -> SqlQuery | None:
        """Return a query for the changes to rows since they were written; None if there are none."""
        files = prune(self.marks, ids=ids, column="entity_id")
        return SqlQuery(self._scans.select("translog", files, MARK, where.sql), where.parameters) if files else None

    def entities_of(self, files: Iterable[File], marks: Iterable[File]) -> str:
        """Return SQL for the ids of the entities that have rows in these files of the two tables."""
        rows = self._scans.select("statements", files, ("entity_id",), self.within.sql)
        return f"{rows} UNION {self._scans.select('translog', marks, ('entity_id',), self.within.sql)}"

    def nothing(self) -> str:
        """Return SQL for no rows, with the columns of `rows`."""
        return self._scans.select("statements", (), ROW)
