"""Statements of entities: the fast path equals followthemoney's own implementation."""

import string

import pytest
from followthemoney.dataset import Dataset
from followthemoney.model import Model
from followthemoney.statement.entity import StatementEntity
from followthemoney.statement.statement import Statement
from followthemoney.value import string_list
from hypothesis import given, settings
from hypothesis import strategies as st
from tarn.model.ftm.entity import MOST_KNOWN, Exploder, truncated
from tarn.model.ftm.statement import InvalidRecord, statement_id

DATASET = Dataset({"name": "test", "title": "Test"})
SCHEMATA = ["Person", "Company", "Payment", "Document", "Vessel", "Address", "Ownership", "Event"]

VALUES = st.one_of(
    st.text(max_size=30),
    st.text(string.printable, max_size=30),
    st.sampled_from(
        ["de", "Germany", "DE ", "atlantis", "2020-01-02", "2020-1-2", "02.01.2020", "http://Example.org",
         "x@Example.org",
         "+49 30 1234567", "  spaced   out ", "“quoted”", "role.pep", "eng", "text/plain", "10.0.0.1", "a-b", "male",
         "\u202ebidi", "line\nbreak", "tab\there", "nul\x00", "\U0001f600", "é", "e\u0301"]
    ),
    st.integers(-(10**12), 10**12),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.booleans(),
    st.none(),
)  # fmt: skip


@st.composite
def entities(draw):
    schema = Model.instance().get(draw(st.sampled_from(SCHEMATA)))
    assert schema is not None
    names = sorted(name for name, prop in schema.properties.items() if not prop.stub)
    properties = draw(
        st.dictionaries(st.sampled_from(names), st.one_of(VALUES, st.lists(VALUES, max_size=5)), max_size=6)
    )
    return {
        "id": draw(st.text(string.ascii_letters, min_size=1, max_size=8)),
        "schema": schema.name,
        "properties": properties,
    }


@settings(max_examples=400, deadline=None)
@given(st.lists(entities(), max_size=4))
def test_statements_equal_those_of_the_library_byte_for_byte(batch):
    exploder = Exploder()
    for data in batch:
        try:
            library = StatementEntity(DATASET, data, cleaned=False)
        except Exception:  # noqa: BLE001 - every error of the library must be one here
            with pytest.raises(InvalidRecord):
                exploder.explode("test", data)
            continue
        expected = {
            (s.id, s.entity_id, s.schema, s.prop, s.value, s.original_value, s.external, s.lang)
            for s in library.statements
        }
        exploded = exploder.explode("test", data)
        rows = zip(exploded.ids, exploded.props, exploded.values, exploded.originals, strict=True)
        statements = {(i.hex(), exploded.entity_id, exploded.schema, p, v, o, False, None) for i, p, v, o in rows}
        assert statements == expected
        assert len(exploded.ids) == len(statements)
        assert exploded.props[-1] == "id"


@settings(max_examples=200, deadline=None)
@given(st.lists(entities(), max_size=4))
def test_uncleaned_values_make_the_statements_of_the_library(batch):
    exploder = Exploder()
    for data in batch:
        exploded = exploder.explode("test", data, "as_is", drop=True)
        storable = {
            name: [value for value in (given if isinstance(given, list) else [given]) if "\x00" not in str(value)]
            for name, given in data["properties"].items()
        }
        library = StatementEntity(DATASET, data | {"properties": storable}, cleaned=True)
        assert {i.hex() for i in exploded.ids} == {s.id for s in library.statements}
        assert all(value.reason == "must not have NUL characters" for value in exploded.omitted)


@settings(max_examples=200, deadline=None)
@given(st.lists(entities(), max_size=4))
def test_every_value_is_in_a_statement_or_reported_as_omitted(batch):
    exploder = Exploder()
    for data in batch:
        exploded = exploder.explode("test", data, "clean", drop=True)
        for name, values in data["properties"].items():
            texts = {text for text in string_list(values) if text.strip()}
            omitted = {value.value for value in exploded.omitted if value.prop == name}
            assert omitted <= {truncated(text) for text in texts}
            stored = [v for p, v in zip(exploded.props, exploded.values, strict=True) if p == name]
            assert bool(stored) or texts == omitted or not texts


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "d5f32d066d6f1679e1ba2bd0b1ef9f474b2e0cfd"),
        ({"external": True}, "6b5c144f7ec2ecea8ab83336fb7d2523e3cd2c8e"),
        ({"lang": "eng"}, "e05cd37eb95d4f95ff877079eecfcd5035351298"),
    ],
)
def test_ids_equal_the_test_vectors(options, expected: str):
    assert statement_id("test", "jane", "name", "Jane Doe", **options).hex() == expected


@given(st.text(), st.text(), st.text(), st.text(), st.booleans(), st.one_of(st.none(), st.text(max_size=3)))
def test_ids_equal_those_of_the_library(dataset, entity, prop, value, external, lang):
    assert statement_id(dataset, entity, prop, value, external, lang).hex() == Statement.make_key(
        dataset, entity, prop, value, external, lang
    )


def person(properties) -> dict[str, object]:
    return {"id": "a", "schema": "Person", "properties": properties}


@pytest.mark.parametrize(
    ("data", "field", "reason"),
    [
        ([], None, "must be a JSON object"),
        ("x", None, "must be a JSON object"),
        ({"schema": "Person"}, "id", "is missing"),
        ({"id": None, "schema": "Person"}, "id", "is missing"),
        ({"id": 5, "schema": "Person"}, "id", "must be a string"),
        ({"id": "", "schema": "Person"}, "id", "must not be empty"),
        ({"id": "x" * 256, "schema": "Person"}, "id", "256 characters long"),
        ({"id": "a\nb", "schema": "Person"}, "id", "control characters"),
        ({"id": "a"}, "schema", "is missing"),
        ({"id": "a", "schema": 5}, "schema", "must be a string"),
        ({"id": "a", "schema": "Banana"}, "schema", "'Banana' is not a schema"),
        ({"id": "a", "schema": "Person", "properties": []}, "properties", "must be an object"),
        (person({"vesselType": ["x"]}), "properties.vesselType", "not a property of Person"),
        (person({"name": {"x": 1}}), "properties.name", "must be a string or a list"),
        (person({"name": [["x"]]}), "properties.name", "must be a string or a list"),
        (person({"parent": ["a"]}), "properties.parent", "refer to itself"),
        (person({"ownershipOwner": ["b"]}), "properties.ownershipOwner", "other side"),
        ({"id": "a", "schema": "Person", "first_seen": "yesterday"}, "first_seen", "ISO 8601"),
    ],
)  # fmt: skip
def test_invalid_entity_is_refused_with_field_and_reason(data, field, reason):
    with pytest.raises(InvalidRecord) as refused:
        Exploder().explode("test", data)
    assert (refused.value.field, reason in refused.value.reason) == (field, True), refused.value.reason


def test_cache_of_cleaned_values_is_bounded():
    exploder = Exploder()
    for start in range(0, MOST_KNOWN + 2000, 1000):
        names = [f"Name {number}" for number in range(start, start + 1000)]
        exploder.explode("test", {"id": "a", "schema": "Person", "properties": {"name": names}})

    assert all(len(cleaner.known) <= MOST_KNOWN for cleaner in exploder._cleaners.values())
