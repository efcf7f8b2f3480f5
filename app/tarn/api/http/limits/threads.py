"""Thread pools for synchronous work. No pool waits for another.

- routes      synchronous routes and parts of async ones: AnyIO's default threads, shared among tenants by the
              per-tenant fair semaphore (`FairSemaphore`)
- admission   authentication and authorization; another pool records denials
- probes      `/readyz` and `/metrics`

Large bodies, files, fetches and queries have pools of their own (`ingest`, `body_feed`, `read_scheduling`).
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from anyio.to_thread import current_default_thread_limiter

from tarn.api.http.limits.tenant_semaphore import FairSemaphore, fair_semaphore, limiter

P = ParamSpec("P")
Result = TypeVar("Result")


class Threads:
    """A small thread pool of the event loop. Work that finds no free thread waits for one of this pool only."""

    def __init__(self, name: str, most: int) -> None:
        self._limiter: RunVar[CapacityLimiter] = RunVar(name)
        self._most = most

    async def run(self, work: Callable[P, Result], *args: P.args, **options: P.kwargs) -> Result:
        """Run a function on one of the pool's threads."""
        threads = limiter(self._limiter, self._most)
        return await to_thread.run_sync(lambda: work(*args, **options), limiter=threads)


ADMISSION = Threads("admission threads", 8)
"""For authentication and authorization, which read a few rows. A JWT may need its issuer's keys: one thread at a time
fetches them."""

AUDIT = Threads("audit threads", 2)
"""For audit records of denied callers without a tenant. A record is a write and waits for other writers; only the
denied request waits for it."""

READINESS = Threads("readiness threads", 1)
METRICS = Threads("metrics threads", 2)
"""Both routes are open to everyone, so neither may use up the threads of the other."""


def thread_slot() -> AbstractAsyncContextManager[None]:
    """Hold a slot of the route semaphore while using one of AnyIO's default threads, as synchronous routes do."""
    return fair_semaphore(_route_slots, int(current_default_thread_limiter().total_tokens)).slot()


async def run_in_threadpool(work: Callable[P, Result], *args: P.args, **options: P.kwargs) -> Result:
    """Run a function on a route thread, once its tenant gets a slot. Do not call it within a `thread_slot`."""
    async with thread_slot():
        return await to_thread.run_sync(lambda: work(*args, **options))


async def iterate_in_threadpool(items: Iterator[Result]) -> AsyncIterator[Result]:
    """Yield the items, computing each on a route thread."""
    done = object()
    while (item := await run_in_threadpool(lambda: next(items, done))) is not done:
        yield item  # type: ignore[misc]  # `done` is no item


_route_slots: RunVar[FairSemaphore] = RunVar("route threads")
