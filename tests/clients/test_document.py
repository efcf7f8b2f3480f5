"""The document that is checked in: it is the code's, and breaks nobody who was not told."""

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


def test_document_is_the_one_that_the_code_makes():
    assert DOCUMENT.read_text() == document_text(), "clients/openapi.json is stale: make openapi"


def test_what_breaks_clients_of_the_last_release_is_declared_and_nothing_else_is(document: Json):
    broken = released().broken_by(surface(document))

    assert broken == declared(), "what differs belongs into clients/breaking.txt with its reason, or is a mistake"


def test_surface_of_the_release_reads_as_it_was_written(document: Json):
    found = surface(document)

    assert Surface.parse(found.text()) == found
    assert len(found.promises) > len(found.demands) > 100


def _lose_route(document: Json) -> None:
    del document["paths"][DATASET]


def _lose_method(document: Json) -> None:
    del document["paths"][DATASET]["patch"]


def _rename_operation(document: Json) -> None:
    document["paths"][DATASET]["get"]["operationId"] = "show_dataset"


def _lose_parameter(document: Json) -> None:
    parameters = document["paths"]["/v1/jobs"]["get"]["parameters"]
    parameters[:] = [parameter for parameter in parameters if parameter["name"] != "limit"]


def _need_parameter(document: Json) -> None:
    new = {"name": "tenant", "in": "query", "required": True, "schema": {"type": "string"}}
    document["paths"]["/v1/jobs"]["get"]["parameters"].append(new)


def _lose_status(document: Json) -> None:
    del document["paths"][DATASET]["get"]["responses"]["404"]


def _lose_property(document: Json) -> None:
    del document["components"]["schemas"]["Job"]["properties"]["state"]


def _lose_property_of_a_problem(document: Json) -> None:
    del document["components"]["schemas"]["DatasetNotFoundProblem"]["properties"]["detail"]


def _lose_certainty(document: Json) -> None:
    document["components"]["schemas"]["Job"]["required"].remove("state")


def _give_null(document: Json) -> None:
    properties = document["components"]["schemas"]["Written"]["properties"]
    properties["entities"] = {"anyOf": [properties["entities"], {"type": "null"}]}


def _change_type(document: Json) -> None:
    document["components"]["schemas"]["Written"]["properties"]["entities"]["type"] = "string"


def _need_property(document: Json) -> None:
    document["components"]["schemas"]["NewDataset"]["required"].append("title")


def _lose_value(document: Json) -> None:
    document["components"]["schemas"]["Op"]["enum"].remove("ilike")


def _lose_media_type(document: Json) -> None:
    del document["paths"][f"{DATASET}/statements"]["post"]["requestBody"]["content"]["text/csv"]


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        (_lose_route, f"GET {DATASET} is get_dataset"),
        (_lose_method, f"PATCH {DATASET} answers 200"),
        (_rename_operation, f"GET {DATASET} is get_dataset"),
        (_lose_parameter, "GET /v1/jobs takes query limit: integer"),
        (_need_parameter, "GET /v1/jobs needs query tenant"),
        (_lose_status, f"GET {DATASET} answers 404"),
        (_lose_property, "Job has state: JobState"),
        (_lose_property_of_a_problem, "DatasetNotFoundProblem has detail: string"),
        (_lose_certainty, "Job always has state"),
        (_give_null, "Written has entities: may be null"),
        (_change_type, "Written has entities: integer"),
        (_need_property, "NewDataset needs title"),
        (_lose_value, "Op takes 'ilike'"),
        (_lose_media_type, f"POST {DATASET}/statements takes text/csv: string (binary)"),
    ],
)
def test_change_that_breaks_clients_is_found(document: Json, change: Callable[[Json], None], broken: str):
    later = copy.deepcopy(document)
    change(later)

    assert broken in surface(document).broken_by(surface(later))


def test_what_is_added_breaks_nobody(document: Json):
    later = copy.deepcopy(document)
    later["paths"]["/v1/new"] = copy.deepcopy(later["paths"]["/v1/whoami"])
    jobs = later["paths"]["/v1/jobs"]["get"]
    jobs["parameters"].append({"name": "tenant", "in": "query", "schema": {"type": "string"}})
    jobs["responses"]["418"] = {"description": "a teapot"}
    schemata = later["components"]["schemas"]
    schemata["Job"]["properties"]["weight"] = {"type": "integer"}
    schemata["NewDataset"]["properties"]["weight"] = {"type": "integer"}
    schemata["Op"]["enum"].append("fuzzy")

    assert surface(document).broken_by(surface(later)) == set()
