"""The OpenAPI document in the repository: it equals the code's, and its breaking changes are declared."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from clients.document import DOCUMENT, declared, document_text, released
from clients.surface import Surface, surface

Json = dict[str, Any]
DATASET = "/v1/datasets/{dataset}"


@pytest.fixture(scope="module")
def document() -> Json:
    return json.loads(DOCUMENT.read_text())


def test_checked_in_document_equals_the_generated_one():
    assert DOCUMENT.read_text() == document_text(), "clients/openapi.json is stale: run `make openapi`"


def test_declared_breaking_changes_are_those_since_the_last_release(document: Json):
    broken = released().broken_by(surface(document))

    assert broken == declared(), (
        "declare intended differences in clients/breaking.txt with their reasons, and fix the others"
    )


def test_surface_is_unchanged_after_it_is_written_and_parsed(document: Json):
    current = surface(document)

    assert Surface.parse(current.text()) == current
    assert len(current.promises) > len(current.demands) > 100


def _remove_route(document: Json) -> None:
    del document["paths"][DATASET]


def _remove_method(document: Json) -> None:
    del document["paths"][DATASET]["patch"]


def _rename_operation(document: Json) -> None:
    document["paths"][DATASET]["get"]["operationId"] = "show_dataset"


def _remove_parameter(document: Json) -> None:
    parameters = document["paths"]["/v1/jobs"]["get"]["parameters"]
    parameters[:] = [parameter for parameter in parameters if parameter["name"] != "limit"]


def _add_required_parameter(document: Json) -> None:
    new = {"name": "tenant", "in": "query", "required": True, "schema": {"type": "string"}}
    document["paths"]["/v1/jobs"]["get"]["parameters"].append(new)


def _remove_status(document: Json) -> None:
    del document["paths"][DATASET]["get"]["responses"]["404"]


def _remove_property(document: Json) -> None:
    del document["components"]["schemas"]["Job"]["properties"]["state"]


def _remove_property_of_a_problem(document: Json) -> None:
    del document["components"]["schemas"]["DatasetNotFoundProblem"]["properties"]["detail"]


def _make_property_optional(document: Json) -> None:
    document["components"]["schemas"]["Job"]["required"].remove("state")


def _allow_null(document: Json) -> None:
    properties = document["components"]["schemas"]["Written"]["properties"]
    properties["entities"] = {"anyOf": [properties["entities"], {"type": "null"}]}


def _change_type(document: Json) -> None:
    document["components"]["schemas"]["Written"]["properties"]["entities"]["type"] = "string"


def _require_property(document: Json) -> None:
    document["components"]["schemas"]["NewDataset"]["required"].append("title")


def _remove_enum_value(document: Json) -> None:
    document["components"]["schemas"]["Op"]["enum"].remove("ilike")


def _remove_media_type(document: Json) -> None:
    del document["paths"][f"{DATASET}/statements"]["post"]["requestBody"]["content"]["text/csv"]


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        (_remove_route, f"GET {DATASET} is get_dataset"),
        (_remove_method, f"PATCH {DATASET} answers 200"),
        (_rename_operation, f"GET {DATASET} is get_dataset"),
        (_remove_parameter, "GET /v1/jobs takes query limit: integer"),
        (_add_required_parameter, "GET /v1/jobs needs query tenant"),
        (_remove_status, f"GET {DATASET} answers 404"),
        (_remove_property, "Job has state: JobState"),
        (_remove_property_of_a_problem, "DatasetNotFoundProblem has detail: string"),
        (_make_property_optional, "Job always has state"),
        (_allow_null, "Written has entities: may be null"),
        (_change_type, "Written has entities: integer"),
        (_require_property, "NewDataset needs title"),
        (_remove_enum_value, "Op takes 'ilike'"),
        (_remove_media_type, f"POST {DATASET}/statements takes text/csv: string (binary)"),
    ],
)
def test_breaking_change_is_detected(document: Json, change: Callable[[Json], None], broken: str):
    changed = copy.deepcopy(document)
    change(changed)

    assert broken in surface(document).broken_by(surface(changed))


def test_addition_is_not_a_breaking_change(document: Json):
    changed = copy.deepcopy(document)
    changed["paths"]["/v1/new"] = copy.deepcopy(changed["paths"]["/v1/whoami"])
    jobs = changed["paths"]["/v1/jobs"]["get"]
    jobs["parameters"].append({"name": "tenant", "in": "query", "schema": {"type": "string"}})
    jobs["responses"]["418"] = {"description": "a teapot"}
    schemata = changed["components"]["schemas"]
    schemata["Job"]["properties"]["weight"] = {"type": "integer"}
    schemata["NewDataset"]["properties"]["weight"] = {"type": "integer"}
    schemata["Op"]["enum"].append("fuzzy")

    assert surface(document).broken_by(surface(changed)) == set()
