"""The mapper of rows to statements, compared with FtM's own mapping and the loading of its entities."""

import csv
import io
import logging
import re
from typing import Any

import pytest
from followthemoney.entity import ValueEntity
from followthemoney.mapping.csv import CSVSource
from followthemoney.property import Property
from followthemoney.util import sanitize_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tarn.model.ftm.entity import Exploder
from tarn.model.ftm.mapping import MappingDocument
from tarn.model.names import DatasetName
from tarn.pipeline.tasks import mapper
from tarn.pipeline.tasks.mapper import Mapper

logging.getLogger("followthemoney.mapping").setLevel(logging.ERROR)

DATASET = DatasetName("test")
HEADER = ["id", "name", "other", "when", "land", "text", "id "]
Statements = set[tuple[str, str, str, str, str]]
Omitted = set[tuple[int, str, str, str]]
"""Omitted values: row, schema, property and value."""
GARBLED = re.compile("[\udc80-\udcff]")

TEXTS = st.one_of(
    st.sampled_from(
        ["", " ", "a", "Ann", "Ann B.", "12 Road; Town", "12 Road, Town", "x,,y", "ESQ., x", '"quoted"', "o'hara", "ü",
         "u\u0308", "2020-01-02", "2020-02-30", "2020-13-01", "1999-12-31", "2020-1-2", "0999", "2020-02",
         "\uff12\uff10\uff12\uff10", "Mr. B ESQ", "a & b", "a, b\nc", "Q42", "a\x00b", "1,5", "5%", "Müller GmbH",
         "02.01.2020", "2020", "Germany", "de", "+49 30 1234567", "0301234567", "a;b;;c",
         "{{name}}", "{{other}}", "x\u200by", "\u2028", "tab\tx", "a\nb", "  padded  ",
         "http://example.org/A", "ann@example.org", "male", "x" * 300, "Atlantis", "20th century", "no address",
         "a_b", "https://hivos.org\\/", "ESQ", "\udcff", "\u1e9b\u0323", "\u00a0nb"]
    ),
    st.text(max_size=8),
)  # fmt: skip
COLUMN = st.sampled_from([*HEADER, "absent"])
PROPERTY = st.fixed_dictionaries(
    {},
    optional={
        "column": COLUMN,
        "columns": st.lists(COLUMN, max_size=3),
        "literal": st.sampled_from(["fixed", "de", " spaced ", "2020"]),
        "literals": st.lists(st.sampled_from(["Ann", "b;c", "gb", ""]), max_size=2),
        "template": st.sampled_from(["{{name}} {{other}}", "{{ name}}", "{{other}}-{{name}}{{other}}", "plain", "  "]),
        "join": st.sampled_from([" ", "", "; "]),
        "split": st.sampled_from([";", " ", "a"]),
        "format": st.sampled_from(["%d.%m.%Y", "lei", "wikidata"]),
        "fuzzy": st.booleans(),
        "required": st.booleans(),
    },
).filter(lambda rule: rule.keys() & {"column", "literal", "template"})
PROPERTIES = {
    "Person": ["name", "alias", "birthDate", "country", "nationality", "phone", "email", "address", "summary", "gender",
               "website", "idNumber", "wikidataId", "notes", "position"],
    "Company": ["name", "incorporationDate", "jurisdiction", "leiCode", "registrationNumber", "description", "capital"],
    "Ownership": ["owner", "asset", "startDate", "percentage", "namesMentioned", "role"],
}  # fmt: skip


@st.composite
def rules(draw: st.DrawFn, schema: str) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(PROPERTIES[schema]), max_size=5, unique=True))
    rule: dict[str, Any] = {"schema": schema, "properties": {name: draw(PROPERTY) for name in names}}
    if draw(st.booleans()):
        return rule | {"id_column": draw(COLUMN)}
    keys = draw(st.lists(COLUMN, min_size=1, max_size=3))
    return rule | {"keys": keys} | draw(st.sampled_from([{}, {"key_literal": "k"}, {"key_literal": 5}]))


@st.composite
def queries(draw: st.DrawFn) -> dict[str, Any]:
    entities = {"first": draw(rules("Person"))}
    if draw(st.booleans()):
        entities["second"] = draw(rules("Company"))
        entities["link"] = draw(rules("Ownership"))
        for name, other in (("owner", "first"), ("asset", "second")):
            if draw(st.booleans()):
                entities["link"]["properties"][name] = {"entity": other, "required": draw(st.booleans())}
    if draw(st.booleans()):
        entities["third"] = draw(rules("Person"))
    allowed = st.sampled_from(["a", "Ann", "", "de", ["a", "Ann"], [None], None, []])
    filters = st.dictionaries(COLUMN, allowed, max_size=1)
    return {"entities": entities, "filters": draw(filters), "filters_not": draw(filters)}


def document(*queries: dict[str, Any]) -> MappingDocument:
    return MappingDocument.model_validate({"queries": list(queries)})


