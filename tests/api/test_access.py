"""Who may do what, and who may not even know."""

import pytest
from fastapi import APIRouter
from tarn.api.application import ROUTERS
from tarn.api.http import route_access as access
from tarn.api.http.routing import GuardedRoute
from tarn.errors import StartRefused

from tests.in_process_api import Caller, InProcessApi


def test_lists_show_only_what_the_caller_may_read(house: InProcessApi):
    house.dataset("ours")
    house.dataset("theirs")
    bob = house.tenant("bob", ours="read")

    assert [dataset["name"] for dataset in bob.get("/v1/datasets").json()["results"]] == ["ours"]
    assert [dataset["name"] for dataset in bob.get("/v1/catalog").json()["datasets"]] == ["ours"]


def test_creating_needs_admin_on_a_pattern_that_matches(house: InProcessApi):
    alice = house.tenant("alice", **{"press_*": "admin", "any": "maintain"})

    allowed = alice.post("/v1/datasets", {"name": "press_leaks"})
    refused = alice.post("/v1/datasets", {"name": "donations"})

    assert (allowed.status_code, refused.status_code) == (201, 403)


def test_creating_over_a_dataset_of_others_says_forbidden_not_that_it_exists(house: InProcessApi):
    house.dataset("donations")
    bob = house.tenant("bob", others="admin")

    taken = bob.post("/v1/datasets", {"name": "donations"}, headers={"X-Request-ID": "same"})
    free = bob.post("/v1/datasets", {"name": "nonsense"}, headers={"X-Request-ID": "same"})

    assert taken.status_code == free.status_code == 403
    assert taken.text.replace("donations", "nonsense") == free.text


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic YTpi",
        "Bearer wrong",
        "Bearer tarn__",
        "Bearer tarn_abc_def",
        "Bearer a.b.c",
        "ApiKey ä".encode(),
        "Bearer " + "x" * 20_000,
    ],
)
def test_no_or_bad_key_is_401_in_the_same_words(house: InProcessApi, header: str | bytes | None):
    answer = house.nobody.get("/v1/whoami", headers={} if header is None else {"Authorization": header})

    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert answer.json()["detail"].startswith("send a valid key")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "ApiKey", "apikey", "Token", "token"])
def test_every_scheme_is_understood(house: InProcessApi, scheme: str):
    answer = house.nobody.get("/v1/whoami", headers={"Authorization": f"{scheme} {house.admin.key}"})

    assert answer.json()["tenant"] == "admin"


def test_key_of_another_tenants_id_with_a_wrong_secret_is_refused(house: InProcessApi):
    key = str(house.tenant("alice").key)
    forged = key[:-4] + "AAAA"

    assert house.with_key(forged).get("/v1/whoami").status_code == 401


def test_caller_is_refused_before_the_body_is_looked_at(house: InProcessApi):
    house.dataset("donations")
    bob: Caller = house.tenant("bob")

    kind = {"Content-Type": "application/json"}

    assert house.nobody("POST", "/v1/datasets", kind, content=b"{").status_code == 401
    assert bob("PATCH", "/v1/datasets/donations", kind, content=b"{").status_code == 404


def test_route_without_an_entry_in_the_table_stops_the_start():
    router = APIRouter(route_class=GuardedRoute)

    def forgotten() -> None: ...

    with pytest.raises(StartRefused, match="'forgotten' has no entry"):
        router.get("/forgotten")(forgotten)


def test_entry_without_a_route_stops_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(access.TABLE, "imaginary", access.IDENTIFIED)

    with pytest.raises(StartRefused, match="imaginary"):
        access.check_complete({route.name for router in ROUTERS for route in router.routes})  # type: ignore[attr-defined]  # all are APIRoutes


def test_every_open_route_is_meant_to_be_open():
    assert {name for name, needed in access.TABLE.items() if not needed.identified} == {
        "health",
        "ready",
        "metrics",
        "get_problem",
        "openapi",
        "docs",
    }
