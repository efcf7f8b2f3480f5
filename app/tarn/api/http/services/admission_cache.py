"""Cached admissions, and the access revision that invalidates them, for use on the event loop."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tarn.access.identity import CachedIdentity
from tarn.access.revision import read_current
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database


@dataclass(frozen=True, slots=True)
class Admission:
    """A caller that a route admitted, and the dataset it was admitted to."""

    known: CachedIdentity
    dataset: Dataset | None


class RevisionReader:
    """Reads the current access revision, never one older than the request for it.

    Requests that arrive during a read share the next read, which begins after they arrived. So any number of concurrent
    requests cost one SQL query, and access that was revoked before a request does not apply to it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="access revision")
        self._running: asyncio.Future[str] | None = None
        self._next: asyncio.Future[str] | None = None

    async def revision(self) -> str:
        """Return the current access revision. Raises Unavailable."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._read(self._running))
            self._next.add_done_callback(_consume_exception)
        # Shielded: a cancelled request must not cancel the read that others share.
        return await asyncio.shield(self._next)

    async def _read(self, before: "asyncio.Future[str] | None") -> str:
        if before is not None and not before.done():
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read_current)

    def _read_current(self) -> str:
        return read_current(self._database)


def _consume_exception(reading: "asyncio.Future[str]") -> None:
    """Mark the exception as retrieved: if no request waits any more, asyncio must not log it."""
    if not reading.cancelled():
        reading.exception()
