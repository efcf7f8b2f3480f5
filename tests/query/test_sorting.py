"""Sort order: total, nulls last, and pages that add up to the list."""

from typing import Any

import duckdb
import orjson
import pytest
from followthemoney.types import registry
from hypothesis import given, settings
from hypothesis import strategies as st
from tarn.model.ftm.query_fields import SortKey
from tarn.query.sorting import InvalidPosition, Sorting

from tests.query.live_rows import Row, engine, fill, moment

KEYS = ["id", "canonical_id", "schema", "first_seen", "last_seen", "prop:name", "prop:amount"]

rows = st.lists(
    st.builds(
        Row,
        canonical_id=st.sampled_from(["a", "b", "c", "d", "é'"]),
        schema=st.sampled_from(["Person", "Company"]),
        prop=st.sampled_from(["id", "name", "amount", "country"]),
        value=st.sampled_from(["", "1", "9", "10", "1,000", "-3 EUR", "none", "'; --", "é", "😀"])
        | st.text(max_size=3),
        first_seen=st.integers(-2, 2),
        last_seen=st.integers(-2, 2),
        dataset=st.sampled_from(["d", "e"]),
    ),
    max_size=15,
)
keys = st.lists(
    st.builds(lambda minus, key: minus + key, st.sampled_from(["", "-"]), st.sampled_from(KEYS)), max_size=3
)


@pytest.fixture(scope="module")
def duck() -> duckdb.DuckDBPyConnection:
    return engine()


def order(*sort_keys: str) -> Sorting:
    return Sorting(tuple(SortKey(key) for key in sort_keys))


def page(duck: duckdb.DuckDBPyConnection, sorting: Sorting, after: str | None, limit: int) -> list[tuple[Any, ...]]:
    columns, parameters = sorting.select
    condition, more = ("true", ()) if after is None else sorting.after(sorting.decode(after))
    query = (
        f"SELECT * FROM (SELECT {columns} FROM live GROUP BY dataset, canonical_id) "
        f"WHERE {condition} ORDER BY {sorting.order_by} LIMIT {limit}"
    )
    return duck.execute(query, [*parameters, *more]).fetchall()


def listed(duck: duckdb.DuckDBPyConnection, *sort_keys: str) -> list[str]:
    return [row[1] for row in page(duck, order(*sort_keys), None, 1000)]


def pages(duck: duckdb.DuckDBPyConnection, sorting: Sorting, limit: int) -> list[tuple[Any, ...]]:
    items: list[tuple[Any, ...]] = []
    after = None
    while got := page(duck, sorting, after, limit):
        items += got
        after = sorting.encode(got[-1])
    return items


def expected(table: list[Row], sort_keys: list[str]) -> list[tuple[str, str]]:
    """Return the same order by Python's stable sort, least significant key first."""
    entities: dict[tuple[str, str], list[Row]] = {}
    for row in table:
        entities.setdefault((row.dataset, row.canonical_id), []).append(row)
    ordered = sorted(entities, key=lambda key: (key[1], key[0]))
    for key in reversed(sort_keys):
        values = {one: value_of(key, one[1], entity) for one, entity in entities.items()}
        without = [one for one in ordered if values[one] is None]
        ordered = [one for one in ordered if values[one] is not None]
        ordered.sort(key=values.__getitem__, reverse=key.startswith("-"))
        ordered += without
    return ordered


def value_of(key: str, canonical_id: str, entity: list[Row]) -> Any:
    best = max if key.startswith("-") else min
    properties = [row for row in entity if row.prop != "id"] or entity
    match key.removeprefix("-"):
        case "id" | "canonical_id":
            return canonical_id
        case "schema":
            return best(row.schema for row in entity)
        case "first_seen":
            return min(row.first_seen for row in properties)
        case "last_seen":
            return max(row.last_seen for row in properties)
        case "prop:name":
            return best((row.value for row in entity if row.prop == "name"), default=None)
    numbers = (registry.number.to_number(row.value) for row in entity if row.prop == "amount")
    return best((number for number in numbers if number is not None), default=None)


