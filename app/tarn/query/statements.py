"""Statement reads: list a page in storage order, or stream all in one of four formats."""

# ruff: noqa: S608 - SQL is built from constants; user input is bound

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import structlog

from tarn.datasets.registry import Dataset
from tarn.model.ftm.query_fields import schema_descendants
from tarn.query.output.column_text import fetch_tables
from tarn.query.output.long_values import sort_spilled
from tarn.query.output.statement_formats import BATCH_ROWS, FORMATS, statement_rows
from tarn.query.reader import Reading, RequestedState

log = structlog.get_logger(__name__)

ORDER = "ORDER BY canonical_id, id, origin"


class StatementPosition(NamedTuple):
    """The sort key of a statement, unique in a dataset."""

    canonical_id: str
    id: bytes
    origin: str


@dataclass(frozen=True, slots=True)
class StatementFilter:
    """A filter of statements: all non-empty fields must match, each with one of its values."""

    ids: Sequence[str] = ()
    """Ids of entities: canonical ids, entity ids or referents."""
    canonical_ids: Sequence[str] = ()
    schemata: Sequence[str] = ()
    """Exactly these schemata."""
    kinds: Sequence[str] = ()
    """These schemata and their descendants."""
    origins: Sequence[str] = ()
    props: Sequence[str] = ()

    def condition(self) -> tuple[str, list[Any]]:
        """Return the SQL condition and its parameters."""
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
            kinds = sorted({kind for name in self.kinds for kind in schema_descendants(name)})
            parts.append(("schema IN (SELECT unnest(?::VARCHAR[]))", kinds))
        return " AND ".join(sql for sql, _ in parts) or "true", [values for _, values in parts]


def page(
    reading: Reading,
    dataset: Dataset,
    state: RequestedState,
    statement_filter: StatementFilter,
    after: StatementPosition | None,
    limit: int,
) -> tuple[str | None, list[dict[str, Any]], StatementPosition | None]:
    """Return the snapshot id, up to `limit` statements, and the position of the last of them if more follow."""
    snapshot = _create_live(reading, dataset, state, statement_filter)
    condition, parameters = statement_filter.condition()
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
    reading: Reading, dataset: Dataset, state: RequestedState, statement_filter: StatementFilter, media_type: str
) -> tuple[str | None, Iterator[bytes]]:
    """Return the snapshot id, and chunks of every statement that matches, in the format of a media type."""
    snapshot = _create_live(reading, dataset, state, statement_filter)
    condition, parameters = statement_filter.condition()
    rows = sorted_rows(reading.duck, f"SELECT * FROM live WHERE {condition}", parameters)
    return snapshot, FORMATS[media_type](rows)


def sorted_rows(duck: duckdb.DuckDBPyConnection, query: str, parameters: list[Any]) -> Iterator[pa.Table]:
    """Yield the rows of a query in storage order. If DuckDB's sort runs out of memory, spill long values to disk."""
    last: pa.Table | None = None
    try:
        for table in fetch_tables(duck, f"{query} {ORDER}", parameters, BATCH_ROWS):
            last = table.slice(table.num_rows - 1)
            yield table
        return
    except duckdb.OutOfMemoryException as error:
        log.info("sort exceeds the memory limit; spilling long values to disk", reason=str(error).partition("\n")[0])
    # Rows that were already sent are not sent again: the second attempt starts after them.
    remaining = (_after(last, table) for table in fetch_tables(duck, query, parameters, BATCH_ROWS))
    yield from sort_spilled(duck, remaining, ", ".join(StatementPosition._fields), BATCH_ROWS)


def _after(last: pa.Table | None, rows: pa.Table) -> pa.Table:
    """Return the rows that sort after the only row of `last`."""
    if last is None:
        return rows
    follows: Any = pa.scalar(False)
    for name in reversed(StatementPosition._fields):
        values, bound = rows.column(name), last.column(name)[0]
        follows = pc.or_(pc.greater(values, bound), pc.and_(pc.equal(values, bound), follows))
    return rows.filter(follows)


def _create_live(
    reading: Reading, dataset: Dataset, state: RequestedState, statement_filter: StatementFilter
) -> str | None:
    if ids := statement_filter.ids or statement_filter.canonical_ids:
        return reading.entities(dataset, state, ids).snapshot_id
    origin = statement_filter.origins[0] if len(statement_filter.origins) == 1 else None
    return reading.everything(dataset, state, origin).snapshot_id
