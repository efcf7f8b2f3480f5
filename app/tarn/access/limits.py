"""Limits of a tenant: request rate and storage quota."""

import threading
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import BigInteger, BindParameter, Connection, Row, bindparam, func, or_, update

from tarn.access.audit import AuditedAction
from tarn.access.revision import bump
from tarn.access.tenants import find_row
from tarn.access.tenants import get as get_tenant
from tarn.db.engine import Database
from tarn.db.tables import tenants
from tarn.errors import QuotaExceeded, RateLimited, TenantNotFound
from tarn.model.names import TenantName
from tarn.model.tenant import ADMIN, Identity, Limits, NewLimits
from tarn.settings import Settings


class RateLimiter:
    """Token buckets by name: `burst` at once, then `rate` a second. Thread-safe; counts the requests of one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}

    def acquire(self, name: str, rate: float, burst: int) -> float:
        """Take a token and return 0, or take none and return the seconds until there is one."""
        with self._lock:
            moment = self._clock()
            tokens, since = self._buckets.get(name, (float(burst), moment))
            tokens = min(float(burst), tokens + (moment - since) * rate)
            is_acquired = tokens >= 1
            self._buckets[name] = (tokens - 1 if is_acquired else tokens, moment)
            return 0 if is_acquired else (1 - tokens) / rate


def check_rate(rate: RateLimiter, caller: Identity) -> None:
    """Raise RateLimited, with the time to wait, if the caller's tenant exceeds its rate limit."""
    if caller.rate_limit == 0:
        return
    seconds = rate.acquire(caller.tenant, caller.rate_limit, caller.rate_burst)
    if seconds:
        raise RateLimited(
            f"more than {caller.rate_limit:g} requests a second by tenant {caller.tenant!r}",
            retry_after=int(seconds) + 1,
        )


class LimitService:
    """Reads and replaces the limits of tenants."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    def get(self, tenant: TenantName) -> Limits:
        """Return the effective limits of a tenant and its usage. Raises TenantNotFound."""
        with self._database.read() as connection:
            return of(connection, tenant, self._settings)

    def replace(self, tenant: TenantName, new: NewLimits, act: AuditedAction) -> Limits:
        """Replace a tenant's own limits, and return its effective limits. Raises TenantNotFound."""
        with self._database.write() as connection:
            get_tenant(connection, tenant)
            set_limits(connection, tenant, new)
            act.done(connection, **new.model_dump())
            return of(connection, tenant, self._settings)


def of(connection: Connection, tenant: str, settings: Settings) -> Limits:
    """Return the effective limits of a tenant. Raises TenantNotFound."""
    row = find_row(connection, tenant)
    if row is None:
        raise TenantNotFound(f"there is no tenant {tenant!r}")
    return in_force(row, settings)


def in_force(row: Row[Any], settings: Settings) -> Limits:
    """Return the tenant's own limits, else the server's defaults. The administrator has no rate limit, because a low
    one would prevent anyone from raising it."""

    def own(name: str) -> object:
        value = getattr(row, name)
        return getattr(settings, name) if value is None else value

    return Limits.model_validate(
        {name: own(name) for name in NewLimits.model_fields}
        | ({"rate_limit": 0} if row.name == ADMIN else {})
        | {"used_statements": row.used_statements, "used_bytes": row.used_bytes}
    )


def set_limits(connection: Connection, tenant: TenantName, new: NewLimits) -> None:
    """Replace a tenant's own limits by these."""
    connection.execute(update(tenants).where(tenants.c.name == tenant).values(**new.model_dump()))
    bump(connection)


def release(connection: Connection, tenant: str, statements: int = 0, size: int = 0) -> None:
    """Release quota that was reserved."""
    values = {
        "used_statements": tenants.c.used_statements - statements,
        "used_bytes": tenants.c.used_bytes - size,
    }
    connection.execute(update(tenants).where(tenants.c.name == tenant).values(**values))


def reserve(connection: Connection, tenant: TenantName, settings: Settings, statements: int = 0, size: int = 0) -> None:
    """Reserve quota, or raise QuotaExceeded and reserve nothing.

    One conditional update: of two concurrent requests that fit alone but not together, one is rejected.
    """
    values = {
        "tenant": tenant,
        "statements": statements,
        "size": size,
        "most_statements": NO_LIMIT if settings.quota_statements is None else settings.quota_statements,
        "most_bytes": NO_LIMIT if settings.quota_bytes is None else settings.quota_bytes,
    }
    if connection.execute(_RESERVE, values).rowcount != 1:
        raise _exceeded(tenant, of(connection, tenant, settings), statements, size)


def require(connection: Connection, tenant: TenantName, settings: Settings, size: int) -> bool:
    """Return whether the tenant has a byte quota. Raises QuotaExceeded if this many bytes exceed it now.

    Reserves nothing: it rejects early what `reserve` would reject.
    """
    limits = of(connection, tenant, settings)
    if limits.quota_bytes is None:
        return False
    if size > 0 and limits.used_bytes + size > limits.quota_bytes:
        raise _exceeded(tenant, limits, 0, size)
    return True


def _exceeded(tenant: TenantName, limits: Limits, statements: int, size: int) -> QuotaExceeded:
    return QuotaExceeded(
        f"tenant {tenant!r} has used {limits.used_statements} of {_or_unlimited(limits.quota_statements)} statements "
        f"and {limits.used_bytes} of {_or_unlimited(limits.quota_bytes)} bytes, and requested {statements} and {size} "
        "more",
        retry_after=60,
    )


def _or_unlimited(quota: int | None) -> str:
    return "unlimited" if quota is None else str(quota)


NO_LIMIT = 2**63 - 1


def _parameter(name: str) -> BindParameter[int]:
    return bindparam(name, type_=BigInteger)


_RESERVE = (
    update(tenants)
    .where(
        tenants.c.name == bindparam("tenant"),
        # Releasing or reserving nothing is allowed even if the tenant is over its limit already.
        or_(
            _parameter("statements") <= 0,
            tenants.c.used_statements + _parameter("statements")
            <= func.coalesce(tenants.c.quota_statements, _parameter("most_statements")),
        ),
        or_(
            _parameter("size") <= 0,
            tenants.c.used_bytes + _parameter("size") <= func.coalesce(tenants.c.quota_bytes, _parameter("most_bytes")),
        ),
    )
    .values(
        used_statements=tenants.c.used_statements + _parameter("statements"),
        used_bytes=tenants.c.used_bytes + _parameter("size"),
    )
)
"""Built once, because every batch runs it."""
