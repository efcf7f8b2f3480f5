"""Answers kept under idempotency keys: the same request again gets the same answer, and has no effect."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, select

from tarn.db.tables import idempotency
from tarn.db.upsert import upsert
from tarn.errors import IdempotencyMismatch
from tarn.model.ids import now


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """An idempotency key, and the fingerprint of the request it came with."""

    key: str
    fingerprint: str


class StoredResponse(NamedTuple):
    """An answer that was given before."""

    status: int
    answer: Any
    created: datetime


def find(connection: Connection, tenant: str, once: IdempotencyKey) -> StoredResponse | None:
    """The answer that the same request got before. Raises IdempotencyMismatch if another one used the key."""
    row = connection.execute(select(idempotency).where(*_is(tenant, once))).first()
    if row is None:
        return None
    if row.fingerprint != once.fingerprint:
        raise IdempotencyMismatch(f"the idempotency key {once.key!r} was used for another request")
    return StoredResponse(row.status, row.answer, row.created)


def is_known(connection: Connection, tenant: str, key: str) -> bool:
    """Whether a key was used, for whatever request."""
    same = idempotency.c.tenant == tenant, idempotency.c.key == key
    return connection.execute(select(idempotency.c.key).where(*same)).first() is not None


def _insert(connection: Connection, tenant: str, once: IdempotencyKey, status: int, answer: Any) -> bool:
    """Keep an answer in the caller's transaction. False if another request has the key by now."""
    kept = connection.execute(
        upsert(connection, idempotency)
        .values(tenant=tenant, key=once.key, fingerprint=once.fingerprint, status=status, answer=answer, created=now())
        .on_conflict_do_nothing()
        .returning(idempotency.c.key)
    ).first()
    return kept is not None


def forget(connection: Connection, tenant: str, once: IdempotencyKey) -> None:
    connection.execute(delete(idempotency).where(*_is(tenant, once)))


def _is(tenant: str, once: IdempotencyKey) -> tuple[Any, Any]:
    return idempotency.c.tenant == tenant, idempotency.c.key == once.key
