"""Assembly of live statements into FtM entity JSON, equal to followthemoney's `StatementEntity`.

An entity is all rows of one (dataset, canonical id). Its JSON is a function of its rows alone: properties and their
values are sorted, and where FtM depends on the order of statements, the order is fixed here. Two functions produce the
same bytes: `entity_lines` for any number of entities, and `entity_line` for one whose rows are in memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import duckdb
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import structlog
from followthemoney.statement.util import BASE_ID

from tarn.query.output.captions import CaptionCandidate, choose_caption, invalid_line
from tarn.query.output.column_text import changes, column, fetch_tables, moment, text_bytes
from tarn.query.output.entity_lines import assemble_lines
from tarn.query.output.ftm_model import (
    NO_CAPTION,
    caption_properties,
    caption_rank,
    holds_names,
    resolved_schema,
    schema_label,
)
from tarn.query.output.long_values import sort_spilled

log = structlog.get_logger(__name__)

BATCH_ROWS = 65_536

ENTITY = "canonical_id, dataset"
SORTED = ("canonical_id", "dataset", "prop", "value")


class Row(NamedTuple):
    """A live statement, its columns as in `live`."""

    dataset: str
    canonical_id: str
    entity_id: str
    id: bytes
    schema: str
    prop: str
    value: str
    lang: str | None
    original_value: str | None
    external: bool
    origin: str
    first_seen: int
    last_seen: int


def entity_line(rows: Iterable[Row]) -> tuple[bytes, bool]:
    """Return one entity's JSON line, made from all its rows in any order, and whether it is `$invalid`."""
    statements = list(rows)
    schemata = frozenset(row.schema for row in statements)
    canonical_id = statements[0].canonical_id
    schema = resolved_schema(schemata)
    if schema is None:
        return invalid_line(canonical_id, schemata), True
    facts = [row for row in statements if row.prop != BASE_ID]
    properties: dict[str, set[str]] = {}
    for row in facts:
        properties.setdefault(row.prop, set()).add(row.value)
    seen = facts or statements
    changed = max((row.first_seen for row in statements if row.prop == BASE_ID), default=None)
    entity = {
        "id": canonical_id,
        "caption": _caption(schema, facts),
        "schema": schema,
        "properties": {prop: sorted(values) for prop, values in sorted(properties.items())},
        "datasets": [statements[0].dataset],
        "referents": sorted({row.entity_id for row in statements} - {canonical_id}),
        "origin": sorted({row.origin for row in statements}),
        "first_seen": moment(min(row.first_seen for row in seen)),
        "last_seen": moment(max(row.last_seen for row in seen)),
        "last_change": None if changed is None else moment(changed),
    }
    return orjson.dumps(entity, option=orjson.OPT_APPEND_NEWLINE), False


def entity_lines(
    duck: duckdb.DuckDBPyConnection, source: str = "live", parameters: Any = (), batch_rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Yield every entity of a relation with the columns of `live`, as batches of LINES by canonical id and dataset.

    `source` is trusted SQL, a name or a query in parentheses; `parameters` are bound in it. Memory is bounded: DuckDB
    sorts the rows, which spills to disk (list aggregates would fail instead), and this process holds the rows of one
    batch or of one entity, whichever is more. If the sort exceeds DuckDB's memory limit, the relation is read a second
    time, and must not have changed.
    """
    rows = _rows(source)
    last: tuple[str, str] | None = None
    try:
        query = f"{rows} ORDER BY {ENTITY}, prop, value"
        for entities in _split_at_entities(fetch_tables(duck, query, parameters, batch_rows)):
            lines = assemble_lines(entities)
            last = (lines["canonical_id"][-1].as_py(), lines["dataset"][-1].as_py())
            yield lines
        return
    except duckdb.OutOfMemoryException as error:
        log.info("sort exceeds the memory limit; spilling long values to disk", reason=str(error).partition("\n")[0])
    # Entities that were already sent are not sent again: they come in order, and the second attempt starts after them.
    remaining = (_after(last, table) for table in fetch_tables(duck, rows, parameters, batch_rows))
    for entities in _split_at_entities(sort_spilled(duck, remaining, ENTITY, batch_rows)):
        yield assemble_lines(entities.sort_by([(name, "ascending") for name in SORTED]))


def ndjson(batch: pa.RecordBatch) -> pa.Buffer:
    """Return the lines of a batch as NDJSON, without a copy."""
    return text_bytes(batch.column("line"))


def invalid_count(batch: pa.RecordBatch) -> int:
    """Return how many lines of a batch are `$invalid`."""
    return int(pc.sum(batch.column("invalid"), min_count=0).as_py())


def _rows(source: str) -> str:
    """Return SQL for the rows that lines are made of, with only the columns needed: every byte slows the sort."""
    captions = ", ".join(f"'{prop}'" for prop in caption_properties())
    return f"""
        SELECT canonical_id, dataset, prop, value, nullif(entity_id, canonical_id) AS referent, schema, origin,
               first_seen, last_seen, CASE WHEN prop IN ({captions}) THEN id END AS id, lang
        FROM {source}"""  # noqa: S608 (a relation and FtM's property names, no user input)


def _split_at_entities(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Regroup rows sorted by entity into tables that end at the end of an entity."""
    pending: list[pa.Table] = []
    for table in tables:
        if pending and not _continues(pending[-1], table):
            yield pa.concat_tables(pending)
            pending = []
        # Rows before the last change of entity are complete; the last entity may continue in the next table.
        if start := _last_start(table):
            yield pa.concat_tables([*pending, table.slice(0, start)])
            pending = []
        pending.append(table.slice(start))
    if pending:
        yield pa.concat_tables(pending)


def _after(last: tuple[str, str] | None, rows: pa.Table) -> pa.Table:
    """Return the rows of the entities that sort after the entity `last`."""
    if last is None:
        return rows
    canonical, dataset = column(rows, "canonical_id"), column(rows, "dataset")
    same = pc.and_(pc.equal(canonical, last[0]), pc.greater(dataset, last[1]))
    return rows.filter(pc.or_(pc.greater(canonical, last[0]), same))


def _last_start(table: pa.Table) -> int:
    """Return the index of the first row of a table's last entity."""
    first = changes(column(table, "canonical_id")) | changes(column(table, "dataset"))
    return int(np.flatnonzero(first)[-1])


def _continues(table: pa.Table, following: pa.Table) -> bool:
    """Return whether the last row of one table and the first of the next belong to the same entity."""
    return all(table[name][-1] == following[name][0] for name in ("canonical_id", "dataset"))


def _caption(schema: str, facts: Sequence[Row]) -> str:
    prop = min((row.prop for row in facts), key=lambda name: caption_rank(schema, name), default=BASE_ID)
    if caption_rank(schema, prop) == NO_CAPTION:
        return schema_label(schema)
    candidates = [CaptionCandidate(row.id, row.value, row.lang) for row in facts if row.prop == prop]
    return choose_caption(candidates, holds_names(schema, prop))
