"""Statements, read: a page in the order of the store, or all of them in one of four forms."""

# ruff: noqa: S608 - put together from constants of ours; what users send is bound

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import structlog

from tarn.datasets.registry import Dataset
from tarn.model.query_fields import kinds_of
from tarn.query.column_text import fetch_tables
from tarn.query.long_values import sort_spilled
from tarn.query.reader import Reading, RequestedState
from tarn.query.statement_formats import BATCH_ROWS, FORMATS, statement_rows

log = structlog.get_logger(__name__)

ORDER = "ORDER BY canonical_id, id, origin"


class StatementPosition(NamedTuple):
    """Where a statement stands in the order: no two have the same."""

    canonical_id: str
    id: bytes
    origin: str


@dataclass(frozen=True, slots=True)
class StatementFilter:
    """Which statements: every part that is given must hold, each for one value or more of those in it."""

    ids: Sequence[str] = ()
    """Of entities, by any id that names them."""
    canonical_ids: Sequence[str] = ()
    schemata: Sequence[str] = ()
    """Exactly these."""
    kinds: Sequence[str] = ()
    """These and all that are one of them."""
    origins: Sequence[str] = ()
    props: Sequence[str] = ()

    def condition(self) -> tuple[str, list[Any]]:
        """SQL, and what binds in it."""
        among = {
            "canonical_id": self.canonical_ids,
            "schema": self.schemata,
            "origin": self.origins,
            "prop": self.props,
        }
        parts = [
            (f"{column} IN (SELECT unnest(?::VARCHAR[]))", list(values)) for column, values in among.items() if values
        ]
        if self.kinds:
            kinds = sorted({kind for name in self.kinds for kind in kinds_of(name)})
            parts.append(("schema IN (SELECT unnest(?::VARCHAR[]))", kinds))
        return " AND ".join(sql for sql, _ in parts) or "true", [values for _, values in parts]


def page(
    reading: Reading,
    dataset: Dataset,
    state: RequestedState,
    wanted: StatementFilter,
    after: StatementPosition | None,
    limit: int,
) -> tuple[str | None, list[dict[str, Any]], StatementPosition | None]:
    """The snapshot, up to `limit` statements, and the place of the last of them if more follow."""
    snapshot = _create_live(reading, dataset, state, wanted)
    condition, parameters = wanted.condition()
    if after is not None:
        condition += " AND (canonical_id, id, origin) > (?, ?, ?)"
        parameters += after
    rows = statement_rows(
        reading.duck, f"SELECT * FROM live WHERE {condition} {ORDER} LIMIT ?", [*parameters, limit + 1]
    )
    if len(rows) <= limit:
        return snapshot, rows, None
    last = rows[limit - 1]
    return snapshot, rows[:limit], StatementPosition(last["canonical_id"], bytes.fromhex(last["id"]), last["origin"])


def stream(
    reading: Reading, dataset: Dataset, state: RequestedState, wanted: StatementFilter, form: str
) -> tuple[str | None, Iterator[bytes]]:
    """The snapshot, and every statement that matches, in one form."""
    snapshot = _create_live(reading, dataset, state, wanted)
    condition, parameters = wanted.condition()
    rows = sorted_rows(reading.duck, f"SELECT * FROM live WHERE {condition}", parameters)
    return snapshot, FORMATS[form](rows)


def sorted_rows(duck: duckdb.DuckDBPyConnection, query: str, parameters: list[Any]) -> Iterator[pa.Table]:
    """The rows of a query by their places. Values are set aside where DuckDB's sort has no room for them."""
    last: pa.Table | None = None
    try:
        for table in fetch_tables(duck, f"{query} {ORDER}", parameters, BATCH_ROWS):
            last = table.slice(table.num_rows - 1)
            yield table
        return
    except duckdb.OutOfMemoryException as error:
        log.info("values are set aside to sort their rows", cause=str(error).partition("\n")[0])
    # Whatever was sent stays sent, and the second attempt begins after it.
    left = (_after(last, table) for table in fetch_tables(duck, query, parameters, BATCH_ROWS))
    yield from sort_spilled(duck, left, ", ".join(StatementPosition._fields), BATCH_ROWS)


def _after(last: pa.Table | None, rows: pa.Table) -> pa.Table:
    """The rows whose places come after that of one row."""
    if last is None:
        return rows
    follows: Any = pa.scalar(False)
    for name in reversed(StatementPosition._fields):
        own, one = rows.column(name), last.column(name)[0]
        follows = pc.or_(pc.greater(own, one), pc.and_(pc.equal(own, one), follows))
    return rows.filter(follows)


def _create_live(reading: Reading, dataset: Dataset, state: RequestedState, wanted: StatementFilter) -> str | None:
    if ids := wanted.ids or wanted.canonical_ids:
        return reading.entities(dataset, state, ids).snapshot_id
    origin = wanted.origins[0] if len(wanted.origins) == 1 else None
    return reading.everything(dataset, state, origin).snapshot_id