def expected(mapping: MappingDocument, rows: list[list[str]]) -> tuple[Statements, list[int], Omitted]:
    """Return the statements of FtM's mapping, the rows that cannot be loaded, and the omitted values."""
    written = io.StringIO()
    csv.writer(written).writerows([HEADER, *rows])
    written.seek(0)
    all_statements: Statements = set()
    bad = []
    left: Omitted = set()
    for place, record in enumerate(CSVSource.read_csv(written)):
        try:
            assert not GARBLED.search("".join(rows[place]))
            statements, omitted = loaded(mapping, record)
        except Exception:  # noqa: BLE001 - FtM's cleaning may raise nearly anything
            bad.append(place)
        else:
            all_statements |= statements
            left |= {(place, *one) for one in omitted}
    return all_statements, bad, left


class Watched(ValueEntity):
    """An entity that records the values that a mapping could not add to it."""

    omitted: set[tuple[str, str, str]]

    def unsafe_add(self, *args: Any, **options: Any) -> str | None:
        added = super().unsafe_add(*args, **options)
        prop, value = options.get("prop"), options.get("value")
        if isinstance(prop, Property) and not added and sanitize_text(value):
            self.omitted.add((self.schema.name, prop.name, str(value)))
        return added


def loaded(mapping: MappingDocument, record: dict[str, str]) -> tuple[Statements, set[tuple[str, str, str]]]:
    statements: Statements = set()
    Watched.omitted = omitted = set()
    for query in mapping.ftm(DATASET):
        assert isinstance(query.source, CSVSource)
        for entity in query.map(record).values() if query.source.check_filters(record) else ():
            data = {"id": entity.id, "schema": entity.schema.name, "properties": entity.properties}
            exploded = Exploder().explode(DATASET, data)
            statements |= {
                (exploded.entity_id, exploded.schema, prop, value, identity.hex())
                for identity, prop, value in zip(exploded.ids, exploded.props, exploded.values, strict=True)
            }
            omitted |= {
                (entity.schema.name, prop.name, value)
                for prop, value in entity.itervalues()
                if (text := sanitize_text(value)) and not prop.type.clean_text(text)
            }
    return statements, omitted


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("followthemoney.mapping.entity.ValueEntity", Watched)


def mapped(mapping: MappingDocument, rows: list[list[str]]) -> tuple[Statements, list[int], Omitted]:
    chunks = list(Mapper(mapping, HEADER, DATASET, "mapping:x", 7).map(rows, is_doubtful=True))
    statements = {
        (row["entity_id"], row["schema"], row["prop"], row["value"], row["id"].hex())
        for one in chunks
        for row in one.events.to_pylist()
    }
    omitted = [value for one in chunks for value in one.omitted]
    assert [value.row_index for value in omitted] == sorted(value.row_index for value in omitted)
    assert all(value.reason for value in omitted)
    return statements, [bad.row_index for one in chunks for bad in one.bad], {tuple(value[:4]) for value in omitted}  # type: ignore[misc]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(queries(), min_size=1, max_size=2), st.lists(st.lists(TEXTS, min_size=7, max_size=7), max_size=12))
def test_mapper_equals_ftm_for_any_mapping_and_rows(given: list[dict[str, Any]], rows: list[list[str]]):
    mapping = document(*given)
    # Line ends are handled by the reader, and a blank line is no row.
    rows = [[text.replace("\r", "") for text in row] for row in rows]
    assert mapped(mapping, rows) == expected(mapping, rows)


PERSON = {"schema": "Person", "id_column": "id", "properties": {"name": {"column": "name"}}}


def rows_of(count: int, **odd: dict[int, str]) -> list[list[str]]:
    """Return usual rows, with unusual values in some rows of some columns."""
    rows = [[f"p{number}", f"Name {number}", "", "", "", f"text {number}", ""] for number in range(count)]
    for column, values in odd.items():
        for place, value in values.items():
            rows[place][HEADER.index(column)] = value
    return rows


@pytest.mark.parametrize(
    ("rule", "odd"),
    [
        (PERSON, {"id": {0: "x" * 256, 700: "a\tb", 4099: "ü" * 255}}),
        (PERSON | {"properties": {"summary": {"column": "text"}}}, {"text": {5: "y" * (mapper.LONG + 1)}}),
        (PERSON | {"properties": {"alias": {"column": "name", "split": ";"}}}, {"name": {9: "a;b;" * 50}}),
        (PERSON | {"properties": {"notes": {"template": "{{name}}"}}}, {"name": {3: "{{name}}" * 3}}),
    ],
)  # fmt: skip
def test_unusual_rows_among_usual_ones_equal_ftm(rule: dict[str, Any], odd: dict[str, dict[int, str]]):
    mapping, rows = document({"entities": {"person": rule}}), rows_of(4100, **odd)

    assert mapped(mapping, rows) == expected(mapping, rows)


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ({"column": "name", "split": ";"}, ";" * (mapper.MOST_VALUES + 1)),
        ({"template": "{{name}}{{other}}" * 9}, "{{other}}" * 99_999),
    ],
)
def test_row_that_would_take_ftm_too_long_is_bad(rule: dict[str, Any], name: str):
    mapping = document({"entities": {"person": PERSON | {"properties": {"notes": rule}}}})
    rows = rows_of(3, name={1: name}, other={1: "x" * 1000})

    statements, bad, _ = mapped(mapping, rows)

    assert bad == [1]
    assert {entity for entity, *_ in statements} == {"p0", "p2"}


