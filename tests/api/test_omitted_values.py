"""What is left out of a body that is stored, and what is not: values, properties, fields, nested entities, changes."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from followthemoney.dataset import Dataset
from followthemoney.statement.entity import StatementEntity
from tarn.model.entity import Exploder

from tests.in_process_api import ONE_DATABASE, InProcessApi

pytestmark = ONE_DATABASE

ENTITIES = "/v1/datasets/test/entities"
STATEMENTS = "/v1/datasets/test/statements"
NDJSON = "application/x-ndjson"
FTM = "application/json+ftm"

UNCLEAN: dict[str, Any] = {
    "id": "jane",
    "schema": "Person",
    "properties": {
        "name": ["Jane Doe"],
        "website": ["https://hivos.org\\/"],
        "birthDate": ["20th century", "c.1960s"],
        "phone": ["+49 30 1234567 / +49 30 1234568 / +49 30 1234569"],
        "country": ["Atlantis", "de"],
    },
}
LEFT_OUT = {"Person:birthDate": 2, "Person:country": 1, "Person:phone": 1, "Person:website": 1}


@pytest.fixture(autouse=True)
def _dataset(house: InProcessApi) -> None:
    house.dataset("test")


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def send(house: InProcessApi, *records: Any, kind: str = NDJSON, path: str = ENTITIES, **params: Any) -> Any:
    return house.admin.post(path, content=lines(*records), headers={"Content-Type": kind}, params=params)


def stored(house: InProcessApi) -> list[dict[str, Any]]:
    text = house.admin.get(f"{STATEMENTS}/stream").text
    return [json.loads(line) for line in text.splitlines()]


def ids(house: InProcessApi) -> set[str]:
    return {row["id"] for row in stored(house)}


def ftm_ids(entities: Iterable[dict[str, Any]], cleaned: bool) -> set[str]:
    dataset = Dataset({"name": "test", "title": "Test"})
    made = (StatementEntity(dataset, entity, cleaned=cleaned) for entity in entities)
    return {str(statement.id) for entity in made for statement in entity.statements}


def test_values_that_cleaning_rejects_are_left_out_and_listed(house: InProcessApi):
    answer = send(house, {"id": "bob", "schema": "Person"}, UNCLEAN).json()
    assert answer["omitted"]["count"] == 5
    assert answer["omitted"]["by_property"] == LEFT_OUT
    first = answer["omitted"]["first"]
    assert {(value["line"], value["property"], value["value"]) for value in first} == {
        (2, f"Person:{name}", value)
        for name, values in UNCLEAN["properties"].items()
        for value in values
        if value not in ("Jane Doe", "de")
    }
    assert first[0]["reason"] == "rejected by FollowTheMoney's cleaning of url"
    assert ids(house) == ftm_ids([{"id": "bob", "schema": "Person"}, UNCLEAN], cleaned=False)


@pytest.mark.parametrize(("kind", "params"), [(FTM, {}), (NDJSON, {"values": "as_is"})])
def test_values_taken_as_they_are_have_the_ids_of_ftm(house: InProcessApi, kind: str, params: dict[str, str]):
    answer = send(house, UNCLEAN, kind=kind, **params).json()
    assert (answer["statements"], answer["omitted"]["count"]) == (8, 0)
    assert ids(house) == ftm_ids([UNCLEAN], cleaned=True)


def test_ftm_files_are_cleaned_where_that_is_asked_for(house: InProcessApi):
    assert send(house, UNCLEAN, kind=FTM, values="clean").json()["omitted"]["by_property"] == LEFT_OUT


def test_blank_values_say_nothing_and_are_not_listed(house: InProcessApi):
    answer = send(house, {"id": "jane", "schema": "Person", "properties": {"name": ["", " ", None]}}).json()
    assert (answer["omitted"]["count"], answer["statements"]) == (0, 1)


@pytest.mark.parametrize("on_error", ["abort", "skip", "drop"])
def test_strict_refuses_a_value_that_would_be_left_out(house: InProcessApi, on_error: str):
    answer = send(house, UNCLEAN, strict=True, on_error=on_error)
    assert answer.status_code == 422
    (fault,) = answer.json()["errors"]
    assert (fault["line"], fault["field"]) == (1, "Person:website")
    assert "https://hivos.org" in fault["reason"]
    assert stored(house) == []


def test_put_reports_what_it_left_out_and_strict_refuses_it(house: InProcessApi):
    answer = house.admin.put(f"{ENTITIES}/jane", UNCLEAN | {"collection_id": 5}).json()
    assert answer["omitted"]["by_property"] == LEFT_OUT
    assert answer["ignored"] == {"collection_id": 1}
    assert house.admin.put(f"{ENTITIES}/jane", UNCLEAN, params={"strict": True}).status_code == 422
    assert house.admin.put(f"{ENTITIES}/jane", UNCLEAN, params={"values": "as_is"}).json()["statements"] == 8


def test_only_the_first_hundred_are_listed_and_all_are_counted(house: InProcessApi):
    entities = [{"id": f"p{n}", "schema": "Person", "properties": {"country": [f"Atlantis {n}"]}} for n in range(150)]
    omitted = send(house, *entities).json()["omitted"]
    assert (omitted["count"], omitted["by_property"], len(omitted["first"])) == (150, {"Person:country": 150}, 100)
    assert omitted["first"][99] | {"reason": ""} == {
        "line": 100, "property": "Person:country", "value": "Atlantis 99", "reason": ""
    }  # fmt: skip


def test_cleaned_statements_lose_what_cleaning_rejects_and_say_so(house: InProcessApi):
    row = {"entity_id": "jane", "prop": "country", "schema": "Person"}
    rows = [row | {"value": "Germany"}, row | {"value": "Atlantis"}]
    answer = send(house, *rows, path=STATEMENTS, values="clean").json()
    assert (answer["statements"], answer["rejected"], answer["omitted"]["by_property"]) == (1, 1, {"Person:country": 1})
    assert [(one["value"], one["original_value"]) for one in stored(house)] == [("de", "Germany")]
    assert send(house, *rows, path=STATEMENTS, values="clean", strict=True).status_code == 422


def test_statements_are_taken_as_they_are(house: InProcessApi):
    row = {"entity_id": "jane", "prop": "country", "schema": "Person", "value": "Atlantis"}
    assert send(house, row, path=STATEMENTS).json()["statements"] == 1


# What cannot be stored


ODD = {
    "id": "jane",
    "schema": "Person",
    "properties": {"name": ["Jane"], "deathPlace": ["Nowhere", "Elsewhere"], "parent": ["jane"], "weight": [{"kg": 5}]},
    "first_seen": "yesterday",
}


def test_drop_keeps_the_rest_of_an_entity(house: InProcessApi):
    answer = send(house, ODD, on_error="drop").json()
    assert (answer["entities"], answer["rejected"], answer["statements"]) == (1, 0, 2)
    assert answer["omitted"]["by_property"] == {
        "Person:deathPlace": 2, "Person:parent": 1, "Person:weight": 1, "Person:first_seen": 1
    }  # fmt: skip
    reasons = {value["value"]: value["reason"] for value in answer["omitted"]["first"]}
    assert reasons["Nowhere"] == "'deathPlace' is not a property of Person"
    assert reasons["jane"] == "an entity cannot refer to itself"


def test_skip_leaves_the_entity_out_and_abort_refuses_all(house: InProcessApi):
    bob = {"id": "bob", "schema": "Person", "properties": {"name": ["Bob"]}}
    skipped = send(house, ODD, bob, on_error="skip").json()
    assert (skipped["entities"], skipped["rejected"]) == (1, 1)
    refused = send(house, bob, ODD)
    assert (refused.status_code, refused.json()["errors"][0]["line"]) == (422, 2)


def test_drop_leaves_out_a_record_of_which_nothing_can_be_kept(house: InProcessApi):
    answer = send(house, {"id": "x", "schema": "Banana"}, {"schema": "Person"}, on_error="drop").json()
    assert (answer["entities"], answer["rejected"]) == (0, 2)
    assert [fault["field"] for fault in answer["errors"]] == ["schema", "id"]


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [("country", "x" * 300, 250), ("phone", "5" * 2000, 1000), ("name", "x" * 20_000, 16_384)],
)
def test_a_value_too_long_to_be_cleaned_is_refused_with_its_limit(
    house: InProcessApi, name: str, value: str, most: int
):
    entity = {"id": "jane", "schema": "Person", "properties": {name: [value]}}
    refused = send(house, entity)
    assert refused.status_code == 422
    assert f"is {len(value)} characters long, at most {most}" in refused.json()["detail"]
    assert send(house, entity, on_error="drop").json()["omitted"]["count"] == 1
    assert send(house, entity, values="as_is").json()["statements"] == 2


def test_a_value_that_a_library_fails_on_is_rejected(house: InProcessApi):
    # Parentheses are parsed by recursion, which Python ends.
    entity = {"id": "d", "schema": "Document", "properties": {"mimeType": ["(" * 250]}}
    assert send(house, entity).json()["omitted"]["count"] == 1


def test_fields_that_no_entity_has_are_ignored_and_counted(house: InProcessApi):
    jane = {"id": "jane", "schema": "Person", "collection_id": 7, "links": {}}
    answer = send(house, jane, jane | {"id": "bob"}, {"id": "x", "schema": "Person"}).json()
    assert (answer["entities"], answer["ignored"]) == (3, {"collection_id": 2, "links": 2})


def test_fields_that_no_statement_has_are_ignored_and_counted(house: InProcessApi):
    row = {"entity_id": "jane", "prop": "name", "schema": "Person", "value": "Jane", "target": True}
    assert send(house, row, row | {"value": "J"}, path=STATEMENTS).json()["ignored"] == {"target": 2}
    body = b"entity_id,prop,schema,value,target,colour\njane,name,Person,J,t,red\n"
    csv = house.admin.post(STATEMENTS, content=body, headers={"Content-Type": "text/csv"}).json()
    assert (csv["statements"], csv["ignored"]) == (1, {"target": 1, "colour": 1})


@pytest.mark.parametrize("on_error", ["abort", "skip", "drop"])
def test_put_of_what_cannot_be_stored_leaves_the_entity_as_it_was(house: InProcessApi, on_error: str):
    house.admin.put(f"{ENTITIES}/jane", {"schema": "Person", "properties": {"name": ["Jane"]}})
    refused = house.admin.put(f"{ENTITIES}/jane", {"schema": "Banana"}, params={"on_error": on_error})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "schema")
    assert names(house) == {"jane": ["Jane"]}


@pytest.mark.parametrize("body", [b"[{}]", b"5", b'{"schema": "Person"} {"schema": "Person"}', b'{"schema": "Person"'])
def test_put_of_anything_but_one_entity_is_refused(house: InProcessApi, body: bytes):
    answer = house.admin.put(f"{ENTITIES}/jane", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert names(house) == {}


def test_put_of_a_large_entity_is_parsed_in_a_child_and_says_the_same(
    house: InProcessApi, monkeypatch: pytest.MonkeyPatch
):
    entity = {"schema": "Person", "properties": {"name": [f"Jane {n}" for n in range(20_000)], "country": ["Atlantis"]}}
    monkeypatch.setattr(Exploder, "explode", lambda *_: pytest.fail("parsed in the API"))
    answer = house.admin.put(f"{ENTITIES}/jane", entity).json()
    assert (answer["statements"], answer["omitted"]["count"]) == (20_001, 1)


# Nested entities


def test_nested_entities_become_entities_of_their_own(house: InProcessApi):
    company = {"id": "acme", "schema": "Company", "properties": {"name": ["Acme"]}}
    address = {"id": "addr", "schema": "Address", "properties": {"full": ["1 Road"]}}
    owned = {"id": "own", "schema": "Ownership", "properties": {"asset": [company], "percentage": ["50"]}}
    person = {
        "id": "jane",
        "schema": "Person",
        "properties": {"name": ["Jane"], "addressEntity": [address], "ownershipOwner": [owned]},
    }
    answer = send(house, person).json()
    assert (answer["entities"], answer["nested"], answer["omitted"]["count"]) == (4, 3, 0)
    flat = [
        {"id": "jane", "schema": "Person", "properties": {"name": ["Jane"], "addressEntity": ["addr"]}},
        {
            "id": "own",
            "schema": "Ownership",
            "properties": {"asset": ["acme"], "percentage": ["50"], "owner": ["jane"]},
        },
        company,
        address,
    ]
    assert ids(house) == ftm_ids(flat, cleaned=False)


def test_a_reference_given_as_an_object_with_an_id_alone_is_a_reference(house: InProcessApi):
    person = {"id": "jane", "schema": "Person", "properties": {"addressEntity": [{"id": "addr"}]}}
    answer = send(house, person).json()
    assert (answer["entities"], answer["nested"]) == (1, 0)
    assert ids(house) == ftm_ids([person | {"properties": {"addressEntity": ["addr"]}}], cleaned=False)


def test_a_bad_nested_entity_is_named_and_deep_nesting_is_refused(house: InProcessApi):
    bad = {"id": "jane", "schema": "Person", "properties": {"addressEntity": [{"id": "a", "schema": "Banana"}]}}
    assert send(house, bad).json()["errors"][0]["field"] == "properties.addressEntity.schema"
    deep: dict[str, Any] = {"id": "p0", "schema": "Person"}
    for number in range(1, 20):
        deep = {"id": f"p{number}", "schema": "Person", "properties": {"parent": [deep]}}
    assert "nested more than 8 levels deep" in send(house, deep).json()["detail"]


# Referents


MERGED = {"id": "NK-1", "schema": "Person", "properties": {"name": ["Jane"]}, "referents": ["a", "b", "NK-1"]}


def test_every_referent_of_a_merged_entity_finds_it(house: InProcessApi):
    assert send(house, MERGED).json()["statements"] == 4
    for name in ("NK-1", "a", "b"):
        found = house.admin.get(f"{ENTITIES}/{name}").json()
        assert (found["id"], found["referents"], found["properties"]) == ("NK-1", ["a", "b"], {"name": ["Jane"]})


def test_what_is_exported_of_a_merged_entity_loads_as_the_same_entity(house: InProcessApi):
    send(house, MERGED)
    line = json.loads(house.admin.get(f"{ENTITIES}/stream").text)
    house.dataset("other")
    send(house, line, kind=FTM, path="/v1/datasets/other/entities")
    again = json.loads(house.admin.get("/v1/datasets/other/entities/stream").text)
    assert {key: again[key] for key in ("id", "referents", "properties")} == {
        key: line[key] for key in ("id", "referents", "properties")
    }


def test_referents_end_with_their_entity(house: InProcessApi):
    send(house, MERGED)
    assert house.admin.delete(f"{ENTITIES}/NK-1").json()["tombstones"] == 4
    assert stored(house) == []
    assert house.admin.get(f"{ENTITIES}/a").status_code == 404


@pytest.mark.parametrize("referents", ["a", [5], [""], ["x"] * 10_001])
def test_referents_that_are_no_ids_are_refused(house: InProcessApi, referents: Any):
    answer = send(house, MERGED | {"referents": referents})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "referents")


# Changes


def change(op: str, entity: str, /, **properties: Any) -> dict[str, Any]:
    return {"op": op, "entity": {"id": entity, "schema": "Person", "properties": properties}}


def names(house: InProcessApi) -> dict[str, list[str]]:
    found = [json.loads(line) for line in house.admin.get(f"{ENTITIES}/stream").text.splitlines()]
    return {one["id"]: one["properties"].get("name", []) for one in found}


@pytest.mark.parametrize("padding", [0, 3000], ids=["small", "large"])
def test_changes_are_upserts_and_deletes(house: InProcessApi, padding: int):
    send(house, *(change("ADD", name, name=[name])["entity"] for name in ("a", "b", "c")))
    padded = [change("ADD", f"p{number}", name=["x"]) for number in range(padding)]
    body = [
        change("MOD", "a", name=["A"]),
        {"op": "DEL", "entity": {"id": "b"}},
        change("ADD", "d", name=["d"]),
        *padded,
    ]
    answer = send(house, *body, kind=FTM).json()
    assert (answer["entities"], answer["deleted"]) == (2 + padding, 1)
    assert {name: found for name, found in names(house).items() if name[0] != "p"} == {
        "a": ["A"], "c": ["c"], "d": ["d"]
    }  # fmt: skip


def test_changes_of_tarn_itself_load(house: InProcessApi):
    send(house, MERGED, change("ADD", "b2", name=["x"])["entity"])
    answer = send(house, {"op": "DEL", "id": "b2", "entity": None}, {"op": "MOD", "id": "NK-1", "entity": MERGED})
    assert (answer.json()["deleted"], names(house)) == (1, {"NK-1": ["Jane"]})


@pytest.mark.parametrize("padding", [0, 3000], ids=["small", "large"])
def test_an_entity_merged_into_another_is_its_referent_in_either_order(house: InProcessApi, padding: int):
    send(house, *(change("ADD", name, name=[name])["entity"] for name in ("a", "b")))
    padded = [change("ADD", f"p{number}", name=["x"]) for number in range(padding)]
    merged = {"op": "ADD", "entity": MERGED}
    send(house, {"op": "DEL", "entity": {"id": "a"}}, merged, {"op": "DEL", "entity": {"id": "b"}}, *padded)
    assert house.admin.get(f"{ENTITIES}/a").json()["id"] == house.admin.get(f"{ENTITIES}/b").json()["id"] == "NK-1"
    send(house, {"op": "DEL", "entity": {"id": "NK-1"}}, *padded)
    assert house.admin.get(f"{ENTITIES}/a").status_code == 404
    assert house.admin.get(f"{ENTITIES}/NK-1").status_code == 404


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ({"op": "EAT", "entity": MERGED}, "op"),
        ({"op": 5, "entity": MERGED}, "op"),
        ({"op": "ADD", "entity": None}, "entity"),
        ({"op": "MOD"}, "entity"),
        ({"op": "DEL"}, "entity.id"),
        ({"op": "DEL", "entity": {"id": 5}}, "entity.id"),
        ({"op": "ADD", "entity": {"id": "a", "schema": "Banana"}}, "entity.schema"),
    ],
)
def test_a_bad_change_is_named_and_nothing_changes(house: InProcessApi, line: dict[str, Any], field: str):
    send(house, MERGED)
    answer = send(house, {"op": "DEL", "entity": {"id": "NK-1"}}, line)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)
    assert names(house) == {"NK-1": ["Jane"]}
