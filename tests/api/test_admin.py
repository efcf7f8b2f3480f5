"""Administration over HTTP: tenants, keys, grants, limits, audit."""

import time
from datetime import UTC, datetime, timedelta

import pytest
from tarn.access import identity
from tarn.access.limits import reserve
from tarn.api.http.routing import REFUSAL_DELAY
from tarn.db.tables import api_keys
from tarn.model.names import TenantName

from tests.in_process_api import InProcessApi


def test_tenant_is_created_shown_changed_and_deleted(api: InProcessApi):
    created = api.admin.post("/v1/admin/tenants", {"name": "alice", "title": "Alice's search"})
    changed = api.admin.patch("/v1/admin/tenants/alice", {"title": "Other"})
    listed = api.admin.get("/v1/admin/tenants").json()["results"]
    deleted = api.admin.delete("/v1/admin/tenants/alice")

    assert created.status_code == 201
    assert (changed.json()["title"], changed.json()["disabled"]) == ("Other", False)
    assert [tenant["name"] for tenant in listed] == ["admin", "alice"]
    assert deleted.status_code == 204
    assert api.admin.get("/v1/admin/tenants/alice").json()["type"] == "/problems/tenant-not-found"


@pytest.mark.parametrize("name", ["lakehouse", "Alice", "a b", "../x", "a/b", "x" * 65, "", "-a", "a\x00"])
def test_bad_tenant_name_is_refused(api: InProcessApi, name: str):
    response = api.admin.post("/v1/admin/tenants", {"name": name})

    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "name"


def test_name_of_a_deleted_tenant_cannot_be_reused(api: InProcessApi):
    key = api.tenant("alice", any="read").key
    api.admin.delete("/v1/admin/tenants/alice")

    again = api.admin.post("/v1/admin/tenants", {"name": "alice"})

    assert again.status_code == 409
    assert "deleted tenant" in again.json()["detail"]
    assert api.with_key(str(key)).get("/v1/whoami").status_code == 401


def test_secret_is_shown_once_and_not_stored(api: InProcessApi):
    api.admin.post("/v1/admin/tenants", {"name": "alice"})
    created = api.admin.post("/v1/admin/tenants/alice/keys", {"label": "laptop"}).json()

    listed = api.admin.get("/v1/admin/tenants/alice/keys").json()["results"]
    with api.services.database.read() as connection:
        rows = [dict(row._mapping) for row in connection.execute(api_keys.select())]

    assert created["key"].startswith("tarn_")
    assert listed == [{field: value for field, value in created.items() if field != "key"}]
    _, _, secret = created["key"].split("_", 2)
    assert len(secret) > 20
    assert secret not in repr(rows)


def test_revoked_key_is_refused_from_the_next_request_on(api: InProcessApi):
    alice = api.tenant("alice")
    whoami = alice.get("/v1/whoami").json()

    revoked = api.admin.delete(f"/v1/admin/keys/{whoami['key']}")

    assert whoami["tenant"] == "alice"
    assert revoked.json()["revoked"] is not None
    assert alice.get("/v1/whoami").json()["type"] == "/problems/unauthenticated"
    assert api.admin.delete(f"/v1/admin/keys/{whoami['key']}").json() == revoked.json()


def test_expired_key_is_refused(api: InProcessApi):
    api.admin.post("/v1/admin/tenants", {"name": "alice"})
    expires = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()

    key = api.admin.post("/v1/admin/tenants/alice/keys", {"expires": expires}).json()["key"]

    assert api.with_key(key).get("/v1/whoami").status_code == 401


def test_cached_key_is_refused_after_its_expiry(api: InProcessApi, monkeypatch: pytest.MonkeyPatch):
    api.admin.post("/v1/admin/tenants", {"name": "alice"})
    expires = datetime.now(UTC) + timedelta(hours=1)
    key = api.admin.post("/v1/admin/tenants/alice/keys", {"expires": expires.isoformat()}).json()["key"]
    alice = api.with_key(key)

    before = alice.get("/v1/whoami").status_code
    monkeypatch.setattr(identity, "now", lambda: expires)

    assert (before, alice.get("/v1/whoami").status_code) == (200, 401)


