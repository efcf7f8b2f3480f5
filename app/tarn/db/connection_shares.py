"""Connections of one process, shared between its tenants: none of them can keep all that there are.

1. reserve  a quarter is for work of no tenant: admission, probes, the journal's writer
2. last     of the rest, the last free one is only given to a tenant that has none
3. next     one that becomes free goes to the tenant that has the fewest, and of its threads to the one that waited
            longest
"""

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tarn.errors import Unavailable

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""Whose request this is; nobody's, until the caller is known."""


class TenantSemaphore:
    """Who has how many connections. Safe between threads; work of no tenant is not counted and never waits here."""

    def __init__(self, connections: int, timeout: float) -> None:
        self._most = max(1, connections - max(1, connections // 4))
        self._timeout = timeout
        self._lock = threading.Lock()
        self._taken = 0
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[threading.Event]] = {}

    @contextmanager
    def one(self) -> Iterator[None]:
        """Leave to have one connection. Raises Unavailable if that takes too long."""
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
            given = threading.Event()
            self._waiting.setdefault(tenant, deque()).append(given)
        if given.wait(self._timeout):
            return
        with self._lock:
            # It may have been given between the end of the wait and here.
            if given.is_set():
                return
            self._waiting[tenant].remove(given)
            if not self._waiting[tenant]:
                del self._waiting[tenant]
        raise Unavailable(
            f"all connections to the database that {tenant!r} may have at once have been in use for "
            f"{self._timeout:g} seconds",
            retry_after=2,
        )

    def _release(self, tenant: str) -> None:
        with self._lock:
            self._taken -= 1
            self._held[tenant] -= 1
            if not self._held[tenant]:
                del self._held[tenant]
            while able := [one for one in self._waiting if self._may_have(one)]:
                following = min(able, key=lambda one: self._held[one])
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
