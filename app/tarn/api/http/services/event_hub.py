"""New events, looked for once in a process for all who follow any.

A follower asks for the next page above what it has; it is given from what the hub found last, or read from SQL if it is
further behind. So a client that takes nothing costs nothing but its place, no client waits for another, and there are
no connections and no threads but one of the hub's own, however many follow.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import NamedTuple, TypeVar

import structlog

from tarn.access import revision
from tarn.db import outbox as events
from tarn.db.engine import Database
from tarn.db.outbox import OutboxEvent, Page
from tarn.errors import RateLimited, TarnError, Unavailable
from tarn.settings import Settings

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer")

MAX_BUFFERED = 64
"""Events of a stream that are kept for those who follow it."""

AT_ONCE = 100
"""Events that are read at once."""


class Found(NamedTuple):
    """Events that a follower has not had, and the access revision under which they were read."""

    page: Page
    revision: str


@dataclass
class WatchedStream:
    """A stream that somebody follows: how far it is known, and the last events of it."""

    last: int
    low: int
    """Above this number everything up to `last` is at hand."""
    recent: deque[OutboxEvent] = field(default_factory=deque)
    followers: set["Follower"] = field(default_factory=set)

    def add(self, page: Page) -> None:
        if page.tail > self.last:
            # What was given up before it was found here is for each follower to hear of.
            self.recent.clear()
            self.low = page.tail
        self.recent.extend(page.told)
        self.last = max(self.last, page.through)
        while len(self.recent) > MAX_BUFFERED:
            self.low = self.recent.popleft().number


class Hub:
    """What all streams of events of a process share. Of the event loop alone, but for its one thread."""

    def __init__(self, settings: Settings, database: Database, stopping: Event) -> None:
        self._settings = settings
        self._database = database
        self._stopping = stopping
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="events")
        self._watched: dict[str, WatchedStream] = {}
        self._looking: asyncio.Task[None] | None = None
        self._open: Counter[str] = Counter()
        self.revision = ""
        """The access revision at the last look."""

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def open(self) -> int:
        """Streams that are open."""
        return self._open.total()

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """A place among the streams that may be open. Raises Unavailable, or RateLimited for a tenant with too many."""
        if self.open >= self._settings.event_streams:
            raise Unavailable(f"{self._settings.event_streams} streams of events are open already", retry_after=5)
        if self._open[tenant] >= self._settings.event_streams_per_tenant:
            most = self._settings.event_streams_per_tenant
            raise RateLimited(f"{tenant!r} has {most} streams of events open already", retry_after=5)
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]

    async def run(self, work: Callable[[], Answer]) -> Answer:
        """What a look into SQL gives, made on the hub's thread. Raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @asynccontextmanager
    async def following(self, stream: str, job: str | None = None) -> AsyncIterator["Follower"]:
        """A follower of a stream, or of one job on it. Raises Unavailable."""
        last = await self.run(lambda: self._head(stream))
        watched = self._watched.setdefault(stream, WatchedStream(last, last))
        follower = Follower(self, watched, stream, job, 0 if job is not None else last)
        watched.followers.add(follower)
        if self._looking is None:
            self._looking = asyncio.create_task(self._keep_looking())
        try:
            yield follower
        finally:
            watched.followers.discard(follower)
            if not watched.followers and self._watched.get(stream) is watched:
                del self._watched[stream]

    async def _keep_looking(self) -> None:
        """Look again and again while anybody follows anything. A database that is away is waited for."""
        try:
            while self._watched and not self.stopping:
                await asyncio.sleep(self._settings.event_poll)
                try:
                    await self._look_once()
                except TarnError as error:
                    log.warning("cannot look for events", problem=error.slug)
                except Exception:  # whoever follows would never hear of anything again
                    log.exception("events could not be looked for")
        finally:
            self._looking = None
            self._wake(self._watched.keys())

    async def _look_once(self) -> None:
        wanted = {stream: watched.last for stream, watched in self._watched.items()}
        present, pages = await self.run(lambda: self._look(wanted))
        changed = present != self.revision
        self.revision = present
        for stream, page in pages.items():
            if (watched := self._watched.get(stream)) is not None:
                watched.add(page)
        self._wake(self._watched.keys() if changed else pages.keys())

    def _head(self, stream: str) -> int:
        with self._database.read() as connection:
            return events.heads(connection, [stream]).get(stream, 0)

    def _look(self, wanted: Mapping[str, int]) -> tuple[str, dict[str, Page]]:
        """The access revision, and what is new above these numbers, in one view. On the hub's thread."""
        with self._database.read() as connection:
            present = revision.current(connection)
            moved = [each for each, last in events.heads(connection, wanted.keys()).items() if last > wanted[each]]
            return present, {each: events.after(connection, each, wanted[each], AT_ONCE) for each in moved}

    async def read(self, stream: str, above: int, job: str | None) -> Found:
        """A page from SQL. Raises Unavailable."""

        def page() -> Found:
            with self._database.read() as connection:
                present = revision.current(connection)
                return Found(events.after(connection, stream, above, AT_ONCE, job), present)

        return await self.run(page)

    def _wake(self, streams: Collection[str]) -> None:
        for stream in streams:
            if (watched := self._watched.get(stream)) is not None:
                for follower in watched.followers:
                    follower.woken.set()

    def close(self) -> None:
        self._thread.shutdown()


class Follower:
    """One who follows a stream."""

    def __init__(self, hub: Hub, watched: WatchedStream, stream: str, job: str | None, begun: int) -> None:
        self.begun = begun
        """The number of the last event before it began to follow; of a job, before all of them."""
        self.woken = asyncio.Event()
        """Set when there is something new, or access has changed, or the server stops."""
        self._hub = hub
        self._watched = watched
        self._stream = stream
        self._job = job

    async def read(self, above: int) -> Found:
        """What is above a number, from SQL. Raises Unavailable."""
        return await self._hub.read(self._stream, above, self._job)

    async def after(self, above: int) -> Found | None:
        """What is above a number that was read; None: nothing that is known. Raises Unavailable."""
        watched = self._watched
        if above >= watched.last:
            return None
        if above < watched.low:
            found = await self.read(above)
            # What comes next may be for a newer version to tell: then it is waited for.
            return None if max(found.page.through, found.page.tail) == above else found
        told = [each for each in watched.recent if each.number > above and self._job in (None, each.job)]
        return Found(Page(told, watched.last, 0, watched.last), self._hub.revision)
