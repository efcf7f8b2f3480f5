"""What changed between two snapshots: entities that were added, modified or deleted."""

# ruff: noqa: S608 - put together from constants of ours; what users send is bound

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import duckdb

from tarn.datasets.registry import Dataset
from tarn.model.ranges import EVERYTHING, Range, span
from tarn.model.snapshot import File, Table
from tarn.query import live
from tarn.query.assembly import entity_lines
from tarn.query.live import COLUMNS
from tarn.query.planner import ScanPlan
from tarn.query.reader import Reading, RequestedState
from tarn.query.views import View
from tarn.storage.store import Store

Op = Literal["ADD", "DEL", "MOD"]
OPS: tuple[Op, ...] = get_args(Op)


class Difference(NamedTuple):
    """An entity that is not the same in both: as it is in the latter, or as it was in the former if it was deleted."""

    op: Op
    id: str
    line: bytes


class DiffPosition(NamedTuple):
    """Where a difference stands: by kind, then by canonical id."""

    op: Op
    id: str


class Between(NamedTuple):
    """Two states of one dataset."""

    former: View
    latter: View


def between(reading: Reading, dataset: Dataset, former: str, latter: str) -> Between:
    """Resolve two snapshots, by id, number, moment or ref. Raises as `Views.at` does."""
    return Between(reading.view(dataset, RequestedState(at=former)), reading.view(dataset, RequestedState(at=latter)))


def differences(
    duck: duckdb.DuckDBPyConnection,
    store: Store,
    states: Between,
    after: DiffPosition | None = None,
    limit: int | None = None,
    within: Range = EVERYTHING,
) -> Iterator[list[Difference]]:
    """The entities that differ in anything that is shown of them, some at a time: after a place, up to a number.

    Of a range of canonical ids alone, if one is given.
    """
    one, other = states.former.snapshot, states.latter.snapshot
    assert one is not None
    assert other is not None
    if one.content == other.content:
        return
    live.make_within(duck, store, states.former, "former", within)
    live.make_within(duck, store, states.latter, "latter", within)
    # Whatever differs, a file that only one of the two has says so, under the same key.
    _create_ops(duck, select_candidates(store, states, within))
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


def select_candidates(store: Store, states: Between, within: Range = EVERYTHING) -> str:
    """SQL for the ids of the entities that may differ."""
    one, other = states.former.snapshot, states.latter.snapshot
    assert one is not None
    assert other is not None
    plan = ScanPlan(store, states.former.dataset, one, within=within)
    marks = [file for file in files_of_one(one.translog, other.translog, within) if file.partition["kind"] != "insert"]
    return plan.entities_of(files_of_one(one.statements, other.statements, within), marks)


def _create_ops(duck: duckdb.DuckDBPyConnection, among: str) -> None:
    """Make the table `ops` of the entities that differ, among those that some files speak of."""
    duck.execute(f"CREATE OR REPLACE TEMP TABLE touched AS {among}")
    for name in ("former", "latter"):
        duck.execute(
            f"CREATE OR REPLACE TEMP TABLE {name}_touched AS "
            f"SELECT {COLUMNS} FROM {name} SEMI JOIN touched USING (entity_id)"
        )
    duck.execute(
        "CREATE OR REPLACE TEMP TABLE changed AS SELECT DISTINCT canonical_id FROM ("
        "(FROM former_touched EXCEPT FROM latter_touched) UNION ALL (FROM latter_touched EXCEPT FROM former_touched))"
    )
    # What an entity was may stand in statements that nothing touched.
    duck.execute(
        "CREATE OR REPLACE TEMP TABLE ops AS SELECT canonical_id, "
        "CASE WHEN NOT bool_or(there) THEN 'ADD' WHEN bool_and(there) THEN 'DEL' ELSE 'MOD' END AS op FROM ("
        "SELECT canonical_id, true AS there FROM former SEMI JOIN changed USING (canonical_id) "
        "UNION ALL SELECT canonical_id, false FROM latter SEMI JOIN changed USING (canonical_id)) GROUP BY canonical_id"
    )


def files_of_one(one: Table, other: Table, within: Range = EVERYTHING) -> list[File]:
    """The files that only one of the two has."""
    paths = {file.path for file in one.files} ^ {file.path for file in other.files}
    return [file for file in (*one.files, *other.files) if file.path in paths and span(file).meets(within)]
