"""Who was let through, and the access revision that says whether it still holds, as an event loop asks for it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tarn.access import revision
from tarn.access.identity import CachedIdentity
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database


@dataclass(frozen=True, slots=True)
class Admission:
    """A caller that a route let through, and the dataset it let it through to."""

    known: CachedIdentity
    dataset: Dataset | None


class RevisionReader:
    """The revision that holds now: no older than the question.

    Whoever asks while it is being read shares the next reading, which begins after they asked; so any number of
    requests that arrive together cost one statement, and what was taken away before a request ends with it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="access revision")
        self._running: asyncio.Future[str] | None = None
        self._next: asyncio.Future[str] | None = None

    async def revision(self) -> str:
        """Raises Unavailable."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._read(self._running))
            self._next.add_done_callback(_consume_exception)
        # One that leaves must not take the reading away from the others.
        return await asyncio.shield(self._next)

    async def _read(self, before: "asyncio.Future[str] | None") -> str:
        if before is not None and not before.done():
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._current)

    def _current(self) -> str:
        with self._database.read() as connection:
            return revision.current(connection)


def _consume_exception(reading: "asyncio.Future[str]") -> None:
    """A failure is told to those who wait; if nobody does any more, it is no news."""
    if not reading.cancelled():
        reading.exception()
