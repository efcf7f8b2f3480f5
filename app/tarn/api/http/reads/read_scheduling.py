"""Whose turn it is: how many reads run at once, and fewer of them while the server works on large bodies.

Readers that never pause take all the processors there are, and left whoever wrote beside them a third of its pace. A
read that stands back waits for a few milliseconds; a body that does waits for every one of them.

Reads are of two kinds, each with places of its own. A look at one entity is over in a millisecond or two, and waits for
no query. A query may go through everything there is: its thread waits for a process that stands back for whatever is
brief (`tarn.query.engine`).
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
"""Seconds after a body for which reads still stand back: whoever sent it sends another, as a rule."""

PAUSE_FACTOR = 1.0
"""How long a place is left empty after a read beside a body, as a share of the time that the read took."""


class ReadScheduler:
    """The turns of one event loop, in which all of it is called."""

    def __init__(self, most: int, is_confined: Callable[[str], bool] = lambda _: False) -> None:
        self._queries = FairSemaphore(most, one_at_a_time=is_confined)
        self._query_threads = CapacityLimiter(most)
        self._looks = FairSemaphore(most)
        self._look_threads = CapacityLimiter(most)
        self._most = most
        self._beside_bodies = min(most, max(1, (os.cpu_count() or 1) // 2))
        self._bodies = 0

    @property
    def at_once(self) -> int:
        """Reads of a kind that run at once now: more wait for their turn, and take no thread that others need."""
        return self._queries.most

    async def query(self, work: Callable[[], Result]) -> Result:
        """Run what may take long, on a thread, when it is its turn."""
        return await self._in_turn(self._queries, lambda: to_thread.run_sync(work, limiter=self._query_threads))

    async def look(self, work: Callable[[], Result]) -> Result:
        """Run what is over in a moment, on a thread, when it is its turn."""
        return await self._in_turn(self._looks, lambda: to_thread.run_sync(work, limiter=self._look_threads))

    async def _in_turn(self, places: FairSemaphore, run: Callable[[], Awaitable[Result]]) -> Result:
        loop = asyncio.get_running_loop()
        tenant = await places.acquire()
        begun = loop.time()
        try:
            return await run()
        finally:
            if self.at_once < self._most:
                loop.call_later(PAUSE_FACTOR * (loop.time() - begun), places.release, tenant)
            else:
                places.release(tenant)

    @contextmanager
    def body(self) -> Iterator[None]:
        """Let reads stand back while the server works on a large body."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let them go on while it waits for the body's client, who may take as long as it likes."""
        self._end()
        try:
            yield
        finally:
            self._begin()

    def _begin(self) -> None:
        self._bodies += 1
        self._queries.most = self._looks.most = self._beside_bodies

    def _end(self) -> None:
        asyncio.get_running_loop().call_later(THROTTLE_SECONDS, self._over)

    def _over(self) -> None:
        self._bodies -= 1
        if not self._bodies:
            self._queries.most = self._looks.most = self._most


_turns: RunVar[ReadScheduler] = RunVar("turns")


def read_scheduler(house: Services) -> ReadScheduler:
    """The event loop's own, made when it is first asked for."""
    try:
        return _turns.get()
    except LookupError:
        _turns.set(ReadScheduler(house.settings.query_slots, house.reader.is_confined))
        return _turns.get()
