"""Server-sent events response: streams events to one client while the client has access.

start       the event number to start after (`since` or `Last-Event-ID`; without one, the current head)
page        read the events after the last number sent, and send those that the client may see
access      check the client's access again whenever the access revision differs from the one that the page was read
            under: a revoked grant ends the stream with the next page, or with the next poll of the hub if there is none
heartbeat   while there are no events, send a comment with the number up to which there were none
end         at shutdown, when the job has ended, when the dataset is deleted, and after an hour: a client that reads
            nothing and is sent little would not be noticed otherwise. EventSource clients reconnect automatically
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import structlog
from anyio import move_on_after
from fastapi import Response
from starlette.types import Receive, Scope, Send

from tarn.access.identity import CachedIdentity
from tarn.api.http.limits.threads import ADMISSION
from tarn.api.http.middleware.protocol import ABORT
from tarn.api.http.services.container import Services
from tarn.api.http.services.event_hub import RETRY_SECONDS, Follower
from tarn.api.http.streaming.stream_response import ClientStalled
from tarn.coordination.events import EventPage
from tarn.datasets import registry
from tarn.datasets.registry import Dataset
from tarn.db import outbox
from tarn.db.outbox import OutboxEvent
from tarn.errors import BodyTimeout, TarnError, Unauthenticated
from tarn.model.tenant import Identity
from tarn.model.work.event import EventKind

MEDIA_TYPE = "text/event-stream"

RETRY = b"retry: 2000\n\n"
"""Tells the client to reconnect after this many milliseconds."""

log = structlog.get_logger(__name__)


class StreamAccess(NamedTuple):
    """A client's access as of one access revision."""

    revision: str
    known: CachedIdentity
    deleted: bool
    """Whether the dataset is deleted. The events up to its deletion may still be sent."""


@dataclass(frozen=True)
class Listener:
    """A subscription: the client's credentials, and the dataset or job whose events it reads."""

    services: Services
    authorization: str | None
    stream: str
    dataset: Dataset | None
    job: str | None = None
    kinds: frozenset[EventKind] = frozenset()
    """Send only events of these kinds; empty: of all kinds."""

    @property
    def has_token(self) -> bool:
        """Whether the client authenticates with a JWT. A JWT expires without a change of the access revision."""
        return self.services.authenticator.cache_key(self.authorization) is None

    def access(self) -> StreamAccess:
        """Return the client's current access. Raises Unauthenticated if it has none, and Unavailable."""
        with self.services.authenticator.identified(self.authorization) as authenticated:
            deleted = False
            if self.dataset is not None:
                if authenticated.identity.level_on(self.dataset.name) is None:
                    raise Unauthenticated("the grant was revoked")
                current = registry.find(authenticated.connection, self.dataset.name)
                deleted = current is None or current.id != self.dataset.id
            return StreamAccess(authenticated.revision, authenticated.known, deleted)

    def accepts(self, identity: Identity, event: OutboxEvent) -> bool:
        """Return whether the client may see this event and asked for its kind."""
        if self.kinds and event.kind not in self.kinds and event.kind is not EventKind.MISSED:
            return False
        return event.audience is None or identity.tenant in event.audience or identity.administers_lake