@pytest.mark.parametrize("prop", ["percentage", "startDate", "namesMentioned", "role"])
@pytest.mark.parametrize("blank", [" ", "\t", "\n"])
def test_blank_value_is_not_reported_as_omitted(prop: str, blank: str):
    rule = {"schema": "Ownership", "id_column": "id", "properties": {prop: {"literal": blank}}}
    mapping, rows = document({"entities": {"link": rule}}), rows_of(3)

    assert mapped(mapping, rows) == expected(mapping, rows)
    assert mapped(mapping, rows)[2] == set()


def test_entity_that_refers_to_itself_makes_its_row_bad():
    link = {"schema": "Ownership", "id_column": "other", "properties": {"owner": {"entity": "person"}}}
    mapping = document({"entities": {"person": PERSON, "link": link}})

    assert mapped(mapping, rows_of(20, other={7: "p7", 8: "p7"}))[1] == [7]


def test_value_keeps_its_original_before_cleaning():
    mapping = document({"entities": {"person": PERSON | {"properties": {"country": {"column": "land"}}}}})
    (chunks,) = Mapper(mapping, HEADER, DATASET, "mapping:x", 7).map(rows_of(2, land={0: "Germany", 1: "de"}))

    originals = {(row["value"], row["original_value"]) for row in chunks.events.to_pylist() if row["prop"] == "country"}
    assert originals == {("de", "Germany"), ("de", None)}


def test_identical_statements_of_many_rows_are_written_once_per_chunk_of_rows():
    company = {"schema": "Company", "key": "land", "properties": {"name": {"column": "land"}}}
    mapping = document({"entities": {"company": company}})
    (chunks,) = Mapper(mapping, HEADER, DATASET, "mapping:x", 7).map(rows_of(100, land=dict.fromkeys(range(100), "x")))

    assert (chunks.entities, chunks.events.num_rows) == (100, 2)


LINK = {"schema": "Ownership", "key": "id", "properties": {"owner": {"entity": "person"}}}


@pytest.mark.parametrize("count", [3, 3000])
def test_omitted_values_are_reported_once_per_row_property_and_value(count: int):
    rule = PERSON | {
        "properties": {
            "country": {"columns": ["land", "other"]},
            "alias": {"column": "name", "required": True},
            "birthDate": {"column": "when", "split": ";"},
        }
    }
    mapping = document({"entities": {"person": rule, "link": LINK}})
    odd = {"land": {1: "Atlantis"}, "other": {1: "Atlantis"}, "when": {1: "2020;; ;20th century"}}
    # A bad row causes those of its chunk to be mapped one by one.
    rows = rows_of(count, id={0: "x" * 256, 2: "a_b"}, **odd)

    omitted = [value for one in Mapper(mapping, HEADER, DATASET, "mapping:x", 7).map(rows) for value in one.omitted]

    assert omitted == [
        (1, "Person", "country", "Atlantis", "rejected by FollowTheMoney's cleaning of country"),
        (1, "Person", "birthDate", "20th century", "rejected by FollowTheMoney's cleaning of date"),
        (2, "Ownership", "owner", "a_b", "rejected by FollowTheMoney's cleaning of entity"),
    ]
    rows[0][0] = "p0"
    assert mapped(mapping, rows) == expected(mapping, rows)


@pytest.mark.parametrize("odd", [{}, {"id": {0: "x" * 256}}], ids=["at once", "one by one"])
def test_value_too_long_to_be_cleaned_is_omitted_and_its_row_is_kept(odd: dict[str, dict[int, str]]):
    properties = {"mimeType": {"column": "land"}, "alias": {"column": "name"}}
    rule = {"schema": "Document", "id_column": "id", "properties": properties}
    mapping = document({"entities": {"file": rule}})
    rows = rows_of(2, land={1: '"' * 32_000}, name={1: "x" * 16_385}, **odd)

    chunks = list(Mapper(mapping, HEADER, DATASET, "mapping:x", 7).map(rows))

    omitted = {(value.prop, len(value.value), value.reason) for one in chunks for value in one.omitted}
    assert omitted == {
        ("mimeType", 32_000, "is 32000 characters long, at most 250 are cleaned as mimetype"),
        ("alias", 16_385, "is 16385 characters long, at most 16384 are cleaned as name"),
    }
    assert "p1" in {row["entity_id"] for one in chunks for row in one.events.to_pylist()}


def test_values_beyond_the_limit_of_an_entity_are_omitted_with_the_reason():
    rule = PERSON | {"properties": {"notes": {"columns": ["text", "other"]}}}
    rows = rows_of(1, text={0: "x" * (20 << 20)}, other={0: "y" * (20 << 20)})

    (chunks,) = Mapper(document({"entities": {"person": rule}}), HEADER, DATASET, "mapping:x", 7).map(rows)

    (omitted,) = chunks.omitted
    assert (omitted.prop, omitted.value[0]) == ("notes", "y")
    assert "have more than" in omitted.reason
