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


def test_tenant_is_made_shown_changed_and_deleted(house: InProcessApi):
    made = house.admin.post("/v1/admin/tenants", {"name": "alice", "title": "Alice's search"})
    changed = house.admin.patch("/v1/admin/tenants/alice", {"title": "Other"})
    listed = house.admin.get("/v1/admin/tenants").json()["results"]
    deleted = house.admin.delete("/v1/admin/tenants/alice")

    assert made.status_code == 201
    assert (changed.json()["title"], changed.json()["disabled"]) == ("Other", False)
    assert [tenant["name"] for tenant in listed] == ["admin", "alice"]
    assert deleted.status_code == 204
    assert house.admin.get("/v1/admin/tenants/alice").json()["type"] == "/problems/tenant-not-found"


@pytest.mark.parametrize("name", ["lakehouse", "Alice", "a b", "../x", "a/b", "x" * 65, "", "-a", "a\x00"])
def test_bad_tenant_name_is_refused(house: InProcessApi, name: str):
    answer = house.admin.post("/v1/admin/tenants", {"name": name})

    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "name"


def test_name_of_a_deleted_tenant_is_not_given_out_again(house: InProcessApi):
    key = house.tenant("alice", any="read").key
    house.admin.delete("/v1/admin/tenants/alice")

    again = house.admin.post("/v1/admin/tenants", {"name": "alice"})

    assert again.status_code == 409
    assert "deleted tenant" in again.json()["detail"]
    assert house.with_key(str(key)).get("/v1/whoami").status_code == 401


def test_secret_is_shown_once_and_stored_nowhere(house: InProcessApi):
    house.admin.post("/v1/admin/tenants", {"name": "alice"})
    created = house.admin.post("/v1/admin/tenants/alice/keys", {"label": "laptop"}).json()

    listed = house.admin.get("/v1/admin/tenants/alice/keys").json()["results"]
    with house.services.database.read() as connection:
        rows = [dict(row._mapping) for row in connection.execute(api_keys.select())]

    assert created["key"].startswith("tarn_")
    assert listed == [{field: value for field, value in created.items() if field != "key"}]
    _, _, secret = created["key"].split("_", 2)
    assert len(secret) > 20
    assert secret not in repr(rows)


def test_revoked_key_is_refused_with_the_next_request(house: InProcessApi):
    alice = house.tenant("alice")
    whoami = alice.get("/v1/whoami").json()

    revoked = house.admin.delete(f"/v1/admin/keys/{whoami['key']}")

    assert whoami["tenant"] == "alice"
    assert revoked.json()["revoked"] is not None
    assert alice.get("/v1/whoami").json()["type"] == "/problems/unauthenticated"
    assert house.admin.delete(f"/v1/admin/keys/{whoami['key']}").json() == revoked.json()


def test_expired_key_is_refused(house: InProcessApi):
    house.admin.post("/v1/admin/tenants", {"name": "alice"})
    expires = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()

    key = house.admin.post("/v1/admin/tenants/alice/keys", {"expires": expires}).json()["key"]

    assert house.with_key(key).get("/v1/whoami").status_code == 401


def test_key_that_is_remembered_ends_with_its_time(house: InProcessApi, monkeypatch: pytest.MonkeyPatch):
    house.admin.post("/v1/admin/tenants", {"name": "alice"})
    expires = datetime.now(UTC) + timedelta(hours=1)
    key = house.admin.post("/v1/admin/tenants/alice/keys", {"expires": expires.isoformat()}).json()["key"]
    alice = house.with_key(key)

    before = alice.get("/v1/whoami").status_code
    monkeypatch.setattr(identity, "now", lambda: expires)

    assert (before, alice.get("/v1/whoami").status_code) == (200, 401)


@pytest.mark.parametrize(
    "expires",
    ["9999-12-31T23:59:59-01:00", "0001-01-01T00:00:00+01:00", "9999-06-01T00:00:00Z", "2030-01-01T00:00:00"],
)
def test_expiry_that_not_every_clock_can_show_is_refused(house: InProcessApi, expires: str):
    house.admin.post("/v1/admin/tenants", {"name": "alice"})

    answer = house.admin.post("/v1/admin/tenants/alice/keys", {"expires": expires})

    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "expires"


def test_expiry_is_kept_in_utc(house: InProcessApi):
    house.admin.post("/v1/admin/tenants", {"name": "alice"})

    made = house.admin.post("/v1/admin/tenants/alice/keys", {"expires": "9998-12-31T23:59:59-01:00"}).json()

    assert made["expires"] == "9999-01-01T00:59:59Z"


