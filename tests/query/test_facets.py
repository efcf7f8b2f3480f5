"""Facets: counts of entities and measures of their values, including entities without a value."""

from itertools import product
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tarn.model.ftm.query import EntityAggregate, Facet
from tarn.query.facets import facets, to_facets

from tests.query.live_rows import Row, engine, fill, moment
from tests.query.test_filters import by_entity, matches, rows, values_of

FIELDS = [
    "id",
    "canonical_id",
    "schema",
    "schemata",
    "origin",
    "prop:name",
    "prop:country",
    "type:countries",
    "type:entities",
]


@pytest.fixture(scope="module")
def duck() -> duckdb.DuckDBPyConnection:
    return engine()


def answered(duck: duckdb.DuckDBPyConnection, **body: Any) -> list[Facet]:
    aggregate = EntityAggregate.model_validate(body)
    sql, parameters = facets(aggregate)
    return to_facets(aggregate, duck.execute(sql, parameters).fetchall())


def aggregate_rows(duck: duckdb.DuckDBPyConnection, **body: Any) -> list[tuple[Any, ...]]:
    return [(*facet.group.values(), *facet.metrics.values()) for facet in answered(duck, **body)]


PEOPLE = [
    Row("a", "Person", "id", "1"),
    Row("a", "Person", "country", "gb"),
    Row("a", "Person", "country", "us"),
    Row("a", "Person", "country", "us", origin="other"),
    Row("a", "Person", "name", "Ann"),
    Row("b", "Person", "country", "gb"),
    Row("b", "Person", "name", "Bob"),
    Row("b", "Person", "name", "Ann"),
    Row("c", "Person", "name", "Cyd"),
    Row("a", "Company", "country", "gb", dataset="e"),
]


def test_an_entity_counts_once_in_each_of_its_groups_and_without_a_value_in_the_null_group(
    duck: duckdb.DuckDBPyConnection,
) -> None:
    fill(duck, PEOPLE)
    assert answered(duck, group_by=["prop:country"], metrics=["count", {"count_distinct": "prop:name"}]) == [
        Facet(group={"prop:country": "gb"}, metrics={"count": 3, "count_distinct:prop:name": 2}),
        Facet(group={"prop:country": "us"}, metrics={"count": 1, "count_distinct:prop:name": 1}),
        Facet(group={"prop:country": None}, metrics={"count": 1, "count_distinct:prop:name": 1}),
    ]


def test_groups_of_two_fields_are_the_pairs_of_their_values(duck: duckdb.DuckDBPyConnection) -> None:
    fill(duck, PEOPLE)
    assert aggregate_rows(duck, group_by=["schema", "prop:country"], metrics=["count"]) == [
        ("Person", "gb", 2),
        ("Company", "gb", 1),
        ("Person", "us", 1),
        ("Person", None, 1),
    ]


def test_where_selects_entities_and_not_their_values(duck: duckdb.DuckDBPyConnection) -> None:
    fill(duck, PEOPLE)
    where = {"field": "prop:country", "op": "eq", "value": "us"}
    assert aggregate_rows(duck, where=where, group_by=["prop:country"], metrics=["count"]) == [("gb", 1), ("us", 1)]


def test_without_groups_there_is_one_row_even_if_nothing_matches(duck: duckdb.DuckDBPyConnection) -> None:
    fill(duck, PEOPLE)
    metrics = ["count", {"count_distinct": "prop:name"}, {"min": "prop:name"}, {"max": "last_seen"}]
    where = {"field": "id", "op": "eq", "value": "nobody'; DROP TABLE live; --"}
    assert aggregate_rows(duck, metrics=metrics) == [(4, 3, "Ann", "1970-01-01T00:00:00.000000Z")]
    assert aggregate_rows(duck, where=where, metrics=metrics) == [(0, 0, None, None)]
    assert answered(duck, where=where, group_by=["schema"], metrics=metrics) == []


def test_timestamps_are_iso_8601_of_fixed_width(duck: duckdb.DuckDBPyConnection) -> None:
    first, last = moment("0001-01-01"), moment("9999-12-31T23:59:59.999999Z")
    fill(duck, [Row("a", "Person", "name", "x", first_seen=first, last_seen=last), Row("a", "Person", "id", "x")])
    assert answered(duck, group_by=["first_seen"], metrics=[{"max": "last_seen"}]) == [
        Facet(
            group={"first_seen": "0001-01-01T00:00:00.000000Z"},
            metrics={"max:last_seen": "9999-12-31T23:59:59.999999Z"},
        )
    ]


def test_min_and_max_of_numbers_are_numbers(duck: duckdb.DuckDBPyConnection) -> None:
    fill(duck, [Row(text, "Payment", "amount", text) for text in ("9", "10", "1,000.5", "n/a")])
    metrics = [{"min": "prop:amount"}, {"max": "prop:amount"}, {"count_distinct": "prop:amount"}]
    assert aggregate_rows(duck, metrics=metrics) == [(9.0, 1000.5, 4)]


def test_the_largest_groups_come_first_and_the_limit_cuts_the_rest(duck: duckdb.DuckDBPyConnection) -> None:
    fill(duck, [Row(str(i), "Person", "country", f"c{i % 7}") for i in range(30)])
    groups = aggregate_rows(duck, group_by=["type:countries"], metrics=["count"], limit=3)
    assert groups == [("c0", 5), ("c1", 5), ("c2", 4)]


@given(
    table=rows,
    group_by=st.lists(st.sampled_from(FIELDS), max_size=3, unique=True),
    measured=st.sampled_from(FIELDS),
    where=st.none() | st.just({"field": "prop:country", "op": "null", "value": False}),
)
@settings(max_examples=100, deadline=None)
def test_facets_equal_counts_in_python_over_the_same_rows(
    duck: duckdb.DuckDBPyConnection, table: list[Row], group_by: list[str], measured: str, where: dict[str, Any] | None
) -> None:
    fill(duck, table)
    groups: dict[tuple[str | None, ...], list[set[str]]] = {} if group_by else {(): []}
    for entity in by_entity(table).values():
        if where is None or matches(where, entity):
            for group in product(*(values_of(field, entity) or {None} for field in group_by)):
                groups.setdefault(group, []).append(values_of(measured, entity))
    expected: list[tuple[Any, ...]] = []
    for group, name_sets in groups.items():
        every = set().union(*name_sets)
        expected.append((*group, len(name_sets), len(every), min(every, default=None), max(every, default=None)))
    width = len(group_by)
    expected.sort(key=lambda row: (-row[width], *((value is None, value or "") for value in row[:width])))
    metrics = ["count", {"count_distinct": measured}, {"min": measured}, {"max": measured}]
    assert aggregate_rows(duck, where=where, group_by=group_by, metrics=metrics, limit=1000) == expected
