"""Every route of the OpenAPI document and everybody who may call it, with ids of others wherever one can stand."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from shutil import copyfile

import pytest

from tests.isolation.prepared_lake import HELD, LEVELS, MINE, OWN, THEIRS, PreparedLake, Resources, built
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
    FOREIGN_QUERY_PARAMETERS,
    IN_BODIES,
    IN_HEADERS,
    NOT_RESOURCES,
    ROUTES,
    Required,
    Route,
)

pytestmark = pytest.mark.xdist_group("isolation")

UNAUTHENTICATED = ("no key", "bad key", "expired key")
HOLDS = {
    "stranger": Required.KEY,
    **dict(zip(LEVELS, (Required.READ, Required.WRITE, Required.MAINTAIN, Required.ADMIN), strict=True)),
    "administrator": Required.LAKE,
}


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, sqlite: Path, kernel_process: ProcessPoolExecutor
) -> Iterator[PreparedLake]:
    folder = tmp_path_factory.mktemp("isolation")
    copyfile(sqlite, folder / "tarn.db")
    with built(folder, f"sqlite:///{folder}/tarn.db", kernel_process) as world:
        yield world


@pytest.fixture(scope="module")
def places(world: PreparedLake) -> dict[str, Operation]:
    return operations_in(world.house.nobody.get("/openapi.json").json())


def refusal(role: str, route: Route) -> int | None:
    """What a role is answered that may not use a route on `held`; None: it may."""
    if route.need is Required.NOTHING:
        return None
    if role in UNAUTHENTICATED:
        return 401
    held = HOLDS[role]
    if route.need is Required.LAKE:
        return None if held is Required.LAKE else 403
    if route.need is Required.KEY:
        return route.refused if route.on_held is not None and held < route.on_held else None
    return 404 if held is Required.KEY else 403 if held < route.need else None


def test_every_route_is_classified_and_every_line_has_its_route(places: dict[str, Operation]):
    assert sorted(places.keys() ^ ROUTES.keys()) == []


def test_every_place_for_an_id_of_another_is_one_of_a_route(places: dict[str, Operation]):
    for where, table in (("query", FOREIGN_QUERY_PARAMETERS), ("header", IN_HEADERS)):
        assert table.keys() - {name for place in places.values() for name in place.parameters[where]} == set()
    assert {name for name, _, _ in IN_BODIES} - places.keys() == set()


@pytest.mark.parametrize("name", ROUTES)
def test_route_is_closed_to_those_who_may_not_and_changes_nothing_for_them(
    world: PreparedLake, places: dict[str, Operation], name: str
):
    expected = {role: status for role in world.callers if (status := refusal(role, ROUTES[name])) is not None}
    asked = valid_request(ROUTES[name], places[name], Resources(world, world.owner, "owner", HELD))
    before = world.state()

    answers = {role: asked.by(world.callers[role]) for role in expected}

    assert {role: answer.status_code for role, answer in answers.items()} == expected
    assert [told for answer in answers.values() if (told := leaks_in(answer, asked, world.theirs))] == []
    assert world.state() == before


@pytest.mark.parametrize("name", ROUTES)
def test_route_is_open_to_those_who_may_and_tells_nothing_of_others(
    world: PreparedLake, places: dict[str, Operation], name: str
):
    place, theirs = places[name], world.state_of_theirs()
    told = {}
    for role in world.callers:
        if refusal(role, ROUTES[name]) is None:
            asked = valid_request(ROUTES[name], place, world.things(role, MINE if role == "stranger" else HELD))
            answer = asked.by(world.callers[role])
            assert answer.status_code in place.success, (role, answer.text)
            told[role] = leaks_in(answer, asked, world.theirs)

    told.pop("administrator", None)
    assert [words for words in told.values() if words] == []
    assert world.state_of_theirs() == theirs


def with_foreign_ids(world: PreparedLake, place: Operation, name: str) -> Iterator[tuple[UnsentRequest, set[int]]]:
    """Good requests of the stranger, but for one thing of the owner's in each; and what may be answered to it."""
    route, theirs = ROUTES[name], valid_request(ROUTES[name], place, world.theirs)

    def good() -> UnsentRequest:
        return valid_request(route, place, world.things("stranger", MINE))

    for parameter in place.parameters["path"]:
        if parameter not in NOT_RESOURCES:
            asked = good()
            path = {**asked.path, parameter: theirs.path[parameter]}
            yield replace(asked, path=path), {route.foreign.get(parameter, 404)}
    for parameter in FOREIGN_QUERY_PARAMETERS.keys() & place.parameters["query"]:
        for value, statuses in FOREIGN_QUERY_PARAMETERS[parameter]:
            asked = good()
            yield replace(asked, query={**asked.query, parameter: fill_in(value, world.theirs)}), statuses
    for parameter in IN_HEADERS.keys() & place.parameters["header"]:
        for value, statuses in IN_HEADERS[parameter]:
            asked = good()
            yield replace(asked, headers={**asked.headers, parameter: fill_in(value, world.theirs)}), statuses
    for operation, body, statuses in IN_BODIES:
        if operation == name:
            yield with_json(good(), body, world.theirs), statuses


