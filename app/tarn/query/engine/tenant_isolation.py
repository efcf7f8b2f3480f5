"""Tenant isolation: after a query had to be killed, its tenant's queries run in a separate process for a while."""

import time
from collections.abc import Callable
from threading import Lock

import structlog

log = structlog.get_logger(__name__)

SECONDS = 600.0
"""How long a tenant is isolated after one of its queries had to be killed."""


class IsolatedTenants:
    """The set of tenants that are isolated now, in one API process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}
        self._lock = Lock()

    def __contains__(self, tenant: str) -> bool:
        return self._until.get(tenant, 0.0) > self._clock()

    def add(self, tenant: str) -> None:
        """Isolate a tenant from now on, and remove the tenants whose time is over."""
        now = self._clock()
        with self._lock:
            self._until = {name: until for name, until in self._until.items() if until > now} | {tenant: now + SECONDS}
        log.warning("a query had to be killed; isolating the queries of its tenant", tenant=tenant, seconds=SECONDS)
