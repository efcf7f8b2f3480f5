"""Idempotency keys: one effect, however often it is asked for."""

import threading
from datetime import timedelta

import pytest
from sqlalchemy import update
from tarn.api.http.idempotency import CLAIMED
from tarn.db.tables import idempotency
from tarn.model.ids import now

from tests.api.test_entities import JANE, NDJSON, PATH, lines, person
from tests.in_process_api import InProcessApi
from tests.journal import journal


@pytest.fixture(autouse=True)
def dataset(house: InProcessApi):
    house.dataset("test")


def test_same_request_again_gets_the_first_answer_and_has_no_effect(house: InProcessApi):
    key = {"Idempotency-Key": "k-1"}

    first = house.admin.post(PATH, JANE, headers=key)
    house.admin.post(PATH, person(1))
    again = house.admin.post(PATH, JANE, headers=key)

    assert first.json() == again.json()
    assert len(journal.rows(house)) == 5


@pytest.mark.parametrize("change", [
    {"json": person(2)},
    {"json": JANE, "params": {"origin": "other"}},
])  # fmt: skip
def test_another_request_with_the_key_is_refused(house: InProcessApi, change):
    key = {"Idempotency-Key": "k-1"}
    house.admin.post(PATH, JANE, headers=key)

    other = house.admin("POST", PATH, headers=key, **change)

    assert (other.status_code, other.json()["type"]) == (422, "/problems/idempotency-mismatch")
    assert len(journal.rows(house)) == 3


def test_key_is_its_tenants_own(house: InProcessApi):
    alice = house.tenant("alice", test="write")
    key = {"Idempotency-Key": "k-1"}

    house.admin.post(PATH, JANE, headers=key)

    assert alice.post(PATH, person(1), headers=key).status_code == 200


@pytest.mark.parametrize("key", ["", "x" * 256, "with space", "ünï"])
def test_bad_key_is_refused(house: InProcessApi, key: str):
    answer = house.admin.post(PATH, JANE, headers={"Idempotency-Key": key.encode()})

    assert answer.status_code == 422
    assert journal.count(house) == 0


def test_refused_request_does_not_use_its_key_up(house: InProcessApi):
    key = {"Idempotency-Key": "k-1"}

    refused = house.admin.post(PATH, {"id": "x", "schema": "Banana"}, headers=key)

    assert (refused.status_code, house.admin.post(PATH, JANE, headers=key).status_code) == (422, 200)


@pytest.mark.parametrize("size", [1, 15_000])
def test_key_sent_twenty_times_in_parallel_has_one_effect(house: InProcessApi, size: int):
    body = lines(*(person(number) for number in range(size)))
    answers: list[tuple[int, str]] = []

    def send() -> None:
        answer = house.admin("POST", PATH, content=body, headers=NDJSON | {"Idempotency-Key": "k-1"})
        answers.append((answer.status_code, answer.text))

    threads = [threading.Thread(target=send) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(answers) == 20
    assert {status for status, _ in answers} == {200}
    assert len({text for _, text in answers}) == 1
    assert journal.count(house) == 2 * size
    assert house.admin.get("/v1/whoami").json()["limits"]["used_statements"] == 2 * size


@pytest.mark.parametrize(("method", "path", "body"), [
    ("PUT", f"{PATH}/jane", JANE),
    ("DELETE", f"{PATH}/jane", None),
    ("DELETE", "/v1/datasets/test/origins/default", None),
])  # fmt: skip
def test_changes_and_deletes_are_replayed_too(house: InProcessApi, method: str, path: str, body):
    house.admin.post(PATH, JANE)
    key = {"Idempotency-Key": "k-1"}

    first = house.admin(method, path, json=body, headers=key)
    rows = journal.count(house)
    again = house.admin(method, path, json=body, headers=key)

    assert first.status_code == 200
    assert (again.json(), journal.count(house)) == (first.json(), rows)


def test_other_routes_answer_once_too(house: InProcessApi):
    key = {"Idempotency-Key": "k-2"}

    first = house.admin.post("/v1/datasets", {"name": "once"}, headers=key)
    again = house.admin.post("/v1/datasets", {"name": "once"}, headers=key)
    other = house.admin.post("/v1/datasets", {"name": "other"}, headers=key)

    assert (first.status_code, again.status_code, other.status_code) == (201, 201, 422)
    assert again.json() == first.json()
    assert again.headers["ETag"] == first.headers["ETag"]
    assert house.admin.post("/v1/datasets", {"name": "once"}).status_code == 409


def test_route_that_refused_leaves_its_key_free(house: InProcessApi):
    key = {"Idempotency-Key": "k-3"}

    refused = house.admin.post("/v1/admin/tenants", {"name": "admin"}, headers=key)

    assert refused.status_code == 409
    assert house.admin.post("/v1/admin/tenants", {"name": "alice"}, headers=key).status_code == 201


def test_secret_is_kept_under_no_key(house: InProcessApi):
    house.tenant("alice")

    answer = house.admin.post("/v1/admin/tenants/alice/keys", {}, headers={"Idempotency-Key": "k-4"})

    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "header.Idempotency-Key")


def test_request_whose_twin_is_under_way_is_told_so_and_a_dead_twin_is_forgotten(house: InProcessApi):
    key = {"Idempotency-Key": "k-5"}
    house.admin.post("/v1/datasets", {"name": "twin"}, headers=key)
    with house.services.database.write() as connection:
        connection.execute(update(idempotency).values(status=CLAIMED, created=now()))

    waiting = house.admin.post("/v1/datasets", {"name": "twin"}, headers=key)
    with house.services.database.write() as connection:
        connection.execute(update(idempotency).values(created=now() - timedelta(minutes=5)))
    after = house.admin.post("/v1/datasets", {"name": "twin"}, headers=key)

    assert (waiting.status_code, waiting.json()["type"]) == (409, "/problems/locked")
    assert (after.status_code, after.json()["type"]) == (409, "/problems/already-exists")
