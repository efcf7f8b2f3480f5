"""Locks over HTTP: taken, refreshed, given back, taken over, and taken away by the administrator."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import orjson
import pytest
from sqlalchemy import update
from tarn.datasets.registry import Dataset
from tarn.db import database_clock as clock
from tarn.db.tables import locks
from tarn.model import ids
from tarn.model.names import LockName

from tests.in_process_api import ONE_DATABASE, Caller, InProcessApi

BASE = "/v1/datasets/test/locks"


def take(caller: Caller, name: str = "nightly", **body):
    return caller.put(f"{BASE}/{name}", {"ttl": 60} | body)


def advance_time(house: InProcessApi, seconds: float) -> None:
    """So much time passes for every lock."""
    with house.services.database.write() as connection:
        for row in connection.execute(locks.select()).all():
            earlier = row.expires - timedelta(seconds=seconds)
            connection.execute(update(locks).where(locks.c.id == row.id).values(expires=earlier))


def test_lock_is_held_by_one_until_it_is_given_back_and_its_fence_rises(house: InProcessApi, dataset: Dataset):
    first = take(house.admin, holder="worker one").json()
    refused = take(house.admin, holder="worker two")

    assert first["fence"] == 1
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/locked")
    assert refused.json()["holder"] == "worker one"
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert house.admin.delete(f"{BASE}/nightly?token={first['token']}").status_code == 204
    second = take(house.admin, holder="worker two").json()
    assert (second["fence"], second["holder"]) == (2, "worker two")
    assert second["token"] != first["token"]


def test_lock_that_expired_goes_to_another_and_its_former_holder_finds_out(house: InProcessApi, dataset: Dataset):
    first = take(house.admin).json()
    advance_time(house, 61)
    second = take(house.admin).json()

    assert second["fence"] == 2
    for answer in (
        take(house.admin, token=first["token"]),
        house.admin.delete(f"{BASE}/nightly?token={first['token']}"),
    ):
        assert (answer.status_code, answer.json()["type"]) == (409, "/problems/lock-lost")
    assert take(house.admin, token=second["token"]).json()["fence"] == 2


def test_refreshed_lock_is_held_on(house: InProcessApi, dataset: Dataset):
    held = take(house.admin).json()
    advance_time(house, 50)
    again = take(house.admin, token=held["token"], ttl=100).json()
    advance_time(house, 50)

    assert again["expires"] > held["expires"]
    assert again["fence"] == 1
    assert take(house.admin).status_code == 409


@pytest.mark.parametrize("hours", [-1, 1])
def test_lock_is_neither_lost_nor_kept_for_a_clock_that_jumps(
    house: InProcessApi, dataset: Dataset, monkeypatch, hours: int
):
    held = take(house.admin, ttl=600).json()
    real = ids.now
    monkeypatch.setattr(clock, "now", lambda: real() + timedelta(hours=hours))

    assert take(house.admin).status_code == 409
    assert take(house.admin, token=held["token"], ttl=600).status_code == 200
    advance_time(house, 601)
    assert take(house.admin).json()["fence"] == 2


def test_of_many_that_ask_at_once_one_gets_the_lock(house: InProcessApi, dataset: Dataset):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: take(house.admin).status_code, range(8)))

    assert sorted(answers) == [200] + 7 * [409]


@ONE_DATABASE
def test_locks_of_another_tenant_are_other_locks(house: InProcessApi, dataset: Dataset):
    other, stranger = house.tenant("other", test="read"), house.tenant("stranger")
    mine = take(house.admin).json()

    assert take(other).json()["fence"] == 1
    assert other.delete(f"{BASE}/nightly?token={mine['token']}").json()["type"] == "/problems/lock-lost"
    assert [lock["name"] for lock in other.get(BASE).json()["results"]] == ["nightly"]
    assert "token" not in other.get(BASE).text
    assert take(stranger).json()["type"] == "/problems/dataset-not-found"


@ONE_DATABASE
def test_lock_is_mirrored_without_its_token(house: InProcessApi, dataset: Dataset):
    path = dataset.layout.named_lock("admin", LockName("nightly"))
    held = take(house.admin, holder="me").json()

    shown = orjson.loads(house.services.store.get(path))
    assert (shown["holder"], shown["fence"]) == ("me", 1)
    assert "token" not in shown
    house.admin.delete(f"{BASE}/nightly?token={held['token']}")
    assert house.services.store.head(path) is None


def test_administrator_takes_a_lock_away_and_it_is_in_the_audit_log(house: InProcessApi, dataset: Dataset):
    other = house.tenant("other", test="read")
    held = take(other).json()
    (seen,) = house.admin.get("/v1/admin/locks").json()["results"]

    assert (seen["dataset"], seen["tenant"], seen["name"]) == ("test", "other", "nightly")
    assert other.get("/v1/admin/locks").status_code == 403
    assert other.delete(f"/v1/admin/locks/{seen['id']}").status_code == 403
    assert house.admin.delete(f"/v1/admin/locks/{seen['id']}").json()["fence"] == 1
    assert house.admin.delete(f"/v1/admin/locks/{seen['id']}").json()["type"] == "/problems/lock-not-found"
    assert house.admin.get("/v1/admin/locks").json()["results"] == []
    assert take(other, token=held["token"]).json()["type"] == "/problems/lock-lost"
    assert take(other).json()["fence"] == 2
    entries = house.admin.get("/v1/admin/audit").json()["results"]
    forced = next(entry for entry in entries if entry["action"] == "force_release_lock" and entry["outcome"] == "done")
    assert forced["detail"] == {"dataset": "test", "tenant": "other", "name": "nightly", "fence": 1}


@ONE_DATABASE
@pytest.mark.parametrize(
    "body", [{"ttl": 0}, {"ttl": -1}, {"ttl": 86_401}, {}, {"ttl": 1, "token": ""}, {"ttl": 1, "x": 1}]
)
def test_lock_that_cannot_be_is_refused(house: InProcessApi, dataset: Dataset, body):
    assert house.admin.put(f"{BASE}/nightly", body).status_code == 422
    assert house.admin.put(f"{BASE}/..%2Fx", {"ttl": 1}).status_code in (404, 422)
    assert house.admin.get(BASE).json()["results"] == []


@ONE_DATABASE
def test_same_request_under_an_idempotency_key_gets_the_same_lock(house: InProcessApi, dataset: Dataset):
    first = house.admin.put(f"{BASE}/nightly", {"ttl": 60}, headers={"Idempotency-Key": "k"})
    again = house.admin.put(f"{BASE}/nightly", {"ttl": 60}, headers={"Idempotency-Key": "k"})

    assert again.json() == first.json()