@pytest.mark.parametrize(
    "expires",
    ["9999-12-31T23:59:59-01:00", "0001-01-01T00:00:00+01:00", "9999-06-01T00:00:00Z", "2030-01-01T00:00:00"],
)
def test_expiry_outside_the_representable_range_is_refused(api: InProcessApi, expires: str):
    api.admin.post("/v1/admin/tenants", {"name": "alice"})

    response = api.admin.post("/v1/admin/tenants/alice/keys", {"expires": expires})

    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "expires"


def test_expiry_is_kept_in_utc(api: InProcessApi):
    api.admin.post("/v1/admin/tenants", {"name": "alice"})

    created = api.admin.post("/v1/admin/tenants/alice/keys", {"expires": "9998-12-31T23:59:59-01:00"}).json()

    assert created["expires"] == "9999-01-01T00:59:59Z"


def test_disabled_tenant_is_refused_until_it_is_enabled(api: InProcessApi):
    alice = api.tenant("alice")

    api.admin.patch("/v1/admin/tenants/alice", {"disabled": True})
    refused = alice.get("/v1/whoami").status_code
    api.admin.patch("/v1/admin/tenants/alice", {"disabled": False})

    assert (refused, alice.get("/v1/whoami").status_code) == (401, 200)


def test_administrator_cannot_lock_itself_out(api: InProcessApi):
    grant = api.admin.get("/v1/admin/tenants/admin/grants").json()["results"][0]

    responses = [
        api.admin.delete("/v1/admin/tenants/admin"),
        api.admin.patch("/v1/admin/tenants/admin", {"disabled": True}),
        api.admin.delete("/v1/admin/keys/bootstrap"),
        api.admin.delete(f"/v1/admin/grants/{grant['id']}"),
    ]

    assert [response.status_code for response in responses] == [403, 403, 403, 403]
    assert api.admin.get("/v1/whoami").status_code == 200


def test_grant_gives_access_and_its_removal_ends_it(api: InProcessApi):
    api.dataset("donations")
    alice = api.tenant("alice")
    closed = alice.get("/v1/datasets/donations").status_code

    grant = api.admin.post("/v1/admin/tenants/alice/grants", {"dataset": "don*", "level": "read"}).json()
    opened = alice.get("/v1/datasets/donations").status_code
    api.admin.delete(f"/v1/admin/grants/{grant['id']}")

    assert (closed, opened, alice.get("/v1/datasets/donations").status_code) == (404, 200, 404)


@pytest.mark.parametrize(
    "grant",
    [
        {"dataset": "a?", "level": "read"},
        {"dataset": "[a-z]", "level": "read"},
        {"dataset": "../*", "level": "read"},
        {"dataset": "*", "level": "owner"},
        {"dataset": "*"},
        {"dataset": "*", "level": "read", "until": "tomorrow"},
    ],
)
def test_bad_grant_is_refused(api: InProcessApi, grant):
    api.admin.post("/v1/admin/tenants", {"name": "alice"})

    assert api.admin.post("/v1/admin/tenants/alice/grants", grant).status_code == 422
    assert api.admin.get("/v1/admin/tenants/alice/grants").json()["results"] == []


def test_duplicate_grant_conflicts(api: InProcessApi):
    api.tenant("alice", donations="read")

    again = api.admin.post("/v1/admin/tenants/alice/grants", {"dataset": "donations", "level": "read"})

    assert again.status_code == 409


