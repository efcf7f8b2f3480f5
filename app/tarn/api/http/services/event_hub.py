"""Event hub: reads new events from the outbox once per process for all open event streams.

A follower asks for the page after its position. The hub serves it from its buffer of recent events, or from SQL if the
follower is further behind. So a client that reads nothing costs only its slot, no client waits for another, and all
followers together use one thread and one connection.
"""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
from anyio import move_on_after

from tarn.coordination.events import EventPage, EventReader
from tarn.db.notifications import ACCESS, EVENTS, Notifications
from tarn.db.outbox import OutboxEvent, OutboxPage
from tarn.errors import RateLimited, TarnError, Unavailable
from tarn.settings import Settings

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

MIN_INTERVAL = 0.01
"""Minimum seconds between two reads, so that many small transactions cause few of them."""

RETRY_SECONDS = 0.5
"""Seconds after which a read that failed is repeated."""

MAX_BUFFERED = 64
"""Recent events of a stream that are buffered for its followers."""


@dataclass
class WatchedStream:
    """A stream with followers: the number of its last known event, and its recent events."""

    last: int
    low: int
    """`recent` has all events above this number, up to `last`."""
    recent: deque[OutboxEvent] = field(default_factory=deque)
    followers: set["Follower"] = field(default_factory=set)

    def add(self, page: OutboxPage) -> None:
        if page.tail > self.last:
            # Events were expired before the hub read them: each follower reads from SQL, and reports `missed`.
            self.recent.clear()
            self.low = page.tail
        self.recent.extend(page.events)
        self.last = max(self.last, page.through)
        while len(self.recent) > MAX_BUFFERED:
            self.low = self.recent.popleft().number


class Hub:
    """The event hub of a process. Used on the event loop only; its queries run on its one thread."""

    def __init__(
        self, settings: Settings, events: EventReader, notifications: Notifications, stopping: threading.Event
    ) -> None:
        self._settings = settings
        self._notifications = notifications
        self._events = events
        self._stopping = stopping
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="events")
        self._watched: dict[str, WatchedStream] = {}
        self._polling: asyncio.Task[None] | None = None
        self._open: Counter[str] = Counter()
        self.revision = ""
        """The access revision at the last poll."""

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def open(self) -> int:
        """The number of open event streams."""
        return self._open.total()

    @contextmanager
    def slot(self, tenant: str) -> Iterator[None]:
        """Hold a slot for an event stream. Raises Unavailable, or RateLimited if the tenant has too many."""
        if self.open >= self._settings.event_streams:
            raise Unavailable(
                f"the limit of {self._settings.event_streams} open event streams is reached; retry later", retry_after=5
            )
        if self._open[tenant] >= self._settings.event_streams_per_tenant:
            limit = self._settings.event_streams_per_tenant
            raise RateLimited(
                f"the limit of {limit} open event streams of {tenant!r} is reached; close one", retry_after=5
            )
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run a short SQL query on the hub's thread. Raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @asynccontextmanager
    async def following(self, stream: str, job: str | None = None) -> AsyncIterator["Follower"]:
        """Register a follower of a stream, or of one job on it. Raises Unavailable."""
        last = await self.run(lambda: self._events.last_number(stream))
        watched = self._watched.setdefault(stream, WatchedStream(last, last))
        follower = Follower(self, watched, stream, job, 0 if job is not None else last)
        watched.followers.add(follower)
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll_forever())
        try:
            yield follower
        finally:
            watched.followers.discard(follower)
            if not watched.followers and self._watched.get(stream) is watched:
                del self._watched[stream]

    async def _poll_forever(self) -> None:
        """Read new events when there are some, while there are followers. Goes on while the database is unavailable."""
        interval = self._settings.event_poll
        try:
            with self._notifications.subscribed_on_loop([EVENTS, ACCESS]) as woken:
                # A follower may have read its stream before this subscription began.
                woken.set()
                while self._watched and not self.stopping:
                    with move_on_after(interval):
                        await woken.wait()
                        await asyncio.sleep(MIN_INTERVAL)
                    woken.clear()
                    interval = self._settings.event_poll
                    try:
                        if await self._poll_once():
                            woken.set()
                    except TarnError as error:
                        interval = min(interval, RETRY_SECONDS)
                        log.warning("cannot poll events; retrying", problem=error.slug)
                    except Exception:  # followers would never get another event
                        interval = min(interval, RETRY_SECONDS)
                        log.exception("polling events failed")
        finally:
            self._polling = None
            self._wake(self._watched.keys())

    async def _poll_once(self) -> bool:
        """Read a page of each stream with new events. Returns whether there are further events."""
        positions = {stream: watched.last for stream, watched in self._watched.items()}
        revision, pages = await self.run(lambda: self._events.after(positions))
        changed = revision != self.revision
        self.revision = revision
        for stream, page in pages.items():
            if (watched := self._watched.get(stream)) is not None:
                watched.add(page)
        self._wake(self._watched.keys() if changed else pages.keys())
        # A page that ends where it began is followed by an event of a kind that only a newer version can read.
        return any(positions[stream] < page.through < page.last for stream, page in pages.items())

    async def read(self, stream: str, above: int, job: str | None) -> EventPage:
        """Read a page from SQL. Raises Unavailable."""
        return await self.run(lambda: self._events.page(stream, above, job))

    def _wake(self, streams: Collection[str]) -> None:
        for stream in streams:
            if (watched := self._watched.get(stream)) is not None:
                for follower in watched.followers:
                    follower.woken.set()

    def close(self) -> None:
        self._thread.shutdown()


class Follower:
    """One client's subscription to a stream, or to one job on it."""

    def __init__(self, hub: Hub, watched: WatchedStream, stream: str, job: str | None, start: int) -> None:
        self.start = start
        """The number of the stream's last event when it began to follow; 0 if it follows a job."""
        self.woken = asyncio.Event()
        """Set when there are new events, the access revision has changed, or the server shuts down."""
        self._hub = hub
        self._watched = watched
        self._stream = stream
        self._job = job

    async def read(self, above: int) -> EventPage:
        """Read the page after a number from SQL. Raises Unavailable."""
        return await self._hub.read(self._stream, above, self._job)

    async def after(self, above: int) -> EventPage | None:
        """Return the page after a number, or None if no later event is known. Raises Unavailable."""
        watched = self._watched
        if above >= watched.last:
            return None
        if above < watched.low:
            event_page = await self.read(above)
            # The next event may be of a kind that only a newer version can read: then wait.
            page = event_page.page
            return None if max(page.through, page.tail) == above else event_page
        events = [each for each in watched.recent if each.number > above and self._job in (None, each.job)]
        return EventPage(OutboxPage(events, watched.last, 0, watched.last), self._hub.revision)
