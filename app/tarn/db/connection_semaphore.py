"""Per-tenant fair semaphore for the database connections of one process: no tenant can occupy the whole pool.

1. reserve  a quarter of the pool is for work without a tenant: admission, probes, the journal's writer
2. last     of the rest, the last free connection goes only to a tenant that holds none
3. next     a released connection goes to the tenant that holds the fewest, and within it to the thread that has waited
            longest
"""

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tarn.errors import Unavailable

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""The tenant of the current request; empty until the caller is authenticated."""


class ConnectionSemaphore:
    """Counts connections per tenant. Thread-safe; work without a tenant is not counted and never waits here."""

    def __init__(self, connections: int, timeout: float) -> None:
        self._most = max(1, connections - max(1, connections // 4))
        self._timeout = timeout
        self._lock = threading.Lock()
        self._taken = 0
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[threading.Event]] = {}

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold a permit for one connection. Raises Unavailable after the timeout."""
        tenant = TENANT.get()
        if not tenant:
            yield
            return
        self._acquire(tenant)
        try:
            yield
        finally:
            self._release(tenant)

    def _acquire(self, tenant: str) -> None:
        with self._lock:
            if self._may_have(tenant) and tenant not in self._waiting:
                self._take(tenant)
                return
            granted = threading.Event()
            self._waiting.setdefault(tenant, deque()).append(granted)
        if granted.wait(self._timeout):
            return
        with self._lock:
            # The permit may have been granted between the end of the wait and taking the lock.
            if granted.is_set():
                return
            self._waiting[tenant].remove(granted)
            if not self._waiting[tenant]:
                del self._waiting[tenant]
        raise Unavailable(
            f"tenant {tenant!r} has used its share of the database connections for {self._timeout:g} seconds: "
            "send fewer requests concurrently, or retry",
            retry_after=2,
        )

    def _release(self, tenant: str) -> None:
        with self._lock:
            self._taken -= 1
            self._held[tenant] -= 1
            if not self._held[tenant]:
                del self._held[tenant]
            while eligible := [waiter for waiter in self._waiting if self._may_have(waiter)]:
                following = min(eligible, key=lambda waiter: self._held[waiter])
                waiting = self._waiting[following]
                waiting.popleft().set()
                if not waiting:
                    del self._waiting[following]
                self._take(following)

    def _take(self, tenant: str) -> None:
        self._taken += 1
        self._held[tenant] += 1

    def _may_have(self, tenant: str) -> bool:
        return self._taken < (self._most - 1 if self._held[tenant] else self._most)
