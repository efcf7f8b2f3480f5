"""Tenants whose queries run in another process than those of all others, for a while."""

import time
from collections.abc import Callable
from threading import Lock

import structlog

log = structlog.get_logger(__name__)

SECONDS = 600.0
"""How long a tenant is confined after a query of it had to be killed."""


class IsolatedTenants:
    """The tenants of one process that are confined now. Safe to share between threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}
        self._lock = Lock()

    def __contains__(self, tenant: str) -> bool:
        return self._until.get(tenant, 0.0) > self._clock()

    def add(self, tenant: str) -> None:
        """Confine a tenant from now on. Whoever has been confined long enough is forgotten."""
        now = self._clock()
        with self._lock:
            self._until = {one: until for one, until in self._until.items() if until > now} | {tenant: now + SECONDS}
        log.warning("queries of a tenant are confined to a process of their own", tenant=tenant, seconds=SECONDS)
