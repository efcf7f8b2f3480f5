"""Idempotency keys: the response to a request is stored under its key, and a repeated request gets it without effect.

There are two ways to use a key:

1. store    a request with one transaction stores its response in it. Of concurrent requests one commits; the others
            raise IdempotencyRace, and find the response when they start again: `answer_once`
2. claim    a request with other effects claims its key, runs, and replaces the claim by its response (`complete`) or
            deletes it (`forget`). A claim whose process died expires: the repeated request then runs again

A key is a tenant's own. A request with another fingerprint under the same key raises IdempotencyMismatch.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import orjson
from sqlalchemy import ColumnElement, Connection, and_, delete, select, update

from tarn.db.database_clock import database_time
from tarn.db.engine import Database
from tarn.db.tables import idempotency
from tarn.db.upsert import upsert
from tarn.errors import IdempotencyMismatch, Locked
from tarn.model.ids import now

CLAIMED = 0
"""Status of a key that is claimed and has no response yet."""

CLAIM_DURATION = timedelta(minutes=1)


class IdempotencyRace(Exception):
    """A concurrent request with the same key committed first. Start again, and find its response."""


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """An idempotency key and the fingerprint of its request."""

    key: str
    fingerprint: str


class StoredResponse(NamedTuple):
    """A stored response."""

    status: int
    answer: Any
    created: datetime


StoreAnswer = Callable[[Connection, Any], None]
"""Stores a response in the transaction of its effect."""


def fingerprint(method: str, path: str, query: Sequence[tuple[str, str]], body_digest: str) -> str:
    """Return the hash of a request: requests with the same fingerprint are the same request."""
    return hashlib.sha256(orjson.dumps([method, path, sorted(query), body_digest])).hexdigest()


def find(connection: Connection, tenant: str, once: IdempotencyKey) -> StoredResponse | None:
    """Return the stored response to the same request. Raises IdempotencyMismatch if another request used the key."""
    row = connection.execute(select(idempotency).where(_is(tenant, once.key))).first()
    if row is None:
        return None
    if row.fingerprint != once.fingerprint:
        raise IdempotencyMismatch(f"the idempotency key {once.key!r} was used for another request")
    return StoredResponse(row.status, row.answer, row.created)


def is_known(connection: Connection, tenant: str, key: str) -> bool:
    """Return whether a key was used, for any request."""
    return connection.execute(select(idempotency.c.key).where(_is(tenant, key))).first() is not None


def store(connection: Connection, tenant: str, once: IdempotencyKey, status: int, answer: Any) -> None:
    """Store a response in the transaction of its effect. Raises IdempotencyRace, IdempotencyMismatch."""
    if not _insert(connection, tenant, once, status, answer, now()):
        find(connection, tenant, once)
        raise IdempotencyRace


def answer_once(
    database: Database, tenant: str, once: IdempotencyKey | None, run: Callable[[StoreAnswer], Any], status: int = 200
) -> Any:
    """Return the stored response of a request, or run it: it stores its response in the transaction of its effect.

    Raises IdempotencyMismatch, and what the request raises.
    """

    def store_answer(connection: Connection, answer: Any) -> None:
        if once is not None:
            store(connection, tenant, once, status, answer)

    while True:
        if once is not None:
            with database.read() as connection:
                stored = find(connection, tenant, once)
            if stored is not None:
                return stored.answer
        try:
            return run(store_answer)
        except IdempotencyRace:
            continue  # the other request's response is stored now


def claim(database: Database, tenant: str, once: IdempotencyKey) -> StoredResponse | None:
    """Claim a key and return None, or return its stored response.

    Raises IdempotencyMismatch, and Locked while another request has claimed it.
    """
    with database.write() as connection:
        moment = database_time(connection)
        stored = find(connection, tenant, once)
        if stored is not None and stored.status != CLAIMED:
            return stored
        expired = idempotency.c.status == CLAIMED, idempotency.c.created < moment - CLAIM_DURATION
        connection.execute(delete(idempotency).where(_is(tenant, once.key), *expired))
        if not _insert(connection, tenant, once, CLAIMED, {}, moment):
            raise Locked("another request with this idempotency key is still running; retry later", holder=tenant)
    return None


def complete(database: Database, tenant: str, once: IdempotencyKey, status: int, answer: Any) -> None:
    """Replace the claim of a key by the response."""
    claimed = _is(tenant, once.key), idempotency.c.status == CLAIMED
    with database.write() as connection:
        connection.execute(update(idempotency).where(*claimed).values(status=status, answer=answer, created=now()))


def forget(database: Database, tenant: str, once: IdempotencyKey) -> None:
    """Delete the claim of a key, so that the request can be repeated."""
    with database.write() as connection:
        connection.execute(delete(idempotency).where(_is(tenant, once.key), idempotency.c.status == CLAIMED))


def expire(connection: Connection, age: timedelta) -> None:
    """Delete responses that were stored longer ago."""
    connection.execute(delete(idempotency).where(idempotency.c.created < now() - age))


def forget_since(connection: Connection, moment: datetime | None) -> None:
    """Delete responses stored since a time; all if it is None. For writes that were lost and may be repeated."""
    since = () if moment is None else (idempotency.c.created >= moment,)
    connection.execute(delete(idempotency).where(*since))


def _is(tenant: str, key: str) -> ColumnElement[bool]:
    return and_(idempotency.c.tenant == tenant, idempotency.c.key == key)


def _insert(
    connection: Connection, tenant: str, once: IdempotencyKey, status: int, answer: Any, moment: datetime
) -> bool:
    """Insert a key. Returns False if it exists."""
    row = {"tenant": tenant, "key": once.key, "fingerprint": once.fingerprint}
    insert = upsert(connection, idempotency).values(**row, status=status, answer=answer, created=moment)
    inserted = connection.execute(insert.on_conflict_do_nothing().returning(idempotency.c.key)).first()
    return inserted is not None
