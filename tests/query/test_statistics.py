"""Statistics: equal to counts over the lines of entities, also when computed in parts."""

import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import duckdb
import orjson
import pytest
from followthemoney.model import Model
from hypothesis import given, settings
from hypothesis import strategies as st
from tarn.model.ftm.statistics import Bound, Count, Statistics
from tarn.query.output.assembly import entity_lines
from tarn.query.output.ftm_model import property_type
from tarn.query.statistics import count_entities

from tests.query.live_rows import Row, engine, fill, moment

FAMILIES = {
    "a": ["Person", "LegalEntity"],
    "b": ["Company", "Organization", "Asset"],
    "c": ["Ownership", "Interval"],
    "d": ["Event", "Thing"],
    "e": ["Page"],
    "f": ["Person", "Company", "Address"],
    "g": ["Person", "Gone"],
    "h": ["Gone"],
}
"""By the first letter of an id: schemata that are compatible, incompatible, or unknown to FtM."""

PROPS = ["id", "name", "country", "jurisdiction", "nationality", "startDate", "birthDate", "date", "modifiedAt"]
VALUES = {
    "country": ["gb", "us", "suhh", "nowhere"],
    "date": [
        "2020",
        "2020-01-31",
        "1899-12",
        "2021-05-05T10:00:00",
        "n/a",
        "soon",
        "31.12.2020",
        "2020-1-1",
        "9999 BC",
    ],
}


@st.composite
def some_rows(draw: st.DrawFn) -> list[Row]:
    rows = []
    for canonical_id in draw(st.lists(st.sampled_from([f + n for f, n in product(FAMILIES, "123")]), unique=True)):
        for schema in draw(st.lists(st.sampled_from(FAMILIES[canonical_id[0]]), min_size=1, max_size=5)):
            known = [prop for prop in PROPS if property_type(schema, prop) is not None]
            prop = draw(st.sampled_from(known or ["name"]))
            values = VALUES.get(property_type(schema, prop) or "", ["x"])
            first = draw(st.integers(0, 9))
            row = Row(
                canonical_id,
                schema,
                prop,
                draw(st.sampled_from(values)),
                entity_id=canonical_id + draw(st.sampled_from("xy")),
                origin=draw(st.sampled_from(["crawl", "mapping:1", "by.hand"])),
                first_seen=first,
                last_seen=draw(st.integers(first, 9)),
            )
            rows.append(row)
    return rows


@pytest.fixture(scope="module")
def duck() -> duckdb.DuckDBPyConnection:
    return engine()


def of(duck: duckdb.DuckDBPyConnection, rows: list[Row]) -> Statistics:
    fill(duck, rows)
    return count_entities(duck)


def entities(duck: duckdb.DuckDBPyConnection) -> Iterator[dict[str, Any]]:
    for batch in entity_lines(duck):
        for line in batch.column("line").to_pylist():
            yield orjson.loads(line)


def values_of(entity: dict[str, Any], kind: str) -> set[str]:
    properties = entity["properties"].items()
    return {value for prop, values in properties for value in values if property_type(entity["schema"], prop) == kind}


def slowly_counted(duck: duckdb.DuckDBPyConnection, rows: list[Row]) -> Statistics:
    fill(duck, rows)
    return counted_in(entities(duck), len(rows))


def counted_in(lines: Iterable[dict[str, Any]], statements: int) -> Statistics:
    """Count statistics in the lines of entities made of so many statements."""
    counts = Counter({Count("statement"): statements})
    collected: dict[str, list[str]] = {}
    for entity in lines:
        if "$invalid" in entity:
            counts[Count("invalid")] += 1
            continue
        schema = Model.instance()[entity["schema"]]
        groups = {"things": schema.is_a("Thing"), "intervals": schema.is_a("Interval")}
        groups["others"] = not any(groups.values())
        counts[Count("schema", schema.name)] += 1
        counts.update(Count("origin", origin) for origin in entity["origin"])
        for country in values_of(entity, "country"):
            counts.update(Count(group, country) for group, is_in in groups.items() if is_in)
        dates = {date for date in values_of(entity, "date") if re.fullmatch(r"\d{4}(-\d\d(-\d\d(T.*)?)?)?", date)}
        if dates:
            collected.setdefault("first_date", []).append(min(dates))
            collected.setdefault("last_date", []).append(max(dates))
        for name in ("first_seen", "last_seen", "last_change"):
            if entity[name] is not None:
                collected.setdefault(name, []).append(entity[name])
    bounds = {}
    for name, values in collected.items():
        bound = min(values) if name.startswith("first") else max(values)
        bounds[name] = Bound(bound, values.count(bound))
    return Statistics(dict(+counts), bounds)


