"""Validation of queries: each error has its location, and bodies of any depth or size are refused quickly."""

import json
from typing import Any

import orjson
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from followthemoney.types import registry
from pydantic import TypeAdapter, ValidationError
from tarn.api.http import problems
from tarn.model.ftm.query import (
    OPS,
    And,
    Comparison,
    CountDistinct,
    EntityAggregate,
    EntityQuery,
    Facet,
    Metric,
    Not,
    Op,
    Or,
    metric_name,
)
from tarn.model.ftm.query_fields import FieldName

NAME: dict[str, Any] = {"field": "prop:name", "op": "eq", "value": "Ann"}


def errors(model: type[EntityQuery] | type[EntityAggregate], body: dict[str, Any]) -> dict[str, str]:
    """Return the location of each error of a body, and its reason."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return {".".join(map(str, fault["loc"])): fault["msg"] for fault in caught.value.errors()}


def refused(node: Any) -> dict[str, str]:
    return errors(EntityQuery, {"where": node})


def nested(depth: int) -> dict[str, Any]:
    node = NAME
    for level in range(depth - 1):
        node = {"not": node} if level % 2 else {"and": [node]}
    return node


def test_query_is_parsed_into_nodes_and_serialised_unchanged() -> None:
    body = {"where": {"and": [NAME, {"or": [NAME, {"not": NAME}]}]}, "sort": ["-prop:date"], "limit": 5, "cursor": "x"}
    query = EntityQuery.model_validate(body)
    leaf = Comparison(field=FieldName("prop:name"), op=Op.EQ, value="Ann")
    assert query.where == And(and_=[leaf, Or(or_=[leaf, Not(not_=leaf)])])
    assert query.model_dump(mode="json", by_alias=True) == body


def test_empty_query_has_its_defaults() -> None:
    query = EntityQuery.model_validate({})
    assert (query.where, query.sort, query.limit, query.cursor) == (None, [], 100, None)


@pytest.mark.parametrize("name", sorted({*registry.groups, *(kind.name for kind in registry.types)}))
def test_types_are_accepted_by_group_and_by_name(name: str) -> None:
    assert EntityQuery.model_validate({"where": {"field": f"type:{name}", "op": "null", "value": False}})


@pytest.mark.parametrize(
    ("change", "location", "reason"),
    [
        ({"field": "nix"}, "field", "must be id, canonical_id"),
        ({"field": "prop:"}, "field", "must be id, canonical_id"),
        ({"field": "prop:nix"}, "field", "no schema of FollowTheMoney has values of a property 'nix'"),
        ({"field": "prop:id"}, "field", "no schema"),
        ({"field": "prop:documentedBy"}, "field", "no schema"),
        ({"field": "prop:name'; --"}, "field", "must be id"),
        ({"field": "type:nix"}, "field", "has no type or group of types 'nix'"),
        ({"field": "x" * 200}, "field", "200 characters long"),
        ({"field": 7}, "field", "must be a string"),
        ({"op": "equals"}, "op", "Input should be 'eq', 'ne'"),
        ({"op": None}, "op", "Input should be 'eq', 'ne'"),
        ({"field": "schemata", "op": "gt"}, "op", "gt is not supported by schemata, which supports eq, ne, in, not_in"),
        ({"field": "schema", "op": "like"}, "op", "like is not supported by schema"),
        ({"field": "first_seen", "op": "like"}, "op", "like is not supported by first_seen"),
        ({"field": "origin", "op": "lt"}, "op", "lt is not supported by origin"),
        ({"field": "id", "op": "null", "value": True}, "op", "null is not supported by id"),
        ({"value": 7}, "value", "must be a string"),
        ({"value": None}, "value", "must be a string"),
        ({"value": ["x"]}, "value", "must be a string"),
        ({"value": True}, "value", "must be a string"),
        ({"value": "a\x00"}, "value", "NUL"),
        ({"value": "\ud800"}, "value", "surrogate"),
        ({"value": "x" * 10_001}, "value", "10001 characters long, at most 10000"),
        ({"op": "in"}, "value", "must be a list of strings for in"),
        ({"op": "not_in", "value": []}, "value", "one value or more"),
        ({"op": "in", "value": ["x"] * 1001}, "value", "has 1001 values, at most 1000"),
        ({"op": "in", "value": ["x"] * 100_000}, "value", "has 100000 values, at most 1000"),
        ({"op": "in", "value": ["x", 7]}, "value.1", "must be a string"),
        ({"op": "in", "value": ["x", "y", "\x00"]}, "value.2", "NUL"),
        ({"op": "null", "value": "true"}, "value", "must be true or false"),
        ({"op": "null", "value": 1}, "value", "must be true or false"),
        ({"field": "schema", "value": "Ghost"}, "value", "'Ghost' is not a schema"),
        ({"field": "schemata", "op": "in", "value": ["Person", "person"]}, "value.1", "'person' is not a schema"),
        ({"field": "first_seen", "value": "yesterday"}, "value", "ISO 8601"),
        ({"field": "last_seen", "op": "in", "value": ["2024", "2024-01-01"]}, "value.0", "ISO 8601"),
        ({"field": "first_seen", "value": "0001-01-01T00:00:00+05:00"}, "value", "years 1 to 9999"),
        ({"field": "prop:amount", "op": "gt", "value": "much"}, "value", "must be a number"),
        ({"field": "type:number", "op": "lte", "value": "9" * 400}, "value", "must be a number"),
        ({"op": "like", "value": "x\\"}, "value", "single backslash"),
        ({"op": "ilike", "value": "x" * 1001}, "value", "at most 1000"),
        ({"more": 1}, "more", "Extra inputs"),
    ],
)
def test_invalid_comparison_is_refused_with_the_location_of_the_error(
    change: dict[str, Any], location: str, reason: str
) -> None:
    reasons = refused({"or": [NAME, NAME | change]})
    assert list(reasons) == [f"where.or.1.{location}"]
    assert reason in reasons[f"where.or.1.{location}"]


@pytest.mark.parametrize("part", ["field", "op", "value"])
def test_comparison_without_a_required_field_is_refused(part: str) -> None:
    node = {name: value for name, value in NAME.items() if name != part}
    assert refused(node) == {f"where.{part}": "Field required"}


@pytest.mark.parametrize(
    ("node", "location"),
    [
        ([], "where"),
        ("name", "where"),
        (7, "where"),
        ({"and": []}, "where.and"),
        ({"or": []}, "where.or"),
        ({"and": NAME}, "where.and"),
        ({"or": None}, "where.or"),
        ({"not": [NAME]}, "where.not"),
        ({"not": None}, "where.not"),
        ({"and": [NAME, None]}, "where.and.1"),
        ({"and": [NAME], "or": [NAME]}, "where.or"),
        ({"not": {"or": [NAME], "field": "id"}}, "where.not.field"),
    ],
)
def test_node_of_unknown_form_is_refused_with_its_location(node: Any, location: str) -> None:
    assert list(refused(node)) == [location]


def test_all_errors_are_reported_in_the_order_of_the_body() -> None:
    node = {"and": [NAME | {"value": 1}, {"not": NAME | {"op": "x"}}, NAME | {"field": "x"}]}
    assert list(refused(node)) == ["where.and.0.value", "where.and.1.not.op", "where.and.2.field"]


def test_deepest_and_widest_query_is_accepted() -> None:
    assert EntityQuery.model_validate({"where": nested(32)})
    assert EntityQuery.model_validate({"where": {"and": [{"or": [NAME] * 100}, {"or": [NAME] * 100}]}})
    lists = [NAME | {"op": "in", "value": ["x"] * 1000}] * 10
    assert EntityQuery.model_validate({"where": {"and": lists}})


@pytest.mark.parametrize("depth", [33, 200, 1000, 100_000])
def test_query_above_the_maximum_depth_is_refused_at_any_depth(depth: int) -> None:
    assert refused(nested(depth)) == {"where": "is nested more than 32 levels deep"}


@pytest.mark.parametrize(
    "node",
    [
        {"and": [NAME] * 201},
        {"and": [NAME] * 1_000_000},
        {"or": [{"and": [NAME] * 101}, {"and": [NAME] * 100}]},
        {"or": [{"and": [NAME] * 200}] * 200},
    ],
)
def test_query_with_too_many_comparisons_is_refused_in_any_nesting(node: dict[str, Any]) -> None:
    assert refused(node) == {"where": "has more than 200 comparisons"}


def test_query_with_too_many_values_in_total_is_refused() -> None:
    lists = [NAME | {"op": "in", "value": ["x"] * 1000}] * 10
    assert refused({"and": [*lists, NAME | {"op": "in", "value": ["x"]}]}) == {
        "where": "has more than 10000 values in its lists"
    }


@pytest.mark.parametrize(
    ("body", "location"),
    [
        ({"sort": ["caption"]}, "sort.0"),
        ({"sort": ["id", "prop:nix"]}, "sort.1"),
        ({"sort": ["type:names"]}, "sort.0"),
        ({"sort": ["--id"]}, "sort.0"),
        ({"sort": ["id", "id"]}, "sort.1"),
        ({"sort": ["id", "schema", "first_seen", "last_seen"]}, "sort"),
        ({"sort": "id"}, "sort"),
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"cursor": 7}, "cursor"),
        ({"cursor": "x" * 10_001}, "cursor"),
        ({"offset": 3}, "offset"),
    ],
)
def test_other_errors_of_a_query_are_refused_with_their_location(body: dict[str, Any], location: str) -> None:
    assert list(errors(EntityQuery, body)) == [location]


@pytest.mark.parametrize(
    ("change", "location"),
    [
        ({"metrics": []}, "metrics"),
        ({"metrics": ["sum"]}, "metrics.0"),
        ({"metrics": ["count", {"min": "prop:nix"}]}, "metrics.1.min"),
        ({"metrics": [{"count_distinct": 7}]}, "metrics.0.count_distinct"),
        ({"metrics": [{"min": "id", "max": "id"}]}, "metrics.0"),
        ({"metrics": [{"avg": "prop:amount"}]}, "metrics.0"),
        ({"metrics": ["count", "count"]}, "metrics.1"),
        ({"metrics": [{"min": f"prop:{name}"} for name in ("name", "country")] * 6}, "metrics"),
        ({"group_by": ["caption"]}, "group_by.0"),
        ({"group_by": ["id", "schema", "id"]}, "group_by.2"),
        ({"group_by": ["id", "schema", "origin", "prop:name"]}, "group_by"),
        ({"limit": 1001}, "limit"),
        ({"sort": []}, "sort"),
        ({"where": NAME | {"op": "x"}}, "where.op"),
    ],
)
def test_invalid_aggregate_is_refused_with_the_location_of_the_error(change: dict[str, Any], location: str) -> None:
    assert list(errors(EntityAggregate, {"metrics": ["count"]} | change)) == [location]


def test_default_name_of_a_metric_is_its_operation_and_field() -> None:
    read: TypeAdapter[list[Metric]] = TypeAdapter(list[Metric])
    metrics = read.validate_python(["count", {"count_distinct": "prop:country"}, {"min": "id"}, {"max": "last_seen"}])
    assert isinstance(metrics[1], CountDistinct)
    assert [*map(metric_name, metrics)] == ["count", "count_distinct:prop:country", "min:id", "max:last_seen"]


def test_every_kind_of_field_has_comparisons() -> None:
    kinds = {FieldName(name).kind for name in ("id", "canonical_id", "schema", "schemata", "origin", "first_seen",
             "last_seen", "prop:name", "type:names")}  # fmt: skip
    assert OPS.keys() == kinds
    assert set().union(*OPS.values()) == set(Op)


@pytest.fixture(scope="module")
def client() -> TestClient:
    """Provide a client of two routes that take the bodies, with errors as in the API."""
    app = FastAPI()

    @app.post("/query")
    def query(body: EntityQuery) -> bool:
        return bool(body)

    @app.post("/aggregate")
    def aggregate(body: EntityAggregate) -> list[Facet]:
        return []

    problems.install(app, app.routes)
    return TestClient(app, raise_server_exceptions=False)


def sent(client: TestClient, text: str) -> tuple[int, str]:
    response = client.post("/query", content=text, headers={"Content-Type": "application/json"})
    return response.status_code, response.json()["detail"]


@pytest.mark.parametrize("depth", [33, 200, 500, 800])
def test_deep_body_is_a_problem_with_the_reason(client: TestClient, depth: int) -> None:
    text = '{"where": ' + '{"not":' * depth + json.dumps(NAME) + "}" * depth + "}"
    assert sent(client, text) == (422, "where: is nested more than 32 levels deep")


@pytest.mark.parametrize("depth", [950, 1000, 1020, 10_000, 100_000])
def test_body_too_deep_for_the_parser_is_a_client_error(client: TestClient, depth: int) -> None:
    text = '{"where": ' + '{"not":' * depth + json.dumps(NAME) + "}" * depth + "}"
    status, _ = sent(client, text)
    assert status in (400, 422)


def test_problem_has_the_location_of_the_error(client: TestClient) -> None:
    body = {"where": {"and": [NAME, NAME | {"op": "in", "value": ["x", 1]}]}}
    response = client.post("/query", json=body)
    assert response.json()["errors"] == [{"line": None, "field": "where.and.1.value.1", "reason": "must be a string"}]


def test_openapi_document_describes_nodes_by_references(client: TestClient) -> None:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    node = [{"$ref": f"#/components/schemas/{name}"} for name in ("And", "Or", "Not", "Comparison")]
    assert schemas["EntityQuery"]["properties"]["where"]["anyOf"] == [*node, {"type": "null"}]
    assert schemas["And"]["properties"]["and"]["items"] == {"anyOf": node}
    assert schemas["Not"]["properties"]["not"]["anyOf"] == node
    assert schemas["Comparison"]["required"] == ["field", "op", "value"]
    assert b'"additionalProperties":true' not in orjson.dumps(schemas)
