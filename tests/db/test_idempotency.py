"""The idempotency store, on both databases."""

import threading
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update
from tarn.db import idempotency
from tarn.db.engine import Database
from tarn.db.idempotency import CLAIM_DURATION, IdempotencyKey, IdempotencyRace, StoreAnswer
from tarn.db.tables import idempotency as table
from tarn.errors import IdempotencyMismatch, Locked
from tarn.model.ids import now

pytestmark = pytest.mark.both_databases

KEY = IdempotencyKey("k-1", "one request")
OTHER = IdempotencyKey("k-1", "another request")


def store(database: Database, once: IdempotencyKey = KEY, response: Any = 1) -> None:
    with database.write() as connection:
        idempotency.store(connection, "alice", once, 200, response)


def claim(database: Database, once: IdempotencyKey = KEY) -> Any:
    stored = idempotency.claim(database, "alice", once)
    return None if stored is None else stored.answer


def find(database: Database, tenant: str = "alice", once: IdempotencyKey = KEY) -> Any:
    with database.read() as connection:
        stored = idempotency.find(connection, tenant, once)
    return None if stored is None else stored.answer


def age(database: Database, by: timedelta) -> None:
    """Make all keys older."""
    with database.write() as connection:
        connection.execute(update(table).values(created=now() - by))


def test_stored_response_is_found_by_the_same_request_of_the_same_tenant(database: Database):
    store(database, response={"commit": 7})

    assert find(database) == {"commit": 7}
    assert find(database, tenant="bob") is None
    with pytest.raises(IdempotencyMismatch):
        find(database, once=OTHER)


def test_second_response_under_a_key_is_refused(database: Database):
    store(database)

    with pytest.raises(IdempotencyRace):
        store(database, response=2)
    with pytest.raises(IdempotencyMismatch):
        store(database, OTHER)
    assert find(database) == 1


def test_claim_excludes_others_until_it_is_completed(database: Database):
    assert claim(database) is None
    with pytest.raises(Locked):
        claim(database)
    with pytest.raises(IdempotencyMismatch):
        claim(database, OTHER)

    idempotency.complete(database, "alice", KEY, 201, "created")
    assert claim(database) == "created"


def test_forgotten_or_expired_claim_can_be_made_again(database: Database):
    claim(database)
    idempotency.forget(database, "alice", KEY)
    assert claim(database) is None

    age(database, CLAIM_DURATION + timedelta(seconds=1))
    assert claim(database) is None
    with pytest.raises(Locked):
        claim(database)


def test_response_is_neither_forgotten_nor_replaced_by_a_claim(database: Database):
    store(database)
    age(database, timedelta(hours=1))

    idempotency.forget(database, "alice", KEY)
    idempotency.complete(database, "alice", KEY, 200, 2)
    assert claim(database) == 1


def test_old_responses_expire(database: Database):
    store(database)
    age(database, timedelta(hours=2))
    store(database, IdempotencyKey("k-2", "x"))

    with database.write() as connection:
        idempotency.expire(connection, timedelta(hours=1))
    assert find(database) is None
    assert find(database, once=IdempotencyKey("k-2", "x")) == 1


@pytest.mark.parametrize(("hours", "remaining"), [(None, None), (2, None), (0, 1)])
def test_responses_since_a_moment_are_forgotten(database: Database, hours: int | None, remaining: int | None):
    store(database)
    age(database, timedelta(hours=1))

    with database.write() as connection:
        idempotency.forget_since(connection, None if hours is None else now() - timedelta(hours=hours))
    assert find(database) == remaining


def test_concurrent_requests_with_one_key_have_one_effect(database: Database):
    start = threading.Barrier(4)
    effects: list[str] = []
    responses: list[str] = []

    def run(number: int) -> None:
        def effect(store_answer: StoreAnswer) -> str:
            with database.write() as connection:
                store_answer(connection, f"answer {number}")
            effects.append(f"answer {number}")
            return effects[-1]

        start.wait()
        responses.append(idempotency.answer_once(database, "alice", KEY, effect))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(effects) == 1
    assert responses == effects * 4
