"""Every route of the OpenAPI document, called by every role, and with ids of another tenant in every possible place."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from shutil import copyfile

import pytest

from tests.isolation.prepared_lake import (
    LEVELS,
    OWNED,
    SHARED,
    TENANT_RESOURCES,
    UNRELATED,
    PreparedLake,
    Resources,
    prepare_lake,
)
from tests.isolation.route_requests import (
    Operation,
    UnsentRequest,
    fill_in,
    leaks_in,
    operations_in,
    valid_request,
    with_json,
)
from tests.isolation.routes import (
    FOREIGN_BODIES,
    FOREIGN_HEADERS,
    FOREIGN_QUERY_PARAMETERS,
    NOT_RESOURCES,
    ROUTES,
    Required,
    Route,
)

pytestmark = pytest.mark.xdist_group("isolation")

UNAUTHENTICATED = ("no key", "bad key", "expired key")
ROLE_LEVELS = {
    "unrelated": Required.KEY,
    **dict(zip(LEVELS, (Required.READ, Required.WRITE, Required.MAINTAIN, Required.ADMIN), strict=True)),
    "administrator": Required.LAKE,
}


@pytest.fixture(scope="module")
def lake(
    tmp_path_factory: pytest.TempPathFactory, sqlite: Path, kernel_process: ProcessPoolExecutor
) -> Iterator[PreparedLake]:
    folder = tmp_path_factory.mktemp("isolation")
    copyfile(sqlite, folder / "tarn.db")
    with prepare_lake(folder, f"sqlite:///{folder}/tarn.db", kernel_process) as lake:
        yield lake


@pytest.fixture(scope="module")
def operations(lake: PreparedLake) -> dict[str, Operation]:
    return operations_in(lake.api.anonymous.get("/openapi.json").json())


def refusal(role: str, route: Route) -> int | None:
    """Return the status of the response to a role that may not use a route on `shared`, or None if it may."""
    if route.required is Required.NOTHING:
        return None
    if role in UNAUTHENTICATED:
        return 401
    level = ROLE_LEVELS[role]
    if route.required is Required.LAKE:
        return None if level is Required.LAKE else 403
    if route.required is Required.KEY:
        return (
            route.refused_status if route.required_elsewhere is not None and level < route.required_elsewhere else None
        )
    return 404 if level is Required.KEY else 403 if level < route.required else None


def test_routes_of_the_openapi_document_and_of_the_table_are_the_same(operations: dict[str, Operation]):
    assert sorted(operations.keys() ^ ROUTES.keys()) == []


def test_every_foreign_parameter_and_body_belongs_to_a_route(operations: dict[str, Operation]):
    for location, table in (("query", FOREIGN_QUERY_PARAMETERS), ("header", FOREIGN_HEADERS)):
        assert (
            table.keys() - {name for operation in operations.values() for name in operation.parameters[location]}
            == set()
        )
    assert {name for name, _, _ in FOREIGN_BODIES} - operations.keys() == set()


@pytest.mark.parametrize("name", ROUTES)
def test_route_refuses_callers_below_its_level_and_changes_nothing(
    lake: PreparedLake, operations: dict[str, Operation], name: str
):
    expected = {role: status for role in lake.callers if (status := refusal(role, ROUTES[name])) is not None}
    request = valid_request(ROUTES[name], operations[name], Resources(lake, lake.owner, "owner", SHARED))
    before = lake.state()

    responses = {role: request.send(lake.callers[role]) for role in expected}

    assert {role: response.status_code for role, response in responses.items()} == expected
    assert [
        leaked for response in responses.values() if (leaked := leaks_in(response, request, lake.owner_resources))
    ] == []
    assert lake.state() == before


@pytest.mark.parametrize("name", ROUTES)
def test_route_serves_callers_of_its_level_and_reveals_nothing_of_other_tenants(
    lake: PreparedLake, operations: dict[str, Operation], name: str
):
    operation, owner_state = operations[name], lake.owner_state()
    leaked = {}
    for role in lake.callers:
        if refusal(role, ROUTES[name]) is None:
            request = valid_request(
                ROUTES[name], operation, lake.resources(role, UNRELATED if role == "unrelated" else SHARED)
            )
            response = request.send(lake.callers[role])
            assert response.status_code in operation.success, (role, response.text)
            leaked[role] = leaks_in(response, request, lake.owner_resources)

    leaked.pop("administrator", None)
    assert [strings for strings in leaked.values() if strings] == []
    assert lake.owner_state() == owner_state


def with_foreign_ids(lake: PreparedLake, operation: Operation, name: str) -> Iterator[tuple[UnsentRequest, set[int]]]:
    """Yield valid requests of the unrelated tenant with one of the owner's ids in each, and the allowed statuses."""
    route, owner_request = ROUTES[name], valid_request(ROUTES[name], operation, lake.owner_resources)

    def valid() -> UnsentRequest:
        return valid_request(route, operation, lake.resources("unrelated", UNRELATED))

    for parameter in operation.parameters["path"]:
        if parameter not in NOT_RESOURCES:
            request = valid()
            path = {**request.path, parameter: owner_request.path[parameter]}
            yield replace(request, path=path), {route.foreign_status.get(parameter, 404)}
    for parameter in FOREIGN_QUERY_PARAMETERS.keys() & operation.parameters["query"]:
        for value, statuses in FOREIGN_QUERY_PARAMETERS[parameter]:
            request = valid()
            yield replace(request, query={**request.query, parameter: fill_in(value, lake.owner_resources)}), statuses
    for parameter in FOREIGN_HEADERS.keys() & operation.parameters["header"]:
        for value, statuses in FOREIGN_HEADERS[parameter]:
            request = valid()
            yield (
                replace(request, headers={**request.headers, parameter: fill_in(value, lake.owner_resources)}),
                statuses,
            )
    for name_of_route, body, statuses in FOREIGN_BODIES:
        if name_of_route == name:
            yield with_json(valid(), body, lake.owner_resources), statuses