@given(rows=some_rows())
@settings(max_examples=60, deadline=None)
def test_statistics_equal_counts_over_the_lines_of_entities(duck: duckdb.DuckDBPyConnection, rows: list[Row]) -> None:
    assert of(duck, rows) == slowly_counted(duck, rows)


@given(rows=some_rows(), cut=st.sampled_from([f + n for f, n in product(FAMILIES, "123")]))
@settings(max_examples=40, deadline=None)
def test_parts_add_up_to_the_total_and_subtraction_gives_the_other_part_or_unknown(
    duck: duckdb.DuckDBPyConnection, rows: list[Row], cut: str
) -> None:
    total = of(duck, rows)
    before = of(duck, [row for row in rows if row.canonical_id < cut])
    after = of(duck, [row for row in rows if row.canonical_id >= cut])
    assert before + after == total == after + before
    assert total + Statistics() == total == total.replaced(Statistics(), Statistics())
    assert total.replaced(total, Statistics()) == Statistics()
    assert total.replaced(after, Statistics()) in (before, None)
    assert total.replaced(before, Statistics()) in (after, None)


@given(rows=some_rows(), others=some_rows(), families=st.sets(st.sampled_from(sorted(FAMILIES))))
@settings(max_examples=40, deadline=None)
def test_replaced_part_gives_the_result_of_a_new_count_or_unknown(
    duck: duckdb.DuckDBPyConnection, rows: list[Row], others: list[Row], families: set[str]
) -> None:
    unchanged = [row for row in rows if row.canonical_id[0] not in families]
    former = [row for row in rows if row.canonical_id[0] in families]
    present = [row for row in others if row.canonical_id[0] in families]
    replaced = of(duck, rows).replaced(of(duck, former), of(duck, present))
    assert replaced in (of(duck, unchanged + present), None)


@given(rows=some_rows())
@settings(max_examples=25, deadline=None)
def test_document_is_json_that_parses_to_the_same_statistics(duck: duckdb.DuckDBPyConnection, rows: list[Row]) -> None:
    statistics = of(duck, rows)
    document = orjson.loads(orjson.dumps(statistics.document() | {"snapshot": "whatever else is in it"}))
    assert Statistics.parsed(document) == statistics
    assert pickle.loads(pickle.dumps(statistics)) == statistics


def test_empty_dataset_has_zero_counts(duck: duckdb.DuckDBPyConnection) -> None:
    none = {"total": 0, "countries": [], "schemata": []}
    assert of(duck, []) == Statistics() == Statistics.parsed(Statistics().document())
    assert of(duck, []).document() == {
        "entity_count": 0,
        "things": none,
        "intervals": none,
        "others": none,
        "invalid": 0,
        "statements": 0,
        "origins": [],
        "dates": {"first": None, "last": None},
        "first_seen": None,
        "last_seen": None,
        "last_change": None,
        "entities_at": {},
    }


SEEN: dict[str, Any] = {"first_seen": moment("2020-01-01"), "last_seen": moment("2021-01-01")}
STORY = [
    Row("a", "Person", "id", "1", first_seen=moment("2020-06-01"), last_seen=moment("2022-01-01")),
    Row("a", "Person", "name", "Ann", **SEEN),
    Row("a", "LegalEntity", "country", "gb", **SEEN),
    Row("a", "Person", "nationality", "gb", origin="by.hand", **SEEN),
    Row("a", "Person", "birthDate", "1970-05", **SEEN),
    Row("b", "Company", "jurisdiction", "us", **SEEN),
    Row("b", "Company", "country", "gb", **SEEN),
    Row("o", "Ownership", "startDate", "1999", **SEEN),
    Row("t", "Trip", "country", "gb", **SEEN),
    Row("p", "Page", "bodyText", "…", **SEEN),
    Row("x", "Person", "country", "fr", first_seen=0, origin="crossed"),
    Row("x", "Address", "country", "fr", first_seen=0, origin="crossed"),
]


