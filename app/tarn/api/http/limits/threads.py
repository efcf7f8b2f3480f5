"""Threads for synchronous work, in pools that never wait for each other.

- routes      what routes do, those that are plain functions included: as many threads as AnyIO has by default, which
              tenants share as they share everything (`FairSemaphore`)
- admission   finding out who calls, and recording whom we refused
- probes      `/readyz` and `/metrics`

Large bodies, files, fetches and queries have threads of their own (`feeding`, `ingest`, `turns`).
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
    """A few threads of the event loop's own. Who finds none free waits for one of these and for no others."""

    def __init__(self, name: str, most: int) -> None:
        self._kept: RunVar[CapacityLimiter] = RunVar(name)
        self._most = most

    async def run(self, work: Callable[P, Result], *args: P.args, **options: P.kwargs) -> Result:
        """Run a function on one of them."""
        threads = limiter(self._kept, self._most)
        return await to_thread.run_sync(lambda: work(*args, **options), limiter=threads)


ADMISSION = Threads("admission threads", 8)
"""Admission reads a few rows. A JWT may need its issuer's keys, and then one thread at a time asks for them."""

AUDIT = Threads("audit threads", 2)
"""For records of refused callers that are no tenant's. A record is a write and waits for other writers, and nobody but
who was refused waits for it."""

READINESS = Threads("readiness threads", 1)
METRICS = Threads("metrics threads", 2)
"""Anybody may ask for both, so neither may take the threads of the other."""


def thread_slot() -> AbstractAsyncContextManager[None]:
    """A place for what then takes one of AnyIO's default threads, as FastAPI does for routes that are not async."""
    return fair_semaphore(_places, int(current_default_thread_limiter().total_tokens)).place()


async def run_in_threadpool(work: Callable[P, Result], *args: P.args, **options: P.kwargs) -> Result:
    """Run a part of a route on a thread, when it is its tenant's turn. Not from within a `thread_slot`."""
    async with thread_slot():
        return await to_thread.run_sync(lambda: work(*args, **options))


async def iterate_in_threadpool(items: Iterator[Result]) -> AsyncIterator[Result]:
    """The items, each made on a thread when it is its tenant's turn."""
    done = object()
    while (item := await run_in_threadpool(lambda: next(items, done))) is not done:
        yield item  # type: ignore[misc]  # `done` is no item


_places: RunVar[FairSemaphore] = RunVar("route threads")