@pytest.mark.parametrize(
    "name", [name for name, route in ROUTES.items() if Required.KEY <= route.required < Required.LAKE]
)
def test_id_of_another_tenant_is_not_found_in_any_part_of_a_request(
    lake: PreparedLake, operations: dict[str, Operation], name: str
):
    before = lake.owner_state()

    for request, statuses in with_foreign_ids(lake, operations[name], name):
        lake.delete_idempotency_keys()
        response = request.send(lake.callers["unrelated"])
        assert response.status_code in statuses, (request, response.text)
        assert leaks_in(response, request, lake.owner_resources) == [], (request, response.text)

    assert lake.owner_state() == before


@pytest.mark.parametrize(
    "name", [name for name, route in ROUTES.items() if Required.READ <= route.required < Required.LAKE]
)
def test_hidden_dataset_gets_the_response_of_a_missing_one(
    lake: PreparedLake, operations: dict[str, Operation], name: str
):
    request = replace(
        valid_request(ROUTES[name], operations[name], lake.owner_resources), headers={"X-Request-ID": "same"}
    )
    path = {**request.path, "dataset": OWNED}
    missing = OWNED.replace("o", "m", 1)

    hidden = replace(request, path=path).send(lake.callers["unrelated"])
    nothing = replace(request, path={**path, "dataset": missing}).send(lake.callers["unrelated"])

    assert hidden.status_code == nothing.status_code == 404
    assert hidden.text.replace(OWNED, missing) == nothing.text
    assert hidden.headers == nothing.headers


@pytest.mark.parametrize("name", [name for name, route in ROUTES.items() if route.uses_any(TENANT_RESOURCES)])
def test_resource_of_another_tenant_is_not_found_even_in_a_shared_dataset(
    lake: PreparedLake, operations: dict[str, Operation], name: str
):
    request = valid_request(ROUTES[name], operations[name], Resources(lake, lake.owner, "owner", SHARED))
    before = lake.state()

    statuses = {role: request.send(lake.callers[role]).status_code for role in ("writer", "maintainer", "manager")}

    assert statuses == {"writer": 404, "maintainer": 404, "manager": 404}
    assert lake.state() == before


def test_cursor_of_another_tenant_is_refused_by_every_list(lake: PreparedLake, operations: dict[str, Operation]):
    unrelated, statuses = lake.callers["unrelated"], {}
    for name, operation in operations.items():
        if "cursor" in operation.parameters["query"] and ROUTES[name].required < Required.LAKE:
            owner_request = valid_request(ROUTES[name], operation, lake.owner_resources)
            cursor = replace(owner_request, query={**owner_request.query, "limit": "1"}).send(lake.owner).json()["next"]
            request = valid_request(ROUTES[name], operation, lake.resources("unrelated", UNRELATED))
            query = {**request.query, "limit": "1", "cursor": cursor or lake.owner_resources["entity_cursor"]}
            statuses[name] = replace(request, query=query).send(unrelated).status_code

    assert statuses == dict.fromkeys(statuses, 422)
    assert len(statuses) > 10