class EventStream(Response):
    """A `text/event-stream` response that sends events until the stream ends."""

    media_type = MEDIA_TYPE

    def __init__(self, listener: Listener, tenant: str, since: int | None) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._listener = listener
        self._services = listener.services
        self._tenant = tenant
        self._since = since
        self._disconnected = asyncio.Event()
        self._access: StreamAccess | None = None
        self._sent = 0
        self._last_sent = 0.0
        """Monotonic time of the last bytes sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. What `Hub.slot` and `Hub.following` raise becomes a problem: nothing is sent before."""
        hub, listener = self._services.hub, self._listener
        with hub.slot(self._tenant):
            async with hub.following(listener.stream, listener.job) as follower:
                with self._services.metrics.streams.track_inprogress():
                    await self._respond(follower, scope, receive, send)

    async def _respond(self, follower: Follower, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(follower, receive))
        reason = "aborted"
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            reason = await self._send_events(follower, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientStalled:
            reason = "stalled"
            log.info("event stream aborted: the client stopped reading", sent=self._sent)
            scope[ABORT]()
            # Until Uvicorn has seen the disconnect: else it reports an incomplete response.
            await self._disconnected.wait()
        finally:
            self._services.metrics.streams_ended.labels(reason).inc()
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher

    async def _watch(self, follower: Follower, receive: Receive) -> None:
        # This route needs no body: a client that stops sending one counts as disconnected.
        with suppress(BodyTimeout):
            while (await receive())["type"] != "http.disconnect":
                pass
        self._disconnected.set()
        follower.woken.set()

    async def _send_events(self, follower: Follower, send: Send) -> str:
        """Send the stored events, then new ones as they come. Return the reason for which the stream ended."""
        end = time.monotonic() + self._services.settings.event_max_seconds
        position = shown = follower.start if self._since is None else self._since
        first, ended = True, False
        await self._send(send, RETRY)
        while (reason := self._over(end)) is None:
            follower.woken.clear()
            try:
                page = await (follower.read(position) if first else follower.after(position))
                if not await self._has_access(page):
                    return "refused"
            except TarnError:
                # The database is unavailable: send nothing while access cannot be checked.
                await self._pause(follower, send, RETRY_SECONDS, position)
                continue
            first = False
            if page is None and self._access is not None and self._access.deleted:
                if ended:
                    return "deleted"
                # The deletion was seen after the events were read: read once more, for the last events.
                first = ended = True
                continue
            if page is None:
                shown = await self._pause(follower, send, self._services.settings.event_heartbeat, position, shown)
                continue
            events, position = self._visible(page, position)
            for event in events:
                await self._send(send, frame(event))
                self._sent += 1
                self._services.metrics.events_sent.inc()
                shown = event.number
            if self._listener.job is not None and any(event.kind.ends_job for event in events):
                return "finished"
        return reason

    def _over(self, end: float) -> str | None:
        if self._disconnected.is_set():
            return "disconnected"
        if self._services.hub.stopping:
            return "stopping"
        return "time limit" if time.monotonic() >= end else None

    async def _pause(
        self, follower: Follower, send: Send, seconds: float, position: int, shown: int | None = None
    ) -> int:
        """Wait for the follower to be woken, and send a heartbeat if one is due. Return the last number sent."""
        with move_on_after(seconds):
            await follower.woken.wait()
        if time.monotonic() < self._last_sent + self._services.settings.event_heartbeat:
            return position if shown is None else shown
        if self._listener.has_token:
            self._access = None  # the token may have expired: check it again
        # An `id` without data dispatches no event, but sets the `Last-Event-ID` that the client sends on reconnecting.
        await self._send(send, b":\n\n" if shown in (None, position) else b":\nid: %d\n\n" % position)
        return position

    async def _has_access(self, page: EventPage | None) -> bool:
        """Return whether the client has access under the page's access revision. Raises Unavailable."""
        revision = self._services.hub.revision if page is None else page.revision
        access = self._access
        try:
            if access is None or access.revision != revision:
                # A token issuer may be slow: keep it off the hub's only thread.
                run = ADMISSION.run if self._listener.has_token else self._services.hub.run
                access = self._access = await run(self._listener.access)
            access.known.check_expiry()
        except Unauthenticated:
            return False
        return True

    def _visible(self, event_page: EventPage, position: int) -> tuple[list[OutboxEvent], int]:
        """Return the events of a page that the client may see, and the position after the page.

        A `missed` event comes first if events after `position` are no longer stored.
        """
        page, listener = event_page.page, self._listener
        assert self._access is not None
        events = list(page.events)
        if self._since is None and listener.job is not None:
            position = max(position, page.tail)
        if position < page.tail or position > page.last:
            name = None if listener.dataset is None else listener.dataset.name
            events = [each for each in events if each.number > page.tail]
            events.insert(0, outbox.missed(page, listener.stream, name, position))
            position = page.tail if position > page.last else max(page.through, page.tail)
        else:
            position = page.through
        identity = self._access.known.identity
        return [each for each in events if listener.accepts(identity, each)], position

    async def _send(self, send: Send, piece: bytes) -> None:
        """Send some bytes. Raises ClientStalled if the client does not read for `stream_timeout` seconds."""
        with move_on_after(self._services.settings.stream_timeout) as wait:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if wait.cancelled_caught:
            raise ClientStalled
        self._last_sent = time.monotonic()


def frame(event: OutboxEvent) -> bytes:
    """Return an event in the `text/event-stream` format."""
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.number, event.kind.encode(), event.body)