def test_disabled_tenant_is_refused_until_it_is_enabled(house: InProcessApi):
    alice = house.tenant("alice")

    house.admin.patch("/v1/admin/tenants/alice", {"disabled": True})
    refused = alice.get("/v1/whoami").status_code
    house.admin.patch("/v1/admin/tenants/alice", {"disabled": False})

    assert (refused, alice.get("/v1/whoami").status_code) == (401, 200)


def test_administrator_cannot_lock_everybody_out(house: InProcessApi):
    grant = house.admin.get("/v1/admin/tenants/admin/grants").json()["results"][0]

    answers = [
        house.admin.delete("/v1/admin/tenants/admin"),
        house.admin.patch("/v1/admin/tenants/admin", {"disabled": True}),
        house.admin.delete("/v1/admin/keys/bootstrap"),
        house.admin.delete(f"/v1/admin/grants/{grant['id']}"),
    ]

    assert [answer.status_code for answer in answers] == [403, 403, 403, 403]
    assert house.admin.get("/v1/whoami").status_code == 200


def test_grant_opens_and_its_removal_closes(house: InProcessApi):
    house.dataset("donations")
    alice = house.tenant("alice")
    closed = alice.get("/v1/datasets/donations").status_code

    grant = house.admin.post("/v1/admin/tenants/alice/grants", {"dataset": "don*", "level": "read"}).json()
    opened = alice.get("/v1/datasets/donations").status_code
    house.admin.delete(f"/v1/admin/grants/{grant['id']}")

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
def test_bad_grant_is_refused(house: InProcessApi, grant):
    house.admin.post("/v1/admin/tenants", {"name": "alice"})

    assert house.admin.post("/v1/admin/tenants/alice/grants", grant).status_code == 422
    assert house.admin.get("/v1/admin/tenants/alice/grants").json()["results"] == []


def test_same_grant_twice_conflicts(house: InProcessApi):
    house.tenant("alice", donations="read")

    again = house.admin.post("/v1/admin/tenants/alice/grants", {"dataset": "donations", "level": "read"})

    assert again.status_code == 409


def test_limits_are_the_servers_until_the_tenant_has_its_own(house: InProcessApi):
    alice = house.tenant("alice")
    before = alice.get("/v1/whoami").json()["limits"]

    after = house.admin.put("/v1/admin/tenants/alice/limits", {"rate_limit": 5, "quota_statements": 1000}).json()

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
def test_limit_that_cannot_be_kept_is_refused(house: InProcessApi, limits):
    house.tenant("alice")

    answer = house.admin.put("/v1/admin/tenants/alice/limits", limits)

    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"].startswith(next(iter(limits)))


@pytest.mark.parametrize("limits", [{"rate_burst": 2**31 - 1}, {"rate_limit": 0}, {"rate_limit": 0.001}])
def test_utmost_limits_are_taken(house: InProcessApi, limits):
    alice = house.tenant("alice")

    assert house.admin.put("/v1/admin/tenants/alice/limits", limits).status_code == 200
    assert alice.get("/v1/whoami").status_code == 200


def test_administrator_cannot_limit_itself_out(house: InProcessApi):
    shown = house.admin.put("/v1/admin/tenants/admin/limits", {"rate_limit": 0.001, "rate_burst": 1}).json()

    assert {house.admin.get("/v1/whoami").status_code for _ in range(5)} == {200}
    assert shown["rate_limit"] == 0


def test_used_quota_is_shown_as_it_is_now(house: InProcessApi):
    alice = house.tenant("alice")
    before = alice.get("/v1/whoami").json()["limits"]["used_statements"]

    with house.services.database.write() as connection:
        reserve(connection, TenantName("alice"), house.services.settings, statements=7)

    assert (before, alice.get("/v1/whoami").json()["limits"]["used_statements"]) == (0, 7)


def test_tenant_over_its_rate_waits_and_others_do_not(house: InProcessApi):
    alice, bob = house.tenant("alice"), house.tenant("bob")
    house.admin.put("/v1/admin/tenants/alice/limits", {"rate_limit": 0.01, "rate_burst": 3})

    statuses = [alice.get("/v1/whoami").status_code for _ in range(5)]
    limited = alice.get("/v1/whoami")

    assert statuses == [200, 200, 200, 429, 429]
    assert (limited.json()["type"], limited.json()["retryable"]) == ("/problems/rate-limited", True)
    assert 90 <= int(limited.headers["Retry-After"]) <= 101
    assert bob.get("/v1/whoami").status_code == 200


