"""Limits of a tenant: how fast it may ask, and how much it may keep."""

import threading
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import BigInteger, BindParameter, Connection, Row, bindparam, func, or_, update

from tarn.access.revision import bump
from tarn.access.tenants import find_row
from tarn.db.tables import tenants
from tarn.errors import QuotaExceeded, RateLimited, TenantNotFound
from tarn.model.names import TenantName
from tarn.model.tenant import ADMIN, Identity, Limits, NewLimits
from tarn.settings import Settings


class RateLimiter:
    """Token buckets by name: `burst` at once, then `rate` a second. One process's share; safe between threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait(self, name: str, rate: float, burst: int) -> float:
        """Take a token and return 0, or take none and return the seconds until there is one."""
        with self._lock:
            moment = self._clock()
            tokens, since = self._buckets.get(name, (float(burst), moment))
            tokens = min(float(burst), tokens + (moment - since) * rate)
            taken = tokens >= 1
            self._buckets[name] = (tokens - 1 if taken else tokens, moment)
            return 0 if taken else (1 - tokens) / rate


def check_rate(rate: RateLimiter, caller: Identity) -> None:
    """Raise RateLimited, with the time to wait, if the caller's tenant asks too fast."""
    if caller.rate_limit == 0:
        return
    wait = rate.wait(caller.tenant, caller.rate_limit, caller.rate_burst)
    if wait:
        raise RateLimited(
            f"more than {caller.rate_limit:g} requests a second by tenant {caller.tenant!r}", retry_after=int(wait) + 1
        )


def of(connection: Connection, tenant: str, settings: Settings) -> Limits:
    """The limits in force for a tenant. Raises TenantNotFound."""
    row = find_row(connection, tenant)
    if row is None:
        raise TenantNotFound(f"there is no tenant {tenant!r}")
    return in_force(row, settings)


def in_force(row: Row[Any], settings: Settings) -> Limits:
    """The tenant's own limits, else the server's. The administrator has no rate: it could lock everybody out."""

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
    """Count this much as not used after all."""
    left = {
        "used_statements": tenants.c.used_statements - statements,
        "used_bytes": tenants.c.used_bytes - size,
    }
    connection.execute(update(tenants).where(tenants.c.name == tenant).values(**left))


def reserve(connection: Connection, tenant: TenantName, settings: Settings, statements: int = 0, size: int = 0) -> None:
    """Count this much as used, or raise QuotaExceeded and count nothing.

    One conditional update: of two requests that would fit alone but not together, one is refused.
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
    """Whether the tenant has a quota of bytes. Raises QuotaExceeded if it has no room for this many now.

    Counts nothing: it is for refusing early what `reserve` would refuse.
    """
    limits = of(connection, tenant, settings)
    if limits.quota_bytes is None:
        return False
    if size > 0 and limits.used_bytes + size > limits.quota_bytes:
        raise _exceeded(tenant, limits, 0, size)
    return True


def _exceeded(tenant: TenantName, limits: Limits, statements: int, size: int) -> QuotaExceeded:
    return QuotaExceeded(
        f"tenant {tenant!r} may keep {limits.quota_statements} statements and {limits.quota_bytes} bytes, has "
        f"{limits.used_statements} and {limits.used_bytes}, and asked for {statements} and {size} more",
        retry_after=60,
    )


NO_LIMIT = 2**63 - 1


def _parameter(name: str) -> BindParameter[int]:
    return bindparam(name, type_=BigInteger)


_RESERVE = (
    update(tenants)
    .where(
        tenants.c.name == bindparam("tenant"),
        # Who gives back, or asks for nothing, is not refused for being over the limit already.
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
"""Made once: every batch runs it."""
