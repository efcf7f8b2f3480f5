"""API keys: `tarn_{id}_{secret}`, shown once and stored as a SHA-256 digest.

The secret has 256 random bits, so a fast digest cannot be guessed through; the id finds the row without
comparing secrets, and the digest is then compared in constant time.
"""

import base64
import hashlib
import hmac
import secrets
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from tarn.access.revision import bump
from tarn.db.tables import api_keys
from tarn.errors import Forbidden, KeyNotFound
from tarn.model.ids import now
from tarn.model.names import TenantName
from tarn.model.tenant import BOOTSTRAP_KEY, CreatedKey, Key, NewKey

PREFIX = "tarn"


def create(connection: Connection, tenant: TenantName, new: NewKey) -> CreatedKey:
    """Make a key for a tenant. The answer is the only place where it ever stands."""
    key_id = base64.b32encode(secrets.token_bytes(10)).decode().lower()
    key = f"{PREFIX}_{key_id}_{secrets.token_urlsafe(32)}"
    insert_key(connection, key_id, tenant, new.label, key, new.expires)
    return CreatedKey(**_get(connection, key_id).model_dump(), key=key)


def insert_key(connection: Connection, key_id: str, tenant: str, label: str, key: str, expires: Any = None) -> None:
    connection.execute(
        insert(api_keys).values(
            id=key_id, tenant=tenant, label=label, digest=digest(key), created=now(), expires=expires
        )
    )
    bump(connection)


def verify(connection: Connection, presented: str) -> Key | None:
    """What is stored of a presented key, or None if it is unknown or revoked. Whether it has expired is not asked."""
    key_id = id_of(presented)
    row = connection.execute(select(api_keys).where(api_keys.c.id == key_id)).first()
    stored = row.digest if row is not None else digest("")
    matches = hmac.compare_digest(stored, digest(presented))
    if row is None or not matches or row.revoked is not None:
        return None
    return _key(row)


def known_id(connection: Connection, presented: str) -> str | None:
    """The id that a presented key claims, if a key of ours has it, be it revoked or the secret wrong."""
    key_id = id_of(presented)
    if key_id == BOOTSTRAP_KEY:
        return None  # any string at all would claim it
    return connection.execute(select(api_keys.c.id).where(api_keys.c.id == key_id)).scalar()


def id_of(presented: str) -> str:
    """The id inside a key of our form; any other string can only be the operator's own key."""
    prefix, _, rest = presented.partition("_")
    key_id, _, secret = rest.partition("_")
    return key_id if prefix == PREFIX and key_id and secret else BOOTSTRAP_KEY


def digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _get(connection: Connection, key_id: str) -> Key:
    row = connection.execute(select(api_keys).where(api_keys.c.id == key_id)).first()
    if row is None:
        raise KeyNotFound(f"there is no key {key_id!r}")
    return _key(row)


def page(connection: Connection, tenant: TenantName, after: str | None, limit: int) -> list[Key]:
    query = select(api_keys).where(api_keys.c.tenant == tenant).order_by(api_keys.c.id).limit(limit)
    if after is not None:
        query = query.where(api_keys.c.id > after)
    return [_key(row) for row in connection.execute(query)]


def revoke(connection: Connection, key_id: str) -> Key:
    """End a key at once. Revoking it again changes nothing."""
    if key_id == BOOTSTRAP_KEY:
        raise Forbidden("the administrator's first key is set by TARN_ADMIN_KEY or its file, and replaced there")
    connection.execute(
        update(api_keys).where(api_keys.c.id == key_id, api_keys.c.revoked.is_(None)).values(revoked=now())
    )
    bump(connection)
    return _get(connection, key_id)


def _key(row: Row[Any]) -> Key:
    return Key.model_validate(row._mapping, from_attributes=True)
