"""API keys: `tarn_{id}_{secret}`, shown once and stored as a SHA-256 digest.

The secret has 256 random bits, so a fast digest is safe against guessing. The row is found by the id, and
its digest is then compared in constant time.
"""

import base64
import hashlib
import hmac
import secrets
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from tarn.access import tenants
from tarn.access.audit import AuditedAction
from tarn.access.revision import bump
from tarn.db.engine import Database
from tarn.db.tables import api_keys
from tarn.errors import Forbidden, KeyNotFound
from tarn.model.ids import now
from tarn.model.names import TenantName
from tarn.model.tenant import BOOTSTRAP_KEY, CreatedKey, Key, NewKey

PREFIX = "tarn"


class KeyService:
    """Lists, creates and revokes API keys. Each change and its audit record are one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def page(self, tenant: TenantName, after: str | None, limit: int) -> list[Key]:
        """Return a tenant's keys, sorted by id. Raises TenantNotFound."""
        query = select(api_keys).where(api_keys.c.tenant == tenant).order_by(api_keys.c.id).limit(limit)
        if after is not None:
            query = query.where(api_keys.c.id > after)
        with self._database.read() as connection:
            tenants.get(connection, tenant)
            return [_key(row) for row in connection.execute(query)]

    def create(self, tenant: TenantName, new: NewKey, act: AuditedAction) -> CreatedKey:
        """Create a key for a tenant. Only the result has its secret, which is not stored. Raises TenantNotFound."""
        key_id = base64.b32encode(secrets.token_bytes(10)).decode().lower()
        key = f"{PREFIX}_{key_id}_{secrets.token_urlsafe(32)}"
        with self._database.write() as connection:
            tenants.get(connection, tenant)
            insert_key(connection, key_id, tenant, new.label, key, new.expires)
            created = CreatedKey(**_get(connection, key_id).model_dump(), key=key)
            act.done(connection, target=f"keys/{created.id}", tenant=tenant)
        return created

    def revoke(self, key_id: str, act: AuditedAction) -> Key:
        """Revoke a key with immediate effect. Idempotent. Raises KeyNotFound, and Forbidden for the first key."""
        if key_id == BOOTSTRAP_KEY:
            raise Forbidden(
                "the administrator's first key cannot be revoked: replace it in TARN_ADMIN_KEY or in the key file"
            )
        with self._database.write() as connection:
            connection.execute(
                update(api_keys).where(api_keys.c.id == key_id, api_keys.c.revoked.is_(None)).values(revoked=now())
            )
            bump(connection)
            revoked = _get(connection, key_id)
            act.done(connection, tenant=revoked.tenant)
        return revoked


def insert_key(connection: Connection, key_id: str, tenant: str, label: str, key: str, expires: Any = None) -> None:
    """Insert the digest of a key in the caller's transaction."""
    connection.execute(
        insert(api_keys).values(
            id=key_id, tenant=tenant, label=label, digest=digest(key), created=now(), expires=expires
        )
    )
    bump(connection)


def verify(connection: Connection, presented: str) -> Key | None:
    """Return the stored record of a presented key; None if it is unknown or revoked. Does not check its expiry."""
    key_id = id_of(presented)
    row = connection.execute(select(api_keys).where(api_keys.c.id == key_id)).first()
    stored = row.digest if row is not None else digest("")
    matches = hmac.compare_digest(stored, digest(presented))
    if row is None or not matches or row.revoked is not None:
        return None
    return _key(row)


def known_id(connection: Connection, presented: str) -> str | None:
    """Return the id in a presented key if such a key exists, even if it is revoked or the secret is wrong."""
    key_id = id_of(presented)
    if key_id == BOOTSTRAP_KEY:
        return None  # any string without an id has this one
    return connection.execute(select(api_keys.c.id).where(api_keys.c.id == key_id)).scalar()


def id_of(presented: str) -> str:
    """Return the id in a key of the form above; any other string can only be the bootstrap key."""
    prefix, _, remainder = presented.partition("_")
    key_id, _, secret = remainder.partition("_")
    return key_id if prefix == PREFIX and key_id and secret else BOOTSTRAP_KEY


def digest(key: str) -> str:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _get(connection: Connection, key_id: str) -> Key:
    row = connection.execute(select(api_keys).where(api_keys.c.id == key_id)).first()
    if row is None:
        raise KeyNotFound(f"there is no key {key_id!r}")
    return _key(row)


def _key(row: Row[Any]) -> Key:
    return Key.model_validate(row._mapping, from_attributes=True)