def test_document_has_totals_labels_and_the_largest_counts_first(duck: duckdb.DuckDBPyConnection) -> None:
    statistics = of(duck, STORY)
    assert (statistics.entities, statistics.things, statistics.invalid) == (5, 3, 1)
    assert statistics.document() == {
        "entity_count": 5,
        "things": {
            "total": 3,
            "countries": [
                {"code": "gb", "count": 3, "label": "United Kingdom"},
                {"code": "us", "count": 1, "label": "United States"},
            ],
            "schemata": [
                {"name": "Company", "count": 1, "label": "Company", "plural": "Companies"},
                {"name": "Person", "count": 1, "label": "Person", "plural": "People"},
                {"name": "Trip", "count": 1, "label": "Trip", "plural": "Trips"},
            ],
        },
        "intervals": {
            "total": 2,
            "countries": [{"code": "gb", "count": 1, "label": "United Kingdom"}],
            "schemata": [
                {"name": "Ownership", "count": 1, "label": "Ownership", "plural": "Ownerships"},
                {"name": "Trip", "count": 1, "label": "Trip", "plural": "Trips"},
            ],
        },
        "others": {
            "total": 1,
            "countries": [],
            "schemata": [{"name": "Page", "count": 1, "label": "Page", "plural": "Pages"}],
        },
        "invalid": 1,
        "statements": 12,
        "origins": [{"name": "crawl", "count": 5}, {"name": "by.hand", "count": 1}],
        "dates": {"first": "1970-05", "last": "1999"},
        "first_seen": "2020-01-01T00:00:00.000000Z",
        "last_seen": "2021-01-01T00:00:00.000000Z",
        "last_change": "2020-06-01T00:00:00.000000Z",
        "entities_at": {"first_date": 1, "first_seen": 5, "last_change": 1, "last_date": 1, "last_seen": 5},
    }


DATED = {"a": "2020", "b": "2020", "c": "2021"}


def test_bound_holds_until_its_last_entity_is_removed(duck: duckdb.DuckDBPyConnection) -> None:
    first, second, third = (of(duck, [Row(id, "Event", "date", date)]) for id, date in DATED.items())
    total = first + second + third
    assert total.replaced(first, Statistics()) == second + third
    assert (second + third).replaced(second, Statistics()) is None


def test_bound_without_entities_is_known_if_an_added_value_reaches_it(duck: duckdb.DuckDBPyConnection) -> None:
    def dated(date: str) -> Statistics:
        return of(duck, [Row("a", "Event", "date", date)])

    rest = of(duck, [Row("b", "Event", "date", "2015")])
    for former, present in [("2020", "2020"), ("2020", "2021"), ("2010", "2009")]:
        assert (rest + dated(former)).replaced(dated(former), dated(present)) == rest + dated(present)
    assert (rest + dated("2020")).replaced(dated("2020"), dated("2019")) is None


def test_subtraction_of_what_is_not_a_part_is_refused(duck: duckdb.DuckDBPyConnection) -> None:
    person = of(duck, [Row("a", "Person", "name", "x")])
    company = of(duck, [Row("a", "Company", "name", "x")])
    later = of(duck, [Row("a", "Person", "name", "x", last_seen=1)])
    assert person.replaced(company, Statistics()) is None
    assert (person + person).replaced(later, Statistics()) is None


@pytest.mark.parametrize(
    "change",
    [
        {"things": None},
        {"entity_count": 7},
        {"entities_at": {}},
        {"origins": [{"name": "crawl"}]},
        {"others": {"total": 1, "countries": [], "schemata": [{"name": "Gone", "count": 1}]}},
    ],
)
def test_document_of_another_kind_is_not_parsed(duck: duckdb.DuckDBPyConnection, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="statistics document"):
        Statistics.parsed(of(duck, STORY).document() | change)


def test_count_binds_the_parameters_of_its_source_and_leaves_no_table(duck: duckdb.DuckDBPyConnection) -> None:
    fill(duck, STORY)
    before = duck.execute("SHOW TABLES").fetchall()
    assert count_entities(duck, "(SELECT * FROM live WHERE canonical_id < ?)", ["b"]).entities == 1
    assert duck.execute("SHOW TABLES").fetchall() == before
