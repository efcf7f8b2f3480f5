"""Authentication: resolve an `Authorization` header to an identity."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from tarn.access import keys, limits, revision, tenants
from tarn.access.grants import held_by
from tarn.access.oidc import Issuer
from tarn.access.revision import RevisionCache
from tarn.db.engine import Database
from tarn.errors import Unauthenticated
from tarn.model.ids import now
from tarn.model.names import TenantName
from tarn.model.tenant import ADMIN, Identity
from tarn.settings import Settings

SCHEMES = frozenset({"bearer", "apikey", "token"})
"""Accepted schemes of the `Authorization` header, in lower case. `Token` is sent by yente."""

MAX_HEADER_LENGTH = 16_384
"""Maximum length of the header; a longer one cannot be a valid key or token."""


@dataclass(frozen=True, slots=True)
class CachedIdentity:
    """An authenticated identity and the expiry of its key."""

    identity: Identity
    expires: datetime | None = None

    def check_expiry(self) -> None:
        """Raise Unauthenticated if the key has expired. Call it for every request: expiry changes no revision."""
        if self.expires is not None and self.expires <= now():
            raise _refused(self.identity.key)


@dataclass(frozen=True, slots=True)
class AuthenticatedCaller:
    """An authenticated caller, and the read transaction of the authentication, for consistent further reads."""

    known: CachedIdentity
    connection: Connection
    revision: str

    @property
    def identity(self) -> Identity:
        return self.known.identity


class Authenticator:
    """Authenticates callers by API key, and by JWT if an issuer is configured."""

    def __init__(self, database: Database, settings: Settings, issuer: Issuer | None) -> None:
        self._database = database
        self._settings = settings
        self._issuer = issuer
        self._known: RevisionCache[CachedIdentity] = RevisionCache()

    @contextmanager
    def identified(self, header: str | None) -> Iterator[AuthenticatedCaller]:
        """Authenticate a caller. A revoked key or grant takes effect with the next request.

        1. token      parse the header; verify a JWT before taking a connection, as its issuer may be slow
        2. revision   read the access revision: one statement
        3. identity   use the one cached for this revision, or else read it
        4. expiry     check it every time, as expiry does not change the revision

        Raises Unauthenticated, with the same text whichever part was wrong, and Unavailable. A valid token of an
        administrator is rejected with a specific text, unless the settings allow it.
        """
        token = _token(header)
        is_jwt = self._is_jwt(token)
        tenant_and_label = self._issuer.tenant_of(token) if self._issuer is not None and is_jwt else None
        if is_jwt and tenant_and_label is None:
            raise _refused()
        with self._database.read() as connection:
            present = revision.current(connection)
            if tenant_and_label is not None:
                known = self._known.get(
                    present, tenant_and_label, lambda: CachedIdentity(self._identity(connection, *tenant_and_label))
                )
                self._check_administrator(known.identity)
            else:
                known = self._known.get(present, keys.digest(token), lambda: self._of_key(connection, token))
            known.check_expiry()
            yield AuthenticatedCaller(known, connection, present)

    def cache_key(self, header: str | None) -> str | None:
        """Return the cache key of an API key, which is its digest; None for a JWT, which is verified every time."""
        token = _token(header)
        return None if self._is_jwt(token) else keys.digest(token)

    def _is_jwt(self, token: str) -> bool:
        return self._issuer is not None and token.count(".") == 2

    def _check_administrator(self, identity: Identity) -> None:
        """Raise Unauthenticated for a token whose tenant administers the lake, unless the settings allow it.

        The claim that names the tenant is set by the issuer, where it may be a field that users edit. It must not be
        enough to become the administrator: neither by the name of the administrator's tenant nor by that of one which
        was granted `admin` on `*`.
        """
        if not self._settings.oidc_allow_admin and (identity.tenant == ADMIN or identity.administers_lake):
            raise Unauthenticated(
                f"the token names the tenant {str(identity.tenant)!r}, which administers the lake, and tokens of the "
                "OpenID Connect issuer may not do so: use an API key, or set TARN_OIDC_ALLOW_ADMIN=true on the server",
                key=identity.key or None,
            )

    def _of_key(self, connection: Connection, presented: str) -> CachedIdentity:
        key = keys.verify(connection, presented)
        if key is None:
            raise _refused(keys.known_id(connection, presented))
        return CachedIdentity(self._identity(connection, key.tenant, key.id), key.expires)

    def _identity(self, connection: Connection, name: TenantName, key: str) -> Identity:
        tenant = tenants.find_row(connection, name)
        if tenant is None or tenant.disabled:
            raise _refused(key or None)
        allowed = limits.in_force(tenant, self._settings)
        return Identity(
            tenant=name,
            key=key,
            grants=held_by(connection, name),
            rate_limit=allowed.rate_limit,
            rate_burst=allowed.rate_burst,
        )


def _token(header: str | None) -> str:
    if header is None or len(header) > MAX_HEADER_LENGTH:
        raise _refused()
    scheme, _, token = header.partition(" ")
    token = token.strip()
    if scheme.lower() not in SCHEMES or not token:
        raise _refused()
    return token


def _refused(key: str | None = None) -> Unauthenticated:
    detail = "send a valid key as `Authorization: Bearer <key>`, `ApiKey <key>` or `Token <key>`"
    return Unauthenticated(detail, key=key)