def test_request_over_the_rate_is_held_before_it_is_refused(house: InProcessApi):
    alice = house.tenant("alice")
    house.admin.put("/v1/admin/tenants/alice/limits", {"rate_limit": 0.01, "rate_burst": 1})
    alice.get("/v1/whoami")
    begun = time.monotonic()

    refused = alice.get("/v1/whoami")

    assert refused.status_code == 429
    assert time.monotonic() - begun >= REFUSAL_DELAY[0]


def test_every_write_and_every_denial_is_in_the_audit_log(house: InProcessApi):
    house.dataset("donations")
    alice = house.tenant("alice", donations="read")
    alice.patch("/v1/datasets/donations", {"title": "mine"}, headers={"X-Request-ID": "sneaky-1"})
    alice.get("/v1/datasets/hidden")
    house.nobody.get("/v1/datasets")
    house.admin.patch("/v1/datasets/donations", {"title": "ours"})

    entries = house.admin.get("/v1/admin/audit").json()["results"]

    assert [(entry["tenant"], entry["action"], entry["outcome"], entry["target"]) for entry in reversed(entries)] == [
        ("admin", "create_dataset", "done", "donations"),
        ("admin", "create_tenant", "done", "tenants/alice"),
        ("admin", "create_grant", "done", f"grants/{_grant(house)}"),
        ("admin", "create_key", "done", f"keys/{alice.get('/v1/whoami').json()['key']}"),
        ("alice", "update_dataset", "denied", "/v1/datasets/donations"),
        ("alice", "get_dataset", "denied", "/v1/datasets/hidden"),
        (None, "list_datasets", "denied", "/v1/datasets"),
        ("admin", "update_dataset", "done", "/v1/datasets/donations"),
    ]
    assert [entry["request"] for entry in entries if entry["action"] == "update_dataset"][1] == "sneaky-1"


def test_denial_inside_a_route_is_in_the_audit_log(house: InProcessApi):
    house.dataset("donations")
    alice, bob = house.tenant("alice", donations="admin"), house.tenant("bob", donations="write")
    job = alice.delete("/v1/datasets/donations?confirm=donations").json()["id"]
    grant = house.admin.get("/v1/admin/tenants/admin/grants").json()["results"][0]["id"]

    answers = [
        bob.post("/v1/datasets", {"name": "others"}),
        bob.get(f"/v1/jobs/{job}"),
        house.admin.delete("/v1/admin/tenants/admin"),
        house.admin.patch("/v1/admin/tenants/admin", {"disabled": True}),
        house.admin.delete("/v1/admin/keys/bootstrap"),
        house.admin.delete(f"/v1/admin/grants/{grant}"),
    ]
    entries = house.admin.get("/v1/admin/audit", params={"limit": 6}).json()["results"]

    assert [answer.status_code for answer in answers] == [403, 404, 403, 403, 403, 403]
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
        "detail": "admin on 'others' is needed",
        "count": 1,
    }


def test_audit_log_is_paged_and_filtered_by_tenant(house: InProcessApi):
    house.tenant("alice")
    house.tenant("bob").get("/v1/admin/tenants")

    first = house.admin.get("/v1/admin/audit", params={"limit": 2}).json()
    second = house.admin.get("/v1/admin/audit", params={"limit": 2, "cursor": first["next"]}).json()
    of_bob = house.admin.get("/v1/admin/audit", params={"tenant": "bob"}).json()["results"]

    ids = [entry["id"] for entry in first["results"] + second["results"]]
    assert (len(ids), ids) == (4, sorted(ids, reverse=True))
    assert [(entry["tenant"], entry["outcome"]) for entry in of_bob] == [("bob", "denied")]


def test_write_that_fails_leaves_no_audit_entry(house: InProcessApi):
    house.dataset("donations")
    before = house.admin.get("/v1/admin/audit").json()

    house.admin.post("/v1/datasets", {"name": "donations"})
    house.admin.post("/v1/admin/tenants", {"name": "admin"})

    assert house.admin.get("/v1/admin/audit").json() == before


def _grant(house: InProcessApi) -> str:
    grant: str = house.admin.get("/v1/admin/tenants/alice/grants").json()["results"][0]["id"]
    return grant
