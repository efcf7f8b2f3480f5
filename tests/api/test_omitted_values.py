"""Values, properties, fields and nested entities that are left out of a stored body, and how that is reported."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from followthemoney.dataset import Dataset
from followthemoney.statement.entity import StatementEntity
from tarn.model.ftm.entity import Exploder

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
def _dataset(api: InProcessApi) -> None:
    api.dataset("test")


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def send(api: InProcessApi, *records: Any, kind: str = NDJSON, path: str = ENTITIES, **params: Any) -> Any:
    return api.admin.post(path, content=lines(*records), headers={"Content-Type": kind}, params=params)


def stored(api: InProcessApi) -> list[dict[str, Any]]:
    text = api.admin.get(f"{STATEMENTS}/stream").text
    return [json.loads(line) for line in text.splitlines()]


def ids(api: InProcessApi) -> set[str]:
    return {row["id"] for row in stored(api)}


def ftm_ids(entities: Iterable[dict[str, Any]], cleaned: bool) -> set[str]:
    dataset = Dataset({"name": "test", "title": "Test"})
    built = (StatementEntity(dataset, entity, cleaned=cleaned) for entity in entities)
    return {str(statement.id) for entity in built for statement in entity.statements}


def test_values_rejected_by_cleaning_are_left_out_and_listed(api: InProcessApi):
    response = send(api, {"id": "bob", "schema": "Person"}, UNCLEAN).json()
    assert response["omitted"]["count"] == 5
    assert response["omitted"]["by_property"] == LEFT_OUT
    first = response["omitted"]["first"]
    assert {(value["line"], value["property"], value["value"]) for value in first} == {
        (2, f"Person:{name}", value)
        for name, values in UNCLEAN["properties"].items()
        for value in values
        if value not in ("Jane Doe", "de")
    }
    assert first[0]["reason"] == "rejected by FollowTheMoney's cleaning of url"
    assert ids(api) == ftm_ids([{"id": "bob", "schema": "Person"}, UNCLEAN], cleaned=False)


@pytest.mark.parametrize(("kind", "params"), [(FTM, {}), (NDJSON, {"values": "as_is"})])
def test_uncleaned_values_have_the_ids_of_ftm(api: InProcessApi, kind: str, params: dict[str, str]):
    response = send(api, UNCLEAN, kind=kind, **params).json()
    assert (response["statements"], response["omitted"]["count"]) == (8, 0)
    assert ids(api) == ftm_ids([UNCLEAN], cleaned=True)


def test_ftm_files_are_cleaned_on_request(api: InProcessApi):
    assert send(api, UNCLEAN, kind=FTM, values="clean").json()["omitted"]["by_property"] == LEFT_OUT


def test_blank_values_are_left_out_and_not_listed(api: InProcessApi):
    response = send(api, {"id": "jane", "schema": "Person", "properties": {"name": ["", " ", None]}}).json()
    assert (response["omitted"]["count"], response["statements"]) == (0, 1)


@pytest.mark.parametrize("on_error", ["abort", "skip", "drop"])
def test_strict_refuses_a_value_that_would_be_left_out(api: InProcessApi, on_error: str):
    response = send(api, UNCLEAN, strict=True, on_error=on_error)
    assert response.status_code == 422
    (fault,) = response.json()["errors"]
    assert (fault["line"], fault["field"]) == (1, "Person:website")
    assert "https://hivos.org" in fault["reason"]
    assert stored(api) == []


def test_put_reports_omitted_values_and_strict_refuses_them(api: InProcessApi):
    response = api.admin.put(f"{ENTITIES}/jane", UNCLEAN | {"collection_id": 5}).json()
    assert response["omitted"]["by_property"] == LEFT_OUT
    assert response["ignored"] == {"collection_id": 1}
    assert api.admin.put(f"{ENTITIES}/jane", UNCLEAN, params={"strict": True}).status_code == 422
    assert api.admin.put(f"{ENTITIES}/jane", UNCLEAN, params={"values": "as_is"}).json()["statements"] == 8


def test_first_hundred_left_out_values_are_listed_and_all_are_counted(api: InProcessApi):
    entities = [{"id": f"p{n}", "schema": "Person", "properties": {"country": [f"Atlantis {n}"]}} for n in range(150)]
    omitted = send(api, *entities).json()["omitted"]
    assert (omitted["count"], omitted["by_property"], len(omitted["first"])) == (150, {"Person:country": 150}, 100)
    assert omitted["first"][99] | {"reason": ""} == {
        "line": 100, "property": "Person:country", "value": "Atlantis 99", "reason": ""
    }  # fmt: skip


def test_cleaned_statements_lose_rejected_values_and_report_them(api: InProcessApi):
    row = {"entity_id": "jane", "prop": "country", "schema": "Person"}
    rows = [row | {"value": "Germany"}, row | {"value": "Atlantis"}]
    response = send(api, *rows, path=STATEMENTS, values="clean").json()
    assert (response["statements"], response["rejected"], response["omitted"]["by_property"]) == (
        1,
        1,
        {"Person:country": 1},
    )
    assert [(one["value"], one["original_value"]) for one in stored(api)] == [("de", "Germany")]
    assert send(api, *rows, path=STATEMENTS, values="clean", strict=True).status_code == 422


def test_statements_are_not_cleaned_by_default(api: InProcessApi):
    row = {"entity_id": "jane", "prop": "country", "schema": "Person", "value": "Atlantis"}
    assert send(api, row, path=STATEMENTS).json()["statements"] == 1


# What cannot be stored


ODD = {
    "id": "jane",
    "schema": "Person",
    "properties": {"name": ["Jane"], "deathPlace": ["Nowhere", "Elsewhere"], "parent": ["jane"], "weight": [{"kg": 5}]},
    "first_seen": "yesterday",
}


def test_drop_keeps_the_valid_rest_of_an_entity(api: InProcessApi):
    response = send(api, ODD, on_error="drop").json()
    assert (response["entities"], response["rejected"], response["statements"]) == (1, 0, 2)
    assert response["omitted"]["by_property"] == {
        "Person:deathPlace": 2, "Person:parent": 1, "Person:weight": 1, "Person:first_seen": 1
    }  # fmt: skip
    reasons = {value["value"]: value["reason"] for value in response["omitted"]["first"]}
    assert reasons["Nowhere"] == "'deathPlace' is not a property of Person"
    assert reasons["jane"] == "an entity cannot refer to itself"


def test_skip_leaves_out_the_entity_and_abort_refuses_the_body(api: InProcessApi):
    bob = {"id": "bob", "schema": "Person", "properties": {"name": ["Bob"]}}
    skipped = send(api, ODD, bob, on_error="skip").json()
    assert (skipped["entities"], skipped["rejected"]) == (1, 1)
    refused = send(api, bob, ODD)
    assert (refused.status_code, refused.json()["errors"][0]["line"]) == (422, 2)


def test_drop_leaves_out_a_record_without_valid_content(api: InProcessApi):
    response = send(api, {"id": "x", "schema": "Banana"}, {"schema": "Person"}, on_error="drop").json()
    assert (response["entities"], response["rejected"]) == (0, 2)
    assert [fault["field"] for fault in response["errors"]] == ["schema", "id"]


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [("country", "x" * 300, 250), ("phone", "5" * 2000, 1000), ("name", "x" * 20_000, 16_384)],
)
def test_value_too_long_to_be_cleaned_is_refused_with_the_limit(api: InProcessApi, name: str, value: str, most: int):
    entity = {"id": "jane", "schema": "Person", "properties": {name: [value]}}
    refused = send(api, entity)
    assert refused.status_code == 422
    assert f"is {len(value)} characters long, at most {most}" in refused.json()["detail"]
    assert send(api, entity, on_error="drop").json()["omitted"]["count"] == 1
    assert send(api, entity, values="as_is").json()["statements"] == 2


def test_value_on_which_a_library_fails_is_rejected(api: InProcessApi):
    # Parentheses are parsed by recursion, which exceeds Python's limit.
    entity = {"id": "d", "schema": "Document", "properties": {"mimeType": ["(" * 250]}}
    assert send(api, entity).json()["omitted"]["count"] == 1


def test_unknown_fields_of_entities_are_ignored_and_counted(api: InProcessApi):
    jane = {"id": "jane", "schema": "Person", "collection_id": 7, "links": {}}
    response = send(api, jane, jane | {"id": "bob"}, {"id": "x", "schema": "Person"}).json()
    assert (response["entities"], response["ignored"]) == (3, {"collection_id": 2, "links": 2})


def test_unknown_fields_of_statements_are_ignored_and_counted(api: InProcessApi):
    row = {"entity_id": "jane", "prop": "name", "schema": "Person", "value": "Jane", "target": True}
    assert send(api, row, row | {"value": "J"}, path=STATEMENTS).json()["ignored"] == {"target": 2}
    body = b"entity_id,prop,schema,value,target,colour\njane,name,Person,J,t,red\n"
    csv = api.admin.post(STATEMENTS, content=body, headers={"Content-Type": "text/csv"}).json()
    assert (csv["statements"], csv["ignored"]) == (1, {"target": 1, "colour": 1})


@pytest.mark.parametrize("on_error", ["abort", "skip", "drop"])
def test_put_of_an_invalid_entity_changes_nothing(api: InProcessApi, on_error: str):
    api.admin.put(f"{ENTITIES}/jane", {"schema": "Person", "properties": {"name": ["Jane"]}})
    refused = api.admin.put(f"{ENTITIES}/jane", {"schema": "Banana"}, params={"on_error": on_error})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "schema")
    assert names(api) == {"jane": ["Jane"]}


@pytest.mark.parametrize("body", [b"[{}]", b"5", b'{"schema": "Person"} {"schema": "Person"}', b'{"schema": "Person"'])
def test_put_of_anything_but_one_entity_is_refused(api: InProcessApi, body: bytes):
    response = api.admin.put(f"{ENTITIES}/jane", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 422)
    assert names(api) == {}


def test_put_of_a_large_entity_is_parsed_in_a_child_with_the_same_response(
    api: InProcessApi, monkeypatch: pytest.MonkeyPatch
):
    entity = {"schema": "Person", "properties": {"name": [f"Jane {n}" for n in range(20_000)], "country": ["Atlantis"]}}
    monkeypatch.setattr(Exploder, "explode", lambda *_: pytest.fail("parsed in the API"))
    response = api.admin.put(f"{ENTITIES}/jane", entity).json()
    assert (response["statements"], response["omitted"]["count"]) == (20_001, 1)


# Nested entities


def test_nested_entities_become_entities_of_their_own(api: InProcessApi):
    company = {"id": "acme", "schema": "Company", "properties": {"name": ["Acme"]}}
    address = {"id": "addr", "schema": "Address", "properties": {"full": ["1 Road"]}}
    owned = {"id": "own", "schema": "Ownership", "properties": {"asset": [company], "percentage": ["50"]}}
    person = {
        "id": "jane",
        "schema": "Person",
        "properties": {"name": ["Jane"], "addressEntity": [address], "ownershipOwner": [owned]},
    }
    response = send(api, person).json()
    assert (response["entities"], response["nested"], response["omitted"]["count"]) == (4, 3, 0)
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
    assert ids(api) == ftm_ids(flat, cleaned=False)


def test_reference_given_as_an_object_with_only_an_id_is_a_reference(api: InProcessApi):
    person = {"id": "jane", "schema": "Person", "properties": {"addressEntity": [{"id": "addr"}]}}
    response = send(api, person).json()
    assert (response["entities"], response["nested"]) == (1, 0)
    assert ids(api) == ftm_ids([person | {"properties": {"addressEntity": ["addr"]}}], cleaned=False)


def test_bad_nested_entity_is_named_and_deep_nesting_is_refused(api: InProcessApi):
    bad = {"id": "jane", "schema": "Person", "properties": {"addressEntity": [{"id": "a", "schema": "Banana"}]}}
    assert send(api, bad).json()["errors"][0]["field"] == "properties.addressEntity.schema"
    deep: dict[str, Any] = {"id": "p0", "schema": "Person"}
    for number in range(1, 20):
        deep = {"id": f"p{number}", "schema": "Person", "properties": {"parent": [deep]}}
    assert "nested more than 8 levels deep" in send(api, deep).json()["detail"]


# Referents


MERGED = {"id": "NK-1", "schema": "Person", "properties": {"name": ["Jane"]}, "referents": ["a", "b", "NK-1"]}


def test_every_referent_of_a_merged_entity_finds_it(api: InProcessApi):
    assert send(api, MERGED).json()["statements"] == 4
    for name in ("NK-1", "a", "b"):
        entity = api.admin.get(f"{ENTITIES}/{name}").json()
        assert (entity["id"], entity["referents"], entity["properties"]) == ("NK-1", ["a", "b"], {"name": ["Jane"]})


def test_exported_merged_entity_loads_as_the_same_entity(api: InProcessApi):
    send(api, MERGED)
    line = json.loads(api.admin.get(f"{ENTITIES}/stream").text)
    api.dataset("other")
    send(api, line, kind=FTM, path="/v1/datasets/other/entities")
    again = json.loads(api.admin.get("/v1/datasets/other/entities/stream").text)
    assert {key: again[key] for key in ("id", "referents", "properties")} == {
        key: line[key] for key in ("id", "referents", "properties")
    }


def test_referents_are_deleted_with_their_entity(api: InProcessApi):
    send(api, MERGED)
    assert api.admin.delete(f"{ENTITIES}/NK-1").json()["tombstones"] == 4
    assert stored(api) == []
    assert api.admin.get(f"{ENTITIES}/a").status_code == 404


@pytest.mark.parametrize("referents", ["a", [5], [""], ["x"] * 10_001])
def test_referents_that_are_not_ids_are_refused(api: InProcessApi, referents: Any):
    response = send(api, MERGED | {"referents": referents})
    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "referents")


# Changes


def change(op: str, entity: str, /, **properties: Any) -> dict[str, Any]:
    return {"op": op, "entity": {"id": entity, "schema": "Person", "properties": properties}}


def names(api: InProcessApi) -> dict[str, list[str]]:
    entities = [json.loads(line) for line in api.admin.get(f"{ENTITIES}/stream").text.splitlines()]
    return {entity["id"]: entity["properties"].get("name", []) for entity in entities}


@pytest.mark.parametrize("padding", [0, 3000], ids=["small", "large"])
def test_changes_are_upserts_and_deletes(api: InProcessApi, padding: int):
    send(api, *(change("ADD", name, name=[name])["entity"] for name in ("a", "b", "c")))
    padded = [change("ADD", f"p{number}", name=["x"]) for number in range(padding)]
    body = [
        change("MOD", "a", name=["A"]),
        {"op": "DEL", "entity": {"id": "b"}},
        change("ADD", "d", name=["d"]),
        *padded,
    ]
    response = send(api, *body, kind=FTM).json()
    assert (response["entities"], response["deleted"]) == (2 + padding, 1)
    assert {name: values for name, values in names(api).items() if name[0] != "p"} == {
        "a": ["A"], "c": ["c"], "d": ["d"]
    }  # fmt: skip


def test_changes_exported_by_tarn_can_be_loaded(api: InProcessApi):
    send(api, MERGED, change("ADD", "b2", name=["x"])["entity"])
    response = send(api, {"op": "DEL", "id": "b2", "entity": None}, {"op": "MOD", "id": "NK-1", "entity": MERGED})
    assert (response.json()["deleted"], names(api)) == (1, {"NK-1": ["Jane"]})


@pytest.mark.parametrize("padding", [0, 3000], ids=["small", "large"])
def test_entity_merged_into_another_is_its_referent_in_either_order(api: InProcessApi, padding: int):
    send(api, *(change("ADD", name, name=[name])["entity"] for name in ("a", "b")))
    padded = [change("ADD", f"p{number}", name=["x"]) for number in range(padding)]
    merged = {"op": "ADD", "entity": MERGED}
    send(api, {"op": "DEL", "entity": {"id": "a"}}, merged, {"op": "DEL", "entity": {"id": "b"}}, *padded)
    assert api.admin.get(f"{ENTITIES}/a").json()["id"] == api.admin.get(f"{ENTITIES}/b").json()["id"] == "NK-1"
    send(api, {"op": "DEL", "entity": {"id": "NK-1"}}, *padded)
    assert api.admin.get(f"{ENTITIES}/a").status_code == 404
    assert api.admin.get(f"{ENTITIES}/NK-1").status_code == 404


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
def test_bad_change_is_named_and_nothing_is_stored(api: InProcessApi, line: dict[str, Any], field: str):
    send(api, MERGED)
    response = send(api, {"op": "DEL", "entity": {"id": "NK-1"}}, line)
    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, field)
    assert names(api) == {"NK-1": ["Jane"]}
