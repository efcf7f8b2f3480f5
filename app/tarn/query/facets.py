# ruff: noqa: S608 - SQL is put together from this module's own words; whatever a caller sent binds
"""Facets: the entities that match, counted and measured in groups by their values.

An entity with two values of a field is in both groups; entities without one form the group of null. A metric of a
field is over all values that the group's entities have, whatever they are grouped by.

Each field is a relation (dataset, canonical_id, value) of its own. The groups join them; what is least and greatest is
found for each entity first, so that only distinct values are ever multiplied with the groups.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tarn.model.query import CountDistinct, EntityAggregate, Facet, Max, Metric, Min, metric_name
from tarn.model.query_fields import FieldName, lineage
from tarn.query.filters import FIRST_SEEN, LAST_SEEN, NUMBER, compile, has_value

ENTITY = "dataset, canonical_id"
MOMENT = "strftime(make_timestamp({}), '%Y-%m-%dT%H:%M:%S.%fZ')"


class FacetQuery(NamedTuple):
    """A query for the groups of an aggregate, largest first, and what binds to its question marks, in their order."""

    sql: str
    parameters: tuple[Any, ...]


def facets(aggregate: EntityAggregate) -> FacetQuery:
    """The query: a row has the value of each field it groups by, then each metric, in the order they were asked for."""
    condition = compile(aggregate.where)
    groups = [f"group_{i}" for i in range(len(aggregate.group_by))]
    steps = [f"matched AS (SELECT {ENTITY} FROM live GROUP BY {ENTITY} HAVING {condition.sql})"]
    parameters = [*condition.parameters]

    for group, field in zip(groups, aggregate.group_by, strict=True):
        values = _values(field)
        steps.append(f"by_{group} AS ({values.sql})")
        parameters += values.parameters
    joins = "".join(f" LEFT JOIN by_{group} USING ({ENTITY})" for group in groups)
    shown = "".join(f", by_{group}.value AS {group}" for group in groups)
    steps.append(f"grouped AS (SELECT {ENTITY}{shown} FROM matched{joins})")

    columns, joins = list(groups), ""
    for i, metric in enumerate(aggregate.metrics):
        found = _measured(metric, f"metric_{i}", groups)
        steps += found.steps
        parameters += found.parameters
        columns.append(found.column)
        joins += found.join
    # Zero groups are one group, even if nothing matches.
    grouping = f" GROUP BY {', '.join(f'grouped.{group}' for group in groups)}" if groups else ""
    order = ", ".join(["count(*) DESC", *(f"grouped.{group} NULLS LAST" for group in groups)])
    listed = ", ".join(f"grouped.{column}" if column in groups else column for column in columns)
    sql = f"WITH {', '.join(steps)} SELECT {listed} FROM grouped{joins}{grouping} ORDER BY {order} LIMIT ?"
    return FacetQuery(sql, (*parameters, aggregate.limit))


def shown(aggregate: EntityAggregate, rows: Iterable[Sequence[Any]]) -> list[Facet]:
    """Rows of the query as they are answered."""
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
    """How a metric is found: steps before the groups are made, a join to them, and its column."""

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
        f"{name} AS (SELECT {listed}count(DISTINCT value) AS found"
        f" FROM grouped LEFT JOIN of_{name} USING ({ENTITY}){grouping})",
    ]
    same = " AND ".join(f"grouped.{group} IS NOT DISTINCT FROM {name}.{group}" for group in groups) or "true"
    return _Measured(steps, values.parameters, f" LEFT JOIN {name} ON {same}", f"coalesce(any_value({name}.found), 0)")


def _extreme(field: FieldName, chosen: str, name: str) -> _Measured:
    values = _values(field)
    value = NUMBER if field.is_number else "value"
    step = f"{name} AS (SELECT {ENTITY}, {chosen}({value}) AS found FROM ({values.sql}) GROUP BY {ENTITY})"
    join = f" LEFT JOIN {name} ON grouped.dataset = {name}.dataset AND grouped.canonical_id = {name}.canonical_id"
    return _Measured([step], values.parameters, join, f"{chosen}({name}.found)")


class _Values(NamedTuple):
    """The relation (dataset, canonical_id, value) of a field: each value of each entity that matches once."""

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
            return _Values(f"SELECT DISTINCT {ENTITY}, kinds.value FROM {live} JOIN {kinds}", lineage())
    held = has_value(field)
    return _Values(f"SELECT DISTINCT {ENTITY}, value FROM {live} WHERE {held.sql}", held.parameters)
