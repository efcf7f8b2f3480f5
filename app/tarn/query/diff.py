"""Diff of two snapshots: entities that were added, modified or deleted."""

# ruff: noqa: S608 - SQL is built from constants; user input is bound

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import duckdb

from tarn.datasets.registry import Dataset
from tarn.lake.scans import prune, select_marks
from tarn.model.datasets.ranges import EVERYTHING, Range
from tarn.model.datasets.snapshot import File, Table
from tarn.query import live
from tarn.query.live import COLUMNS
from tarn.query.output.assembly import entity_lines
from tarn.query.planner import ScanPlan
from tarn.query.reader import Reading, RequestedState
from tarn.query.views import View
from tarn.storage.store import Store

Op = Literal["ADD", "DEL", "MOD"]
OPS: tuple[Op, ...] = get_args(Op)


class Difference(NamedTuple):
    """An entity that differs: its line in the latter snapshot, or in the former one if it was deleted."""

    op: Op
    id: str
    line: bytes


class DiffPosition(NamedTuple):
    """The position of a difference in the order of the diff: by operation, then by canonical id."""

    op: Op
    id: str


class SnapshotPair(NamedTuple):
    """Two states of one dataset to compare."""

    former: View
    latter: View


def resolve_pair(reading: Reading, dataset: Dataset, former: str, latter: str) -> SnapshotPair:
    """Resolve two snapshots by id, number, timestamp or ref. Raises as `Views.at` does."""
    return SnapshotPair(
        reading.view(dataset, RequestedState(at=former)), reading.view(dataset, RequestedState(at=latter))
    )


def differences(
    duck: duckdb.DuckDBPyConnection,
    store: Store,
    pair: SnapshotPair,
    after: DiffPosition | None = None,
    limit: int | None = None,
    within: Range = EVERYTHING,
) -> Iterator[list[Difference]]:
    """Yield batches of the entities whose JSON differs: those after the position `after`, at most `limit`.

    `within` restricts the diff to a range of canonical ids.
    """
    former, latter = pair.former.snapshot, pair.latter.snapshot
    assert former is not None
    assert latter is not None
    if former.content == latter.content:
        return
    live.make_within(duck, store, pair.former, "former", within)
    live.make_within(duck, store, pair.latter, "latter", within)
    # Every difference appears, under the same key, in a file that only one of the two snapshots has.
    _create_ops(duck, select_candidates(store, pair, within))
    duck.execute(
        "CREATE OR REPLACE TEMP TABLE shown AS SELECT op, canonical_id FROM ops "
        "WHERE $op IS NULL OR (op, canonical_id) > ($op, $id) ORDER BY op, canonical_id LIMIT $most",
        {"op": None if after is None else after.op, "id": None if after is None else after.id, "most": limit},
    )
    for op in OPS:
        side = "former" if op == "DEL" else "latter"
        source = f"(SELECT * FROM {side} SEMI JOIN (FROM shown WHERE op = '{op}') USING (canonical_id))"
        for batch in entity_lines(duck, source):
            columns = (batch.column(name).to_pylist() for name in ("canonical_id", "line"))
            yield [Difference(op, name, line.encode()) for name, line in zip(*columns, strict=True)]


def select_candidates(store: Store, pair: SnapshotPair, within: Range = EVERYTHING) -> str:
    """Return SQL for the ids of the entities that may differ."""
    former, latter = pair.former.snapshot, pair.latter.snapshot
    assert former is not None
    assert latter is not None
    plan = ScanPlan(store, pair.former.dataset, former, keys=within)
    marks = select_marks(files_of_one(former.translog, latter.translog, within))
    return plan.entities_of(files_of_one(former.statements, latter.statements, within), marks)


def _create_ops(duck: duckdb.DuckDBPyConnection, candidates: str) -> None:
    """Create the table `ops` of the entities that differ, among the entity ids that the SQL `candidates` returns."""
    duck.execute(f"CREATE OR REPLACE TEMP TABLE diff_candidates AS {candidates}")
    for name in ("former", "latter"):
        duck.execute(
            f"CREATE OR REPLACE TEMP TABLE {name}_candidates AS "
            f"SELECT {COLUMNS} FROM {name} SEMI JOIN diff_candidates USING (entity_id)"
        )
    duck.execute(
        "CREATE OR REPLACE TEMP TABLE changed AS SELECT DISTINCT canonical_id FROM ("
        "(FROM former_candidates EXCEPT FROM latter_candidates) UNION ALL "
        "(FROM latter_candidates EXCEPT FROM former_candidates))"
    )
    # Read whole entities: whether one existed before may depend on statements in files that did not change.
    duck.execute(
        "CREATE OR REPLACE TEMP TABLE ops AS SELECT canonical_id, "
        "CASE WHEN NOT bool_or(is_former) THEN 'ADD' WHEN bool_and(is_former) THEN 'DEL' ELSE 'MOD' END AS op FROM ("
        "SELECT canonical_id, true AS is_former FROM former SEMI JOIN changed USING (canonical_id) "
        "UNION ALL SELECT canonical_id, false FROM latter SEMI JOIN changed USING (canonical_id)) GROUP BY canonical_id"
    )


def files_of_one(one: Table, other: Table, within: Range = EVERYTHING) -> list[File]:
    """Return the files that only one of the two tables has."""
    paths = {file.path for file in one.files} ^ {file.path for file in other.files}
    return prune((file for file in (*one.files, *other.files) if file.path in paths), keys=[within])