def test_limits_are_the_servers_until_the_tenant_has_its_own(api: InProcessApi):
    alice = api.tenant("alice")
    before = alice.get("/v1/whoami").json()["limits"]

    after = api.admin.put("/v1/admin/tenants/alice/limits", {"rate_limit": 5, "quota_statements": 1000}).json()

    assert (before["rate_limit"], before["quota_statements"]) == (0, None)
    assert (after["rate_limit"], after["quota_statements"], after["quota_bytes"]) == (5, 1000, None)
    assert alice.get("/v1/whoami").json()["limits"] == after


@pytest.mark.parametrize(
    "limits",
    [
        {"rate_burst": 2**31},
        {"rate_burst": 0},
        {"rate_limit": 1e-310},
        {"rate_limit": 0.0009},
        {"rate_limit": -1},
        {"quota_bytes": 2**63},
    ],
)
def test_invalid_limit_is_refused(api: InProcessApi, limits):
    api.tenant("alice")

    response = api.admin.put("/v1/admin/tenants/alice/limits", limits)

    assert response.status_code == 422
    assert response.json()["errors"][0]["field"].startswith(next(iter(limits)))


@pytest.mark.parametrize("limits", [{"rate_burst": 2**31 - 1}, {"rate_limit": 0}, {"rate_limit": 0.001}])
def test_largest_limits_are_accepted(api: InProcessApi, limits):
    alice = api.tenant("alice")

    assert api.admin.put("/v1/admin/tenants/alice/limits", limits).status_code == 200
    assert alice.get("/v1/whoami").status_code == 200


def test_rate_limit_does_not_apply_to_the_administrator(api: InProcessApi):
    shown = api.admin.put("/v1/admin/tenants/admin/limits", {"rate_limit": 0.001, "rate_burst": 1}).json()

    assert {api.admin.get("/v1/whoami").status_code for _ in range(5)} == {200}
    assert shown["rate_limit"] == 0


def test_used_quota_is_shown_with_its_current_value(api: InProcessApi):
    alice = api.tenant("alice")
    before = alice.get("/v1/whoami").json()["limits"]["used_statements"]

    with api.services.database.write() as connection:
        reserve(connection, TenantName("alice"), api.services.settings, statements=7)

    assert (before, alice.get("/v1/whoami").json()["limits"]["used_statements"]) == (0, 7)


def test_tenant_over_its_rate_waits_and_others_do_not(api: InProcessApi):
    alice, bob = api.tenant("alice"), api.tenant("bob")
    api.admin.put("/v1/admin/tenants/alice/limits", {"rate_limit": 0.01, "rate_burst": 3})

    statuses = [alice.get("/v1/whoami").status_code for _ in range(5)]
    limited = alice.get("/v1/whoami")

    assert statuses == [200, 200, 200, 429, 429]
    assert (limited.json()["type"], limited.json()["retryable"]) == ("/problems/rate-limited", True)
    assert 90 <= int(limited.headers["Retry-After"]) <= 101
    assert bob.get("/v1/whoami").status_code == 200


def test_request_over_the_rate_is_delayed_before_it_is_refused(api: InProcessApi):
    alice = api.tenant("alice")
    api.admin.put("/v1/admin/tenants/alice/limits", {"rate_limit": 0.01, "rate_burst": 1})
    alice.get("/v1/whoami")
    begun = time.monotonic()

    refused = alice.get("/v1/whoami")

    assert refused.status_code == 429
    assert time.monotonic() - begun >= REFUSAL_DELAY[0]


