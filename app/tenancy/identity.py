"""From an `Authorization` header to an identity."""

from sqlalchemy import Connection, select

from app.db.engine import Database
from app.db.tables import grants
from app.errors import Unauthenticated
from app.model.names import DatasetPattern, TenantName
from app.model.tenant import Identity, Level
from app.settings import Settings
from app.tenancy import keys, limits, tenants
from app.tenancy.oidc import Issuer

LONGEST = 16_384
"""A header longer than this is no key and no token of ours."""


class Authenticator:
    """Knows callers by API key, and by JWT when an issuer is configured."""

    def __init__(self, database: Database, settings: Settings, issuer: Issuer | None) -> None:
        self._database = database
        self._settings = settings
        self._issuer = issuer

    def identify(self, header: str | None) -> Identity:
        """The caller's identity, read afresh: a revoked key or grant ends with the next request.

        Raises Unauthenticated, with the same words whichever part was wrong.
        """
        token = _token(header)
        if self._issuer is not None and token.count(".") == 2:
            tenant, key = self._issuer.tenant_of(token)
            with self._database.read() as connection:
                return self._identity(connection, tenant, key)
        with self._database.read() as connection:
            verified = keys.verify(connection, token)
            if verified is None:
                raise _refused()
            return self._identity(connection, *verified)

    def _identity(self, connection: Connection, tenant: TenantName, key: str) -> Identity:
        found = tenants.find(connection, tenant)
        if found is None or found.disabled:
            raise _refused()
        rows = connection.execute(select(grants.c.dataset, grants.c.level).where(grants.c.tenant == tenant))
        return Identity(
            tenant=tenant,
            key=key,
            grants=tuple((DatasetPattern(dataset), Level(level)) for dataset, level in rows),
            limits=limits.of(connection, tenant, self._settings),
        )


def _token(header: str | None) -> str:
    if header is None or len(header) > LONGEST:
        raise _refused()
    scheme, _, token = header.partition(" ")
    token = token.strip()
    if scheme.lower() not in ("bearer", "apikey") or not token:
        raise _refused()
    return token


def _refused() -> Unauthenticated:
    return Unauthenticated("send a valid key as `Authorization: Bearer <key>` or `Authorization: ApiKey <key>`")
