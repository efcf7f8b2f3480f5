"""Locks over HTTP: acquire, refresh, release, take over after expiry, and removal by the administrator."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import orjson
import pytest
from sqlalchemy import update
from tarn.datasets.registry import Dataset
from tarn.db import database_clock
from tarn.db.tables import locks
from tarn.model import ids
from tarn.model.names import LockName

from tests.in_process_api import ONE_DATABASE, Caller, InProcessApi

pytestmark = pytest.mark.both_databases

BASE = "/v1/datasets/test/locks"


def take(caller: Caller, name: str = "nightly", **body):
    return caller.put(f"{BASE}/{name}", {"ttl": 60} | body)


def advance_time(api: InProcessApi, seconds: float) -> None:
    """Move every lock's times into the past by so much."""
    with api.services.database.write() as connection:
        for row in connection.execute(locks.select()).all():
            earlier = row.expires - timedelta(seconds=seconds)
            connection.execute(update(locks).where(locks.c.id == row.id).values(expires=earlier))


def test_lock_is_held_by_one_until_it_is_released_and_its_fence_increases(api: InProcessApi, dataset: Dataset):
    first = take(api.admin, holder="worker one").json()
    refused = take(api.admin, holder="worker two")

    assert first["fence"] == 1
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/locked")
    assert refused.json()["holder"] == "worker one"
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert api.admin.delete(f"{BASE}/nightly?token={first['token']}").status_code == 204
    second = take(api.admin, holder="worker two").json()
    assert (second["fence"], second["holder"]) == (2, "worker two")
    assert second["token"] != first["token"]


def test_expired_lock_goes_to_another_and_its_former_holder_is_refused(api: InProcessApi, dataset: Dataset):
    first = take(api.admin).json()
    advance_time(api, 61)
    second = take(api.admin).json()

    assert second["fence"] == 2
    for response in (
        take(api.admin, token=first["token"]),
        api.admin.delete(f"{BASE}/nightly?token={first['token']}"),
    ):
        assert (response.status_code, response.json()["type"]) == (409, "/problems/lock-lost")
    assert take(api.admin, token=second["token"]).json()["fence"] == 2


def test_refreshed_lock_is_still_held(api: InProcessApi, dataset: Dataset):
    lock = take(api.admin).json()
    advance_time(api, 50)
    again = take(api.admin, token=lock["token"], ttl=100).json()
    advance_time(api, 50)

    assert again["expires"] > lock["expires"]
    assert again["fence"] == 1
    assert take(api.admin).status_code == 409


@pytest.mark.parametrize("hours", [-1, 1])
def test_lock_is_neither_lost_nor_extended_by_a_clock_that_jumps(
    api: InProcessApi, dataset: Dataset, monkeypatch, hours: int
):
    lock = take(api.admin, ttl=600).json()
    real = ids.now
    monkeypatch.setattr(database_clock, "now", lambda: real() + timedelta(hours=hours))

    assert take(api.admin).status_code == 409
    assert take(api.admin, token=lock["token"], ttl=600).status_code == 200
    advance_time(api, 601)
    assert take(api.admin).json()["fence"] == 2


def test_concurrent_requests_for_one_lock_give_it_to_one(api: InProcessApi, dataset: Dataset):
    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(lambda _: take(api.admin).status_code, range(8)))

    assert sorted(responses) == [200] + 7 * [409]


@ONE_DATABASE
def test_locks_of_different_tenants_are_independent(api: InProcessApi, dataset: Dataset):
    other, unrelated = api.tenant("other", test="read"), api.tenant("unrelated")
    mine = take(api.admin).json()

    assert take(other).json()["fence"] == 1
    assert other.delete(f"{BASE}/nightly?token={mine['token']}").json()["type"] == "/problems/lock-lost"
    assert [lock["name"] for lock in other.get(BASE).json()["results"]] == ["nightly"]
    assert "token" not in other.get(BASE).text
    assert take(unrelated).json()["type"] == "/problems/dataset-not-found"


@ONE_DATABASE
def test_lock_is_mirrored_without_its_token(api: InProcessApi, dataset: Dataset):
    path = dataset.layout.named_lock("admin", LockName("nightly"))
    lock = take(api.admin, holder="me").json()

    shown = orjson.loads(api.services.store.get(path))
    assert (shown["holder"], shown["fence"]) == ("me", 1)
    assert "token" not in shown
    api.admin.delete(f"{BASE}/nightly?token={lock['token']}")
    assert api.services.store.head(path) is None


def test_lock_removed_by_the_administrator_is_in_the_audit_log(api: InProcessApi, dataset: Dataset):
    other = api.tenant("other", test="read")
    lock = take(other).json()
    (seen,) = api.admin.get("/v1/admin/locks").json()["results"]

    assert (seen["dataset"], seen["tenant"], seen["name"]) == ("test", "other", "nightly")
    assert other.get("/v1/admin/locks").status_code == 403
    assert other.delete(f"/v1/admin/locks/{seen['id']}").status_code == 403
    assert api.admin.delete(f"/v1/admin/locks/{seen['id']}").json()["fence"] == 1
    assert api.admin.delete(f"/v1/admin/locks/{seen['id']}").json()["type"] == "/problems/lock-not-found"
    assert api.admin.get("/v1/admin/locks").json()["results"] == []
    assert take(other, token=lock["token"]).json()["type"] == "/problems/lock-lost"
    assert take(other).json()["fence"] == 2
    entries = api.admin.get("/v1/admin/audit").json()["results"]
    forced = next(entry for entry in entries if entry["action"] == "force_release_lock" and entry["outcome"] == "done")
    assert forced["detail"] == {"dataset": "test", "tenant": "other", "name": "nightly", "fence": 1}


@ONE_DATABASE
@pytest.mark.parametrize(
    "body", [{"ttl": 0}, {"ttl": -1}, {"ttl": 86_401}, {}, {"ttl": 1, "token": ""}, {"ttl": 1, "x": 1}]
)
def test_invalid_lock_is_refused(api: InProcessApi, dataset: Dataset, body):
    assert api.admin.put(f"{BASE}/nightly", body).status_code == 422
    assert api.admin.put(f"{BASE}/..%2Fx", {"ttl": 1}).status_code in (404, 422)
    assert api.admin.get(BASE).json()["results"] == []


@ONE_DATABASE
def test_replayed_request_for_a_lock_gets_the_same_lock(api: InProcessApi, dataset: Dataset):
    first = api.admin.put(f"{BASE}/nightly", {"ttl": 60}, headers={"Idempotency-Key": "k"})
    again = api.admin.put(f"{BASE}/nightly", {"ttl": 60}, headers={"Idempotency-Key": "k"})

    assert again.json() == first.json()
