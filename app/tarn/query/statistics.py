# ruff: noqa: S608 - SQL is built from constants; user input is bound
"""Statistics of a dataset: counts and bounds of the entities of a relation, as `entity_lines` would assemble them.

An `$invalid` entity counts only in the number of invalid entities and of statements.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import duckdb

from tarn.lake.live import invalid_sql
from tarn.model.ftm.query_fields import FieldName
from tarn.model.ftm.statistics import BOUNDS, Bound, Count, Statistics, groups_of
from tarn.query.filters import has_value
from tarn.query.output.column_text import moment
from tarn.query.output.ftm_model import resolved_schema

DATE = r"[0-9]{4}(-[0-9]{2}(-[0-9]{2}([T ].*)?)?)?"
"""What FtM accepts as a date, from a year to a second. Other values of date properties are ignored."""

NAMED = "unnest(?::VARCHAR[])"


def count_entities(duck: duckdb.DuckDBPyConnection, source: str = "live", parameters: Any = ()) -> Statistics:
    """Count the entities of a relation with the columns of `live`, all of one dataset. The relation is read once.

    `source` is trusted SQL, a name or a query in parentheses; `parameters` are bound in it.
    """
    _make_parts(duck, source, parameters)
    try:
        parts, entities, seen = _one(
            duck, "SELECT count(*), count(DISTINCT canonical_id), count(first_seen) FROM counted_parts"
        )
        # In most datasets every entity has one part. Then skip the DISTINCT, which is slower than counting.
        is_single_part = parts == entities
        if seen < parts:
            _take_bases(duck)
        _resolve_schemata(duck, is_single_part)
        return Statistics(_counts(duck, is_single_part), dict(_bounds(duck, is_single_part)))
    finally:
        duck.execute("DROP VIEW counted_valid")
        duck.execute("DROP TABLE counted_parts")


def _make_parts(duck: duckdb.DuckDBPyConnection, source: str, parameters: Any) -> None:
    """Create a table with one row for each entity, schema and origin (a part): mostly one row per entity."""
    dates, countries = has_value(FieldName("type:date")), has_value(FieldName("type:country"))
    duck.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE counted_parts AS
        SELECT canonical_id, schema, origin, count(*) AS statements, min(date) AS first_date, max(date) AS last_date,
               list(country) FILTER (country IS NOT NULL) AS countries,
               min(CASE WHEN prop <> 'id' THEN first_seen END) AS first_seen,
               max(CASE WHEN prop <> 'id' THEN last_seen END) AS last_seen,
               max(CASE WHEN prop = 'id' THEN first_seen END) AS last_change,
               min(first_seen) AS earliest, max(last_seen) AS latest
        FROM (
            SELECT *, CASE WHEN ({dates.sql}) AND regexp_full_match(value, '{DATE}') THEN value END AS date,
                   CASE WHEN {countries.sql} THEN value END AS country
            FROM {source}
        ) GROUP BY canonical_id, schema, origin""",
        [*dates.parameters, *countries.parameters, *parameters],
    )
    duck.execute("CREATE OR REPLACE TEMP VIEW counted_valid AS FROM counted_parts WHERE schema IS NOT NULL")


def _take_bases(duck: duckdb.DuckDBPyConnection) -> None:
    """Take the times seen from the BASE statement, for entities that have no other statement."""
    bare = "SELECT canonical_id FROM counted_parts GROUP BY canonical_id HAVING count(first_seen) = 0"
    duck.execute(f"UPDATE counted_parts SET first_seen = earliest, last_seen = latest WHERE canonical_id IN ({bare})")


def _resolve_schemata(duck: duckdb.DuckDBPyConnection, is_single_part: bool) -> None:
    """Set the schema of every part to that of its entity, null if invalid. Runs in DuckDB, for any number of parts."""
    if not is_single_part:
        several = "SELECT canonical_id FROM counted_parts GROUP BY canonical_id HAVING min(schema) <> max(schema)"
        masks = ", ".join(invalid_sql.columns())
        duck.execute(
            f"UPDATE counted_parts AS part SET schema = entity.schema FROM ("
            f"SELECT canonical_id, masks.schema FROM ("
            f"SELECT canonical_id, {invalid_sql.combined()} "
            f"FROM counted_parts SEMI JOIN ({several}) USING (canonical_id) "
            f"LEFT JOIN ({invalid_sql.masks()}) AS masks USING (schema) GROUP BY canonical_id"
            f") LEFT JOIN ({invalid_sql.masks()}) AS masks USING ({masks})) AS entity "
            "WHERE part.canonical_id = entity.canonical_id"
        )
    named = duck.execute("SELECT DISTINCT schema FROM counted_valid").fetchall()
    unknown = [name for (name,) in named if resolved_schema(frozenset([name])) is None]
    if unknown:
        duck.execute(f"UPDATE counted_parts SET schema = NULL WHERE schema IN (SELECT {NAMED})", [unknown])


def _counts(duck: duckdb.DuckDBPyConnection, is_single_part: bool) -> dict[Count, int]:
    entity = "" if is_single_part else "DISTINCT canonical_id, "
    counts = Counter({Count("statement"): _one(duck, "SELECT coalesce(sum(statements), 0) FROM counted_parts")[0]})
    for schema, entities in _grouped(duck, "schema", f"SELECT {entity}schema FROM counted_parts"):
        counts[Count("invalid") if schema is None else Count("schema", schema)] = entities
    for origin, entities in _grouped(duck, "origin", f"SELECT {entity}origin FROM counted_valid"):
        counts[Count("origin", origin)] = entities
    named = f"SELECT {entity}schema, unnest(list_distinct(countries)) AS country FROM counted_valid"
    for schema, country, entities in _grouped(duck, "schema, country", named):
        counts.update({Count(group, country): entities for group in groups_of(schema)})
    return dict(+counts)


def _bounds(duck: duckdb.DuckDBPyConnection, is_single_part: bool) -> Iterator[tuple[str, Bound]]:
    """Yield the bounds of valid entities."""
    extremes = ", ".join(f"{choose.__name__}({name}) AS {name}" for name, choose in BOUNDS.items())
    values = _one(duck, f"SELECT {extremes} FROM counted_valid")
    entity = "*" if is_single_part else "DISTINCT canonical_id"
    at = ", ".join(f"count({entity}) FILTER ({name} = ?)" for name in BOUNDS)
    entities = _one(duck, f"SELECT {at} FROM counted_valid", values)
    for name, value, count in zip(BOUNDS, values, entities, strict=True):
        if value is not None:
            yield name, Bound(value if isinstance(value, str) else moment(value), count)


def _grouped(duck: duckdb.DuckDBPyConnection, by: str, query: str) -> list[tuple[Any, ...]]:
    return duck.execute(f"SELECT {by}, count(*) FROM ({query}) GROUP BY {by}").fetchall()


def _one(duck: duckdb.DuckDBPyConnection, query: str, parameters: Any = ()) -> tuple[Any, ...]:
    return duck.execute(query, parameters).fetchall()[0]