@given(table=rows, sort_keys=keys, limit=st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_pages_of_any_size_add_up_to_the_sorted_list(
    duck: duckdb.DuckDBPyConnection, table: list[Row], sort_keys: list[str], limit: int
) -> None:
    table = [row._replace(value=row.value.replace("\x00", "")) for row in table]
    fill(duck, table)
    assert [row[:2] for row in pages(duck, order(*sort_keys), limit)] == expected(table, sort_keys)


def test_entities_without_a_value_come_last_in_both_directions(duck: duckdb.DuckDBPyConnection) -> None:
    fill(
        duck,
        [
            Row("a", "Person", "id", "x"),
            Row("b", "Person", "birthDate", "1970"),
            Row("c", "Person", "birthDate", "1980"),
        ],
    )
    assert listed(duck, "prop:birthDate") == ["b", "c", "a"]
    assert listed(duck, "-prop:birthDate") == ["c", "b", "a"]


def test_many_values_sort_by_the_least_and_descending_by_the_greatest(duck: duckdb.DuckDBPyConnection) -> None:
    fill(
        duck,
        [Row("wide", "Person", "name", "a"), Row("wide", "Person", "name", "z"), Row("mid", "Person", "name", "m")],
    )
    assert listed(duck, "prop:name") == ["wide", "mid"]
    assert listed(duck, "-prop:name") == ["wide", "mid"]


def test_numbers_sort_as_numbers_and_other_text_counts_as_null(duck: duckdb.DuckDBPyConnection) -> None:
    fill(duck, [Row(text, "Payment", "amount", text) for text in ("9", "10", "1,000", "n/a", "9" * 400)])
    assert listed(duck, "prop:amount") == ["9", "10", "1,000", "9" * 400, "n/a"]
    assert listed(duck, "-prop:amount") == ["1,000", "10", "9", "9" * 400, "n/a"]


def test_very_long_values_make_short_positions_that_still_page(duck: duckdb.DuckDBPyConnection) -> None:
    fill(duck, [Row(name, "Page", "bodyText", "\x01😀" * 100_000 + name) for name in "abcd"])
    sorting = order("-prop:bodyText", "prop:title", "id")
    assert [row[1] for row in pages(duck, sorting, 1)] == ["a", "b", "c", "d"]
    assert len(sorting.encode(page(duck, sorting, None, 1)[0])) < 2000


def test_every_position_survives_a_round_trip(duck: duckdb.DuckDBPyConnection) -> None:
    sorting = order("prop:amount", "-first_seen", "prop:name")
    seen = moment("9999-12-31T23:59:59.999999Z")
    position = sorting.decode(sorting.encode(("d", "é😀'", 0.1, seen, None)))
    assert position == ((0.1, seen, None), "é😀'", "d")


ORDER = ("prop:amount", "first_seen", "prop:name")
GOOD = [0.5, 0, "x", "id", "d"]
BAD_VALUES: dict[int, list[Any]] = {
    0: [1, "1", True, [], {}],
    1: [None, 1.0, True, "0", 1 << 62, -(1 << 62)],
    2: [1, 1.0, False, [], "x" * 257, "\x00"],
    3: [None, 1, "x" * 257, "\x00"],
    4: [None, 1, []],
}


@pytest.mark.parametrize(
    ("place", "value"),
    [(place, bad) for place, every in BAD_VALUES.items() for bad in every],
)
def test_a_position_with_a_value_of_another_kind_is_refused(place: int, value: Any) -> None:
    sorting = order(*ORDER)
    assert sorting.decode(orjson.dumps(GOOD).decode()).canonical_id == "id"
    with pytest.raises(InvalidPosition):
        sorting.decode(orjson.dumps([*GOOD[:place], value, *GOOD[place + 1 :]]).decode())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "null",
        "{}",
        "[]",
        "[1,2]",
        '[0.5,0,"x","id"]',
        "[" * 2000,
        '"' + "x" * 9000,
        '[NaN,0,"x","i","d"]',
        "\ud800",
    ],
)
def test_text_that_is_not_a_position_is_refused(text: str) -> None:
    with pytest.raises(InvalidPosition):
        order(*ORDER).decode(text)
