"""Per-tenant fair semaphore for threads, queries and streams: no tenant can use up the slots of the others.

1. reserve  the last free slot is given only to a tenant that holds none: however long others hold theirs, the next
            tenant finds one
2. next     a released slot goes to the waiting tenant that holds the fewest; among equals, to the one whose last
            acquisition is the oldest
3. share    with `limit_while_shared`, a tenant may hold at most that many slots while another tenant was active within
            the last minute
4. yield    with `limit_while_shared`, a tenant that has just released a slot and has more requests waiting gets no new
            slot for `YIELD_SECONDS` seconds while another tenant holds one
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from anyio import CapacityLimiter
from anyio.lowlevel import RunVar

from tarn.db.connection_semaphore import TENANT

ACTIVE_SECONDS = 60.0
"""Seconds after its last request until a tenant no longer counts as active."""

REQUESTS, REQUESTS_WHILE_SHARED = 1024, 1
"""Requests that a process handles at once, and those of one tenant while another is active."""

REQUEST_SLOT_SECONDS = 0.1
"""Seconds after which a request gives back its slot on the event loop: whatever still runs then runs elsewhere."""


YIELD_SECONDS = 0.01
"""Seconds for which a tenant that released a slot gets no new one while another tenant holds one."""


class FairSemaphore:
    """A fair semaphore of one event loop. Not thread-safe: call it on that loop only."""

    def __init__(
        self,
        limit: int,
        limit_while_shared: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        one_at_a_time: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._capacity = limit
        self._limit = limit
        self._limit_while_shared = limit_while_shared
        self._one_at_a_time = one_at_a_time
        """Whether a tenant may hold only one slot."""
        self._clock = clock
        self._held: dict[str, int] = {}
        self._taken = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._last_grant: dict[str, int] = {}
        self._grants = 0
        self._last_release: tuple[str, float] | None = None
        """The tenant that released a slot last, and when, if it has more requests waiting."""
        self._last_active: dict[str, float] = {}
        """When each tenant last asked for a slot, in that order."""

    @property
    def limit(self) -> int:
        """The number of slots that may be held at once; a tenant that holds none may exceed it, up to the capacity.

        Lowering it revokes nothing: slots beyond it are released when their work ends.
        """
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        assert limit <= self._capacity
        self._limit = limit
        self._grant_free_slots()

    @property
    def is_shared(self) -> bool:
        """Whether more than one tenant was active within the last minute."""
        return any(self._others(next(reversed(self._last_active), "")))

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot for the tenant of the current request, after waiting for one."""
        tenant = await self.acquire()
        try:
            yield
        finally:
            self.release(tenant)

    async def acquire(self) -> str:
        """Wait for a slot and return the tenant that holds it, which `release` takes."""
        tenant = TENANT.get()
        self._mark_active(tenant)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(waiter)
        self._grant_free_slots()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release(tenant)
            raise
        return tenant

    def acquire_now(self) -> str | None:
        """Take a slot without waiting. Return None if there is none for this tenant."""
        tenant = TENANT.get()
        self._mark_active(tenant)
        if not self._may_acquire(tenant):
            return None
        self._grant(tenant)
        return tenant

    def release(self, tenant: str) -> None:
        """Release a slot that this tenant holds."""
        self._taken -= 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._last_release = None
        if self._limit_while_shared is not None and tenant in self._waiting:
            self._last_release = tenant, self._clock()
            asyncio.get_running_loop().call_later(YIELD_SECONDS, self._grant_free_slots)
        self._grant_free_slots()

    def _grant_free_slots(self) -> None:
        while eligible := [tenant for tenant in self._waiting if self._may_acquire(tenant)]:
            tenant = min(eligible, key=lambda name: (self._held.get(name, 0), self._last_grant.get(name, 0)))
            waiters = self._waiting[tenant]
            waiter = waiters.popleft()
            if not waiters:
                del self._waiting[tenant]
            if not waiter.done():
                self._grant(tenant)
                waiter.set_result(None)

    def _grant(self, tenant: str) -> None:
        self._taken += 1
        self._grants += 1
        self._last_grant[tenant] = self._grants
        self._held[tenant] = self._held.get(tenant, 0) + 1

    def _may_acquire(self, tenant: str) -> bool:
        permits = self._held.get(tenant, 0)
        if self._taken >= (min(self._limit, self._capacity - 1) if permits else self._capacity):
            return False
        if permits and self._one_at_a_time(tenant):
            return False
        if self._limit_while_shared is not None and permits >= self._limit_while_shared and any(self._others(tenant)):
            return False
        return not self._must_yield(tenant)

    def _must_yield(self, tenant: str) -> bool:
        if self._last_release is None or not self._held.keys() - {tenant}:
            return False
        last, released_at = self._last_release
        return last == tenant and self._clock() < released_at + YIELD_SECONDS

    def _others(self, tenant: str) -> Iterator[str]:
        """Yield the other tenants that were active within the last minute."""
        since = self._clock() - ACTIVE_SECONDS
        for other, last_active in reversed(self._last_active.items()):
            if last_active < since:
                return
            if other != tenant:
                yield other

    def _mark_active(self, tenant: str) -> None:
        self._last_active.pop(tenant, None)
        self._last_active[tenant] = self._clock()
        oldest = next(iter(self._last_active))
        if (
            self._last_active[oldest] < self._clock() - ACTIVE_SECONDS
            and oldest not in self._held
            and oldest not in self._waiting
        ):
            del self._last_active[oldest]
            self._last_grant.pop(oldest, None)


def fair_semaphore(variable: RunVar[FairSemaphore], limit: int, limit_while_shared: int | None = None) -> FairSemaphore:
    """Return the event loop's semaphore of this name; the first call creates it."""
    try:
        return variable.get()
    except LookupError:
        variable.set(FairSemaphore(limit, limit_while_shared))
        return variable.get()


def limiter(variable: RunVar[CapacityLimiter], limit: int) -> CapacityLimiter:
    """Return the event loop's capacity limiter of this name; the first call creates it."""
    try:
        return variable.get()
    except LookupError:
        variable.set(CapacityLimiter(limit))
        return variable.get()


@asynccontextmanager
async def request_slot() -> AsyncIterator[bool]:
    """Hold a request slot while the request is handled, for at most `REQUEST_SLOT_SECONDS` seconds.

    Yields whether several tenants are active.
    """
    requests = fair_semaphore(_requests, REQUESTS, REQUESTS_WHILE_SHARED)
    tenant, is_released = await requests.acquire(), False

    def release() -> None:
        nonlocal is_released
        if not is_released:
            is_released = True
            requests.release(tenant)

    timer = asyncio.get_running_loop().call_later(REQUEST_SLOT_SECONDS, release)
    try:
        yield requests.is_shared
    finally:
        timer.cancel()
        release()


_requests: RunVar[FairSemaphore] = RunVar("requests")
