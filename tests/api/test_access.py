"""Access control over HTTP: keys, grants, and datasets whose existence is hidden from other tenants."""

import pytest
from fastapi import APIRouter
from tarn.api.application import ROUTERS
from tarn.api.http import route_access
from tarn.api.http.routing import GuardedRoute
from tarn.errors import StartRefused

from tests.in_process_api import Caller, InProcessApi


def test_lists_show_only_datasets_that_the_caller_may_read(api: InProcessApi):
    api.dataset("ours")
    api.dataset("theirs")
    bob = api.tenant("bob", ours="read")

    assert [dataset["name"] for dataset in bob.get("/v1/datasets").json()["results"]] == ["ours"]
    assert [dataset["name"] for dataset in bob.get("/v1/catalog").json()["datasets"]] == ["ours"]


def test_creating_needs_admin_on_a_pattern_that_matches(api: InProcessApi):
    alice = api.tenant("alice", **{"press_*": "admin", "any": "maintain"})

    allowed = alice.post("/v1/datasets", {"name": "press_leaks"})
    refused = alice.post("/v1/datasets", {"name": "donations"})

    assert (allowed.status_code, refused.status_code) == (201, 403)


def test_creating_over_a_dataset_of_another_tenant_is_forbidden_and_does_not_reveal_it(api: InProcessApi):
    api.dataset("donations")
    bob = api.tenant("bob", others="admin")

    existing = bob.post("/v1/datasets", {"name": "donations"}, headers={"X-Request-ID": "same"})
    missing = bob.post("/v1/datasets", {"name": "nonsense"}, headers={"X-Request-ID": "same"})

    assert existing.status_code == missing.status_code == 403
    assert existing.text.replace("donations", "nonsense") == missing.text


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
def test_missing_and_bad_key_are_401_with_the_same_text(api: InProcessApi, header: str | bytes | None):
    response = api.anonymous.get("/v1/whoami", headers={} if header is None else {"Authorization": header})

    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"].startswith("Bearer")
    assert response.json()["detail"].startswith("send a valid key")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "ApiKey", "apikey", "Token", "token"])
def test_every_authentication_scheme_is_accepted(api: InProcessApi, scheme: str):
    response = api.anonymous.get("/v1/whoami", headers={"Authorization": f"{scheme} {api.admin.key}"})

    assert response.json()["tenant"] == "admin"


def test_key_of_another_tenants_id_with_a_wrong_secret_is_refused(api: InProcessApi):
    key = str(api.tenant("alice").key)
    forged = key[:-4] + "AAAA"

    assert api.with_key(forged).get("/v1/whoami").status_code == 401


def test_caller_is_refused_before_the_body_is_parsed(api: InProcessApi):
    api.dataset("donations")
    bob: Caller = api.tenant("bob")

    kind = {"Content-Type": "application/json"}

    assert api.anonymous("POST", "/v1/datasets", kind, content=b"{").status_code == 401
    assert bob("PATCH", "/v1/datasets/donations", kind, content=b"{").status_code == 404


def test_route_without_an_entry_in_the_access_table_stops_the_start():
    router = APIRouter(route_class=GuardedRoute)

    def forgotten() -> None: ...

    with pytest.raises(StartRefused, match="'forgotten' has no entry"):
        router.get("/forgotten")(forgotten)


def test_access_table_entry_without_a_route_stops_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(route_access.TABLE, "imaginary", route_access.IDENTIFIED)

    with pytest.raises(StartRefused, match="imaginary"):
        route_access.check_complete({route.name for router in ROUTERS for route in router.routes})  # type: ignore[attr-defined]  # all are APIRoutes


def test_open_routes_are_exactly_the_expected_ones():
    assert {name for name, needed in route_access.TABLE.items() if not needed.identified} == {
        "health",
        "ready",
        "metrics",
        "get_problem",
        "openapi",
        "docs",
    }