@pytest.mark.parametrize("name", [name for name, route in ROUTES.items() if Required.KEY <= route.need < Required.LAKE])
def test_id_of_another_finds_nothing_wherever_it_stands(world: PreparedLake, places: dict[str, Operation], name: str):
    before = world.state_of_theirs()

    for asked, statuses in with_foreign_ids(world, places[name], name):
        world.forget_answers()
        answer = asked.by(world.callers["stranger"])
        assert answer.status_code in statuses, (asked, answer.text)
        assert leaks_in(answer, asked, world.theirs) == [], (asked, answer.text)

    assert world.state_of_theirs() == before


@pytest.mark.parametrize(
    "name", [name for name, route in ROUTES.items() if Required.READ <= route.need < Required.LAKE]
)
def test_dataset_of_others_is_answered_like_one_that_does_not_exist(
    world: PreparedLake, places: dict[str, Operation], name: str
):
    asked = replace(valid_request(ROUTES[name], places[name], world.theirs), headers={"X-Request-ID": "same"})
    path = {**asked.path, "dataset": THEIRS}
    missing = THEIRS.replace("t", "m", 1)

    hidden = replace(asked, path=path).by(world.callers["stranger"])
    nothing = replace(asked, path={**path, "dataset": missing}).by(world.callers["stranger"])

    assert hidden.status_code == nothing.status_code == 404
    assert hidden.text.replace(THEIRS, missing) == nothing.text
    assert hidden.headers == nothing.headers


@pytest.mark.parametrize("name", [name for name, route in ROUTES.items() if route.names_any(OWN)])
def test_thing_of_another_tenant_is_not_found_even_in_a_dataset_that_both_may_use(
    world: PreparedLake, places: dict[str, Operation], name: str
):
    asked = valid_request(ROUTES[name], places[name], Resources(world, world.owner, "owner", HELD))
    before = world.state()

    statuses = {role: asked.by(world.callers[role]).status_code for role in ("writer", "maintainer", "keeper")}

    assert statuses == {"writer": 404, "maintainer": 404, "keeper": 404}
    assert world.state() == before


def test_cursor_of_another_fits_no_list(world: PreparedLake, places: dict[str, Operation]):
    stranger, statuses = world.callers["stranger"], {}
    for name, place in places.items():
        if "cursor" in place.parameters["query"] and ROUTES[name].need < Required.LAKE:
            theirs = valid_request(ROUTES[name], place, world.theirs)
            one = replace(theirs, query={**theirs.query, "limit": "1"}).by(world.owner).json()["next"]
            asked = valid_request(ROUTES[name], place, world.things("stranger", MINE))
            query = {**asked.query, "limit": "1", "cursor": one or world.theirs["entity_cursor"]}
            statuses[name] = replace(asked, query=query).by(stranger).status_code

    assert statuses == dict.fromkeys(statuses, 422)
    assert len(statuses) > 10
