"""Places that tenants share: threads, queries, streams. However many one of them asks for, the others get theirs.

1. reserve  the last free place is only given to a tenant that has none: whatever others do with their places, and for
            how long, the next tenant finds one
2. next     a place that becomes free goes to the tenant that has the fewest, and among those to the one that was
            given one the longest time ago
3. beside   where it is said so, a tenant may have that many and no more while another was there within a minute
4. turns    where each has few, a tenant that has more requests waiting does not have two in a row while one of another
            is under way, unless that takes long
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from anyio import CapacityLimiter
from anyio.lowlevel import RunVar

from tarn.db.connection_shares import TENANT

ACTIVE_SECONDS = 60.0
"""Seconds after which a tenant that was there is not there any more."""

REQUESTS, BESIDE = 1024, 1
"""Requests that a process works on at once, and those of a tenant beside another."""

REQUEST_SLOT_SECONDS = 0.1
"""Seconds after which a request is worked on elsewhere, if at all: its place on the event loop is free then."""


YIELD_SECONDS = 0.01
"""Seconds for which a tenant that had its turn lets another's request go on alone."""


class FairSemaphore:
    """The places of one kind that an event loop has, in which all of it is called."""

    def __init__(
        self,
        most: int,
        beside: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        one_at_a_time: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._capacity = most
        self._most = most
        self._beside = beside
        self._one_at_a_time = one_at_a_time
        """Which tenants may have one place and no more."""
        self._clock = clock
        self._held: dict[str, int] = {}
        self._taken = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._served: dict[str, int] = {}
        self._given = 0
        self._had_turn: tuple[str, float] | None = None
        """Who gave up a place last, and when, if it wants another at once."""
        self._seen: dict[str, float] = {}
        """When each tenant last asked for a place, the last one last."""

    @property
    def most(self) -> int:
        """How many may be taken at once, except that a tenant that has none may take any that is free.

        Those that are held beyond that are given up in their own time.
        """
        return self._most

    @most.setter
    def most(self, most: int) -> None:
        assert most <= self._capacity
        self._most = most
        self._give()

    @property
    def are_shared(self) -> bool:
        """Whether more than one tenant was here within the last minute."""
        return any(self._others(next(reversed(self._seen), "")))

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place for the tenant whose request this is, when it is its turn."""
        tenant = await self.acquire()
        try:
            yield
        finally:
            self.release(tenant)

    async def acquire(self) -> str:
        """Wait for a place, and return whom it was given to: with that it is released."""
        tenant = TENANT.get()
        self._see(tenant)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(tenant)
            raise
        return tenant

    def acquire_now(self) -> str | None:
        """Take a place if there is one for this tenant; None if not."""
        tenant = TENANT.get()
        self._see(tenant)
        if not self._may_have(tenant):
            return None
        self._take(tenant)
        return tenant

    def release(self, tenant: str) -> None:
        self._taken -= 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._had_turn = None
        if self._beside is not None and tenant in self._waiting:
            self._had_turn = tenant, self._clock()
            asyncio.get_running_loop().call_later(YIELD_SECONDS, self._give)
        self._give()

    def _give(self) -> None:
        while able := [tenant for tenant in self._waiting if self._may_have(tenant)]:
            tenant = min(able, key=lambda one: (self._held.get(one, 0), self._served.get(one, 0)))
            turns = self._waiting[tenant]
            turn = turns.popleft()
            if not turns:
                del self._waiting[tenant]
            if not turn.done():
                self._take(tenant)
                turn.set_result(None)

    def _take(self, tenant: str) -> None:
        self._taken += 1
        self._given += 1
        self._served[tenant] = self._given
        self._held[tenant] = self._held.get(tenant, 0) + 1

    def _may_have(self, tenant: str) -> bool:
        held = self._held.get(tenant, 0)
        if self._taken >= (min(self._most, self._capacity - 1) if held else self._capacity):
            return False
        if held and self._one_at_a_time(tenant):
            return False
        if self._beside is not None and held >= self._beside and any(self._others(tenant)):
            return False
        return not self._lets_others_go_on(tenant)

    def _lets_others_go_on(self, tenant: str) -> bool:
        if self._had_turn is None or not self._held.keys() - {tenant}:
            return False
        last, when = self._had_turn
        return last == tenant and self._clock() < when + YIELD_SECONDS

    def _others(self, tenant: str) -> Iterator[str]:
        """Those who were here within the last minute, besides this one."""
        since = self._clock() - ACTIVE_SECONDS
        for other, seen in reversed(self._seen.items()):
            if seen < since:
                return
            if other != tenant:
                yield other

    def _see(self, tenant: str) -> None:
        self._seen.pop(tenant, None)
        self._seen[tenant] = self._clock()
        oldest = next(iter(self._seen))
        if (
            self._seen[oldest] < self._clock() - ACTIVE_SECONDS
            and oldest not in self._held
            and oldest not in self._waiting
        ):
            del self._seen[oldest]
            self._served.pop(oldest, None)


def fair_semaphore(kept: RunVar[FairSemaphore], most: int, beside: int | None = None) -> FairSemaphore:
    """The event loop's own, made when they are first asked for."""
    try:
        return kept.get()
    except LookupError:
        kept.set(FairSemaphore(most, beside))
        return kept.get()


def limiter(kept: RunVar[CapacityLimiter], most: int) -> CapacityLimiter:
    """A limit of the event loop's own, made when it is first asked for."""
    try:
        return kept.get()
    except LookupError:
        kept.set(CapacityLimiter(most))
        return kept.get()


@asynccontextmanager
async def worked_on() -> AsyncIterator[bool]:
    """A place among the requests that are worked on, for as long as this one is, and no longer than a moment.

    Tells whether tenants are beside each other.
    """
    requests = fair_semaphore(_requests, REQUESTS, BESIDE)
    tenant, is_over = await requests.acquire(), False

    def leave() -> None:
        nonlocal is_over
        if not is_over:
            is_over = True
            requests.release(tenant)

    moment = asyncio.get_running_loop().call_later(REQUEST_SLOT_SECONDS, leave)
    try:
        yield requests.are_shared
    finally:
        moment.cancel()
        leave()


_requests: RunVar[FairSemaphore] = RunVar("requests")