def test_every_write_and_every_denial_is_in_the_audit_log(api: InProcessApi):
    api.dataset("donations")
    alice = api.tenant("alice", donations="read")
    alice.patch("/v1/datasets/donations", {"title": "mine"}, headers={"X-Request-ID": "sneaky-1"})
    alice.get("/v1/datasets/hidden")
    api.anonymous.get("/v1/datasets")
    api.admin.patch("/v1/datasets/donations", {"title": "ours"})

    entries = api.admin.get("/v1/admin/audit").json()["results"]

    assert [(entry["tenant"], entry["action"], entry["outcome"], entry["target"]) for entry in reversed(entries)] == [
        ("admin", "create_dataset", "done", "donations"),
        ("admin", "create_tenant", "done", "tenants/alice"),
        ("admin", "create_grant", "done", f"grants/{_grant(api)}"),
        ("admin", "create_key", "done", f"keys/{alice.get('/v1/whoami').json()['key']}"),
        ("alice", "update_dataset", "denied", "/v1/datasets/donations"),
        ("alice", "get_dataset", "denied", "/v1/datasets/hidden"),
        (None, "list_datasets", "denied", "/v1/datasets"),
        ("admin", "update_dataset", "done", "/v1/datasets/donations"),
    ]
    assert [entry["request"] for entry in entries if entry["action"] == "update_dataset"][1] == "sneaky-1"


def test_denial_inside_a_route_is_in_the_audit_log(api: InProcessApi):
    api.dataset("donations")
    alice, bob = api.tenant("alice", donations="admin"), api.tenant("bob", donations="write")
    job = alice.delete("/v1/datasets/donations?confirm=donations").json()["id"]
    grant = api.admin.get("/v1/admin/tenants/admin/grants").json()["results"][0]["id"]

    responses = [
        bob.post("/v1/datasets", {"name": "others"}),
        bob.get(f"/v1/jobs/{job}"),
        api.admin.delete("/v1/admin/tenants/admin"),
        api.admin.patch("/v1/admin/tenants/admin", {"disabled": True}),
        api.admin.delete("/v1/admin/keys/bootstrap"),
        api.admin.delete(f"/v1/admin/grants/{grant}"),
    ]
    entries = api.admin.get("/v1/admin/audit", params={"limit": 6}).json()["results"]

    assert [response.status_code for response in responses] == [403, 404, 403, 403, 403, 403]
    assert [(entry["tenant"], entry["action"], entry["outcome"], entry["target"]) for entry in reversed(entries)] == [
        ("bob", "create_dataset", "denied", "/v1/datasets"),
        ("bob", "get_job", "denied", f"/v1/jobs/{job}"),
        ("admin", "delete_tenant", "denied", "/v1/admin/tenants/admin"),
        ("admin", "update_tenant", "denied", "/v1/admin/tenants/admin"),
        ("admin", "revoke_key", "denied", "/v1/admin/keys/bootstrap"),
        ("admin", "delete_grant", "denied", f"/v1/admin/grants/{grant}"),
    ]
    assert entries[-1]["detail"] == {
        "problem": "forbidden",
        "detail": "this requires admin on 'others'",
        "count": 1,
    }


def test_audit_log_is_paged_and_filtered_by_tenant(api: InProcessApi):
    api.tenant("alice")
    api.tenant("bob").get("/v1/admin/tenants")

    first = api.admin.get("/v1/admin/audit", params={"limit": 2}).json()
    second = api.admin.get("/v1/admin/audit", params={"limit": 2, "cursor": first["next"]}).json()
    of_bob = api.admin.get("/v1/admin/audit", params={"tenant": "bob"}).json()["results"]

    ids = [entry["id"] for entry in first["results"] + second["results"]]
    assert (len(ids), ids) == (4, sorted(ids, reverse=True))
    assert [(entry["tenant"], entry["outcome"]) for entry in of_bob] == [("bob", "denied")]


def test_write_that_fails_leaves_no_audit_entry(api: InProcessApi):
    api.dataset("donations")
    before = api.admin.get("/v1/admin/audit").json()

    api.admin.post("/v1/datasets", {"name": "donations"})
    api.admin.post("/v1/admin/tenants", {"name": "admin"})

    assert api.admin.get("/v1/admin/audit").json() == before


def _grant(api: InProcessApi) -> str:
    grant: str = api.admin.get("/v1/admin/tenants/alice/grants").json()["results"][0]["id"]
    return grant
