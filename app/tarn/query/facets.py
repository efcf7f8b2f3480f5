# ruff: noqa: S608 - SQL is built from constants; user input is bound
"""FacetQuery: SQL that groups matching entities by field values, and counts and measures each group.

An entity with two values of a field is in both groups; entities without a value form the null group. A metric of a
field covers all values that the group's entities have, whatever they are grouped by.

Each field is a relation (dataset, canonical_id, value) of its own, and the groups join them. Minimum and maximum are
computed per entity first, so that only distinct values are ever multiplied with the groups.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tarn.model.ftm.query import CountDistinct, EntityAggregate, Facet, Max, Metric, Min, metric_name
from tarn.model.ftm.query_fields import FieldName, schema_ancestors
from tarn.query.filters import FIRST_SEEN, LAST_SEEN, NUMBER, compile, has_value

ENTITY = "dataset, canonical_id"
MOMENT = "strftime(make_timestamp({}), '%Y-%m-%dT%H:%M:%S.%fZ')"


class FacetQuery(NamedTuple):
    """A query for the groups of an aggregate, largest first, and its parameters in order."""

    sql: str
    parameters: tuple[Any, ...]


def facets(aggregate: EntityAggregate) -> FacetQuery:
    """Return the query. A row has the value of each `group_by` field, then each metric, in the requested order."""
    condition = compile(aggregate.where)
    groups = [f"group_{i}" for i in range(len(aggregate.group_by))]
    steps = [f"matched AS (SELECT {ENTITY} FROM live GROUP BY {ENTITY} HAVING {condition.sql})"]
    parameters = [*condition.parameters]

    for group, field in zip(groups, aggregate.group_by, strict=True):
        values = _values(field)
        steps.append(f"by_{group} AS ({values.sql})")
        parameters += values.parameters
    joins = "".join(f" LEFT JOIN by_{group} USING ({ENTITY})" for group in groups)
    listed = "".join(f", by_{group}.value AS {group}" for group in groups)
    steps.append(f"grouped AS (SELECT {ENTITY}{listed} FROM matched{joins})")

    columns, joins = list(groups), ""
    for i, metric in enumerate(aggregate.metrics):
        measured = _measured(metric, f"metric_{i}", groups)
        steps += measured.steps
        parameters += measured.parameters
        columns.append(measured.column)
        joins += measured.join
    # Without `group_by` there is exactly one group, even if nothing matches.
    grouping = f" GROUP BY {', '.join(f'grouped.{group}' for group in groups)}" if groups else ""
    order = ", ".join(["count(*) DESC", *(f"grouped.{group} NULLS LAST" for group in groups)])
    listed = ", ".join(f"grouped.{column}" if column in groups else column for column in columns)
    sql = f"WITH {', '.join(steps)} SELECT {listed} FROM grouped{joins}{grouping} ORDER BY {order} LIMIT ?"
    return FacetQuery(sql, (*parameters, aggregate.limit))


def to_facets(aggregate: EntityAggregate, rows: Iterable[Sequence[Any]]) -> list[Facet]:
    """Convert rows of the query to the facets of the response."""
    names = [metric_name(metric) for metric in aggregate.metrics]
    width = len(aggregate.group_by)
    return [
        Facet(
            group=dict(zip(map(str, aggregate.group_by), row[:width], strict=True)),
            metrics=dict(zip(names, row[width:], strict=True)),
        )
        for row in rows
    ]


class _Measured(NamedTuple):
    """The SQL of a metric: common table expressions, a join to the groups, and its column."""

    steps: list[str]
    parameters: tuple[Any, ...]
    join: str
    column: str


def _measured(metric: Metric, name: str, groups: list[str]) -> _Measured:
    match metric:
        case CountDistinct(count_distinct=field):
            return _distinct(field, name, groups)
        case Min(min=field):
            return _extreme(field, "min", name)
        case Max(max=field):
            return _extreme(field, "max", name)
        case _:
            return _Measured([], (), "", "count(*)")


def _distinct(field: FieldName, name: str, groups: list[str]) -> _Measured:
    values = _values(field)
    listed = "".join(f"{group}, " for group in groups)
    grouping = f" GROUP BY {', '.join(groups)}" if groups else ""
    steps = [
        f"of_{name} AS ({values.sql})",
        f"{name} AS (SELECT {listed}count(DISTINCT value) AS measured"
        f" FROM grouped LEFT JOIN of_{name} USING ({ENTITY}){grouping})",
    ]
    same = " AND ".join(f"grouped.{group} IS NOT DISTINCT FROM {name}.{group}" for group in groups) or "true"
    return _Measured(
        steps, values.parameters, f" LEFT JOIN {name} ON {same}", f"coalesce(any_value({name}.measured), 0)"
    )


def _extreme(field: FieldName, chosen: str, name: str) -> _Measured:
    values = _values(field)
    value = NUMBER if field.is_number else "value"
    step = f"{name} AS (SELECT {ENTITY}, {chosen}({value}) AS measured FROM ({values.sql}) GROUP BY {ENTITY})"
    join = f" LEFT JOIN {name} ON grouped.dataset = {name}.dataset AND grouped.canonical_id = {name}.canonical_id"
    return _Measured([step], values.parameters, join, f"{chosen}({name}.measured)")


class _Values(NamedTuple):
    """SQL for the relation (dataset, canonical_id, value) of a field: each distinct value of each matching entity."""

    sql: str
    parameters: tuple[Any, ...]


def _values(field: FieldName) -> _Values:
    live = f"live SEMI JOIN matched USING ({ENTITY})"
    match field.kind:
        case "first_seen":
            return _Values(f"SELECT {ENTITY}, {MOMENT.format(FIRST_SEEN)} AS value FROM {live} GROUP BY {ENTITY}", ())
        case "last_seen":
            return _Values(f"SELECT {ENTITY}, {MOMENT.format(LAST_SEEN)} AS value FROM {live} GROUP BY {ENTITY}", ())
        case "id":
            ids = "unnest([entity_id, canonical_id])"
            return _Values(f"SELECT DISTINCT {ENTITY}, {ids} AS value FROM {live}", ())
        case "canonical_id" | "schema" | "origin":
            return _Values(f"SELECT DISTINCT {ENTITY}, {field} AS value FROM {live}", ())
        case "schemata":
            kinds = "(SELECT unnest(?::VARCHAR[]) AS schema, unnest(?::VARCHAR[]) AS value) AS kinds USING (schema)"
            return _Values(f"SELECT DISTINCT {ENTITY}, kinds.value FROM {live} JOIN {kinds}", schema_ancestors())
    condition = has_value(field)
    return _Values(f"SELECT DISTINCT {ENTITY}, value FROM {live} WHERE {condition.sql}", condition.parameters)
