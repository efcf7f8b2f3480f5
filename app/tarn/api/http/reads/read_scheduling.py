"""Read scheduling: limits concurrent reads, and lowers the limit while the server ingests large bodies.

Reads that never pause use all processors, and slowed concurrent ingest down to a third of its pace. Delaying a read
costs it a few milliseconds; delaying a body costs it the time of every read before it.

There are two kinds of reads, each with its own semaphore. A point lookup of one entity takes a millisecond or two, and
waits for no query. A query may scan everything: its thread waits for a low-priority process
(`tarn.query.engine.engine`).
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

from tarn.api.http.limits.tenant_semaphore import FairSemaphore
from tarn.api.http.services.container import Services

Result = TypeVar("Result")

THROTTLE_SECONDS = 0.05
"""Seconds after a body for which the lower limit stays in force: its client usually sends another."""

PAUSE_FACTOR = 1.0
"""Time for which a slot stays empty after a read during ingest, as a multiple of the time that the read took."""


class ReadScheduler:
    """The read scheduler of one event loop. Not thread-safe: call it on that loop only."""

    def __init__(self, limit: int, is_isolated: Callable[[str], bool] = lambda _: False) -> None:
        self._queries = FairSemaphore(limit, one_at_a_time=is_isolated)
        self._query_threads = CapacityLimiter(limit)
        self._lookups = FairSemaphore(limit)
        self._lookup_threads = CapacityLimiter(limit)
        self._full_limit = limit
        self._limit_during_ingest = min(limit, max(1, (os.cpu_count() or 1) // 2))
        self._bodies = 0

    @property
    def limit(self) -> int:
        """The current limit of concurrent reads of each kind. Waiting reads hold no thread."""
        return self._queries.limit

    async def query(self, work: Callable[[], Result]) -> Result:
        """Run a query, which may take long, on a thread, once its tenant gets a slot."""
        return await self._scheduled(self._queries, lambda: to_thread.run_sync(work, limiter=self._query_threads))

    async def look_up(self, work: Callable[[], Result]) -> Result:
        """Run a point lookup on a thread, once its tenant gets a slot."""
        return await self._scheduled(self._lookups, lambda: to_thread.run_sync(work, limiter=self._lookup_threads))

    async def _scheduled(self, semaphore: FairSemaphore, run: Callable[[], Awaitable[Result]]) -> Result:
        loop = asyncio.get_running_loop()
        tenant = await semaphore.acquire()
        start = loop.time()
        try:
            return await run()
        finally:
            if self.limit < self._full_limit:
                loop.call_later(PAUSE_FACTOR * (loop.time() - start), semaphore.release, tenant)
            else:
                semaphore.release(tenant)

    @contextmanager
    def body(self) -> Iterator[None]:
        """Lower the limit of concurrent reads while the server ingests a large body."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Restore the limit while the server waits for the body's client, however long that takes."""
        self._end()
        try:
            yield
        finally:
            self._begin()

    def _begin(self) -> None:
        self._bodies += 1
        self._queries.limit = self._lookups.limit = self._limit_during_ingest

    def _end(self) -> None:
        asyncio.get_running_loop().call_later(THROTTLE_SECONDS, self._over)

    def _over(self) -> None:
        self._bodies -= 1
        if not self._bodies:
            self._queries.limit = self._lookups.limit = self._full_limit


_scheduler: RunVar[ReadScheduler] = RunVar("read scheduler")


def read_scheduler(services: Services) -> ReadScheduler:
    """Return the event loop's read scheduler; the first call creates it."""
    try:
        return _scheduler.get()
    except LookupError:
        _scheduler.set(ReadScheduler(services.settings.query_slots, services.reader.is_isolated))
        return _scheduler.get()
