"""Idempotency keys: a repeated request has one effect."""

import threading
from datetime import timedelta

import pytest
from sqlalchemy import update
from tarn.db.idempotency import CLAIMED
from tarn.db.tables import idempotency
from tarn.model.ids import now

from tests.api.test_entities import JANE, NDJSON, PATH, lines, person
from tests.in_process_api import InProcessApi
from tests.journal import journal


@pytest.fixture(autouse=True)
def dataset(api: InProcessApi):
    api.dataset("test")


def test_repeated_request_gets_the_first_response_and_has_no_effect(api: InProcessApi):
    key = {"Idempotency-Key": "k-1"}

    first = api.admin.post(PATH, JANE, headers=key)
    api.admin.post(PATH, person(1))
    again = api.admin.post(PATH, JANE, headers=key)

    assert first.json() == again.json()
    assert len(journal.rows(api)) == 5


@pytest.mark.parametrize("change", [
    {"json": person(2)},
    {"json": JANE, "params": {"origin": "other"}},
])  # fmt: skip
def test_different_request_with_the_same_key_is_refused(api: InProcessApi, change):
    key = {"Idempotency-Key": "k-1"}
    api.admin.post(PATH, JANE, headers=key)

    other = api.admin("POST", PATH, headers=key, **change)

    assert (other.status_code, other.json()["type"]) == (422, "/problems/idempotency-mismatch")
    assert len(journal.rows(api)) == 3


def test_keys_of_different_tenants_are_independent(api: InProcessApi):
    alice = api.tenant("alice", test="write")
    key = {"Idempotency-Key": "k-1"}

    api.admin.post(PATH, JANE, headers=key)

    assert alice.post(PATH, person(1), headers=key).status_code == 200


@pytest.mark.parametrize("key", ["", "x" * 256, "with space", "ünï"])
def test_bad_key_is_refused(api: InProcessApi, key: str):
    response = api.admin.post(PATH, JANE, headers={"Idempotency-Key": key.encode()})

    assert response.status_code == 422
    assert journal.count(api) == 0


def test_refused_request_does_not_use_up_its_key(api: InProcessApi):
    key = {"Idempotency-Key": "k-1"}

    refused = api.admin.post(PATH, {"id": "x", "schema": "Banana"}, headers=key)

    assert (refused.status_code, api.admin.post(PATH, JANE, headers=key).status_code) == (422, 200)


@pytest.mark.parametrize("size", [1, 3_000])
def test_key_sent_twenty_times_in_parallel_has_one_effect(api: InProcessApi, size: int):
    body = lines(*(person(number) for number in range(size)))
    responses: list[tuple[int, str]] = []

    def send() -> None:
        response = api.admin("POST", PATH, content=body, headers=NDJSON | {"Idempotency-Key": "k-1"})
        responses.append((response.status_code, response.text))

    threads = [threading.Thread(target=send) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(responses) == 20
    assert {status for status, _ in responses} == {200}
    assert len({text for _, text in responses}) == 1
    assert journal.count(api) == 2 * size
    assert api.admin.get("/v1/whoami").json()["limits"]["used_statements"] == 2 * size


@pytest.mark.parametrize(("method", "path", "body"), [
    ("PUT", f"{PATH}/jane", JANE),
    ("DELETE", f"{PATH}/jane", None),
    ("DELETE", "/v1/datasets/test/origins/default", None),
])  # fmt: skip
def test_changes_and_deletes_are_replayed_too(api: InProcessApi, method: str, path: str, body):
    api.admin.post(PATH, JANE)
    key = {"Idempotency-Key": "k-1"}

    first = api.admin(method, path, json=body, headers=key)
    rows = journal.count(api)
    again = api.admin(method, path, json=body, headers=key)

    assert first.status_code == 200
    assert (again.json(), journal.count(api)) == (first.json(), rows)


def test_other_routes_are_replayed_too(api: InProcessApi):
    key = {"Idempotency-Key": "k-2"}

    first = api.admin.post("/v1/datasets", {"name": "once"}, headers=key)
    again = api.admin.post("/v1/datasets", {"name": "once"}, headers=key)
    other = api.admin.post("/v1/datasets", {"name": "other"}, headers=key)

    assert (first.status_code, again.status_code, other.status_code) == (201, 201, 422)
    assert again.json() == first.json()
    assert again.headers["ETag"] == first.headers["ETag"]
    assert api.admin.post("/v1/datasets", {"name": "once"}).status_code == 409


def test_refusal_by_a_route_leaves_its_key_free(api: InProcessApi):
    key = {"Idempotency-Key": "k-3"}

    refused = api.admin.post("/v1/admin/tenants", {"name": "admin"}, headers=key)

    assert refused.status_code == 409
    assert api.admin.post("/v1/admin/tenants", {"name": "alice"}, headers=key).status_code == 201


def test_secret_is_not_stored_with_any_key(api: InProcessApi):
    api.tenant("alice")

    response = api.admin.post("/v1/admin/tenants/alice/keys", {}, headers={"Idempotency-Key": "k-4"})

    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "header.Idempotency-Key")


def test_concurrent_request_with_the_same_key_is_a_conflict_until_the_claim_of_the_first_expires(api: InProcessApi):
    key = {"Idempotency-Key": "k-5"}
    api.admin.post("/v1/datasets", {"name": "twin"}, headers=key)
    with api.services.database.write() as connection:
        connection.execute(update(idempotency).values(status=CLAIMED, created=now()))

    waiting = api.admin.post("/v1/datasets", {"name": "twin"}, headers=key)
    with api.services.database.write() as connection:
        connection.execute(update(idempotency).values(created=now() - timedelta(minutes=5)))
    after = api.admin.post("/v1/datasets", {"name": "twin"}, headers=key)

    assert (waiting.status_code, waiting.json()["type"]) == (409, "/problems/locked")
    assert (after.status_code, after.json()["type"]) == (409, "/problems/already-exists")
