"""A stream of events on its way to one client: server-sent events, for as long as the client may hear them.

asked       above which number to begin
page        what is above the last number sent, as far as the client may hear it
allowed     looked at again whenever the access revision is another than the one that the page was read under: what
            was taken away ends with the next page, and within a look of the hub if there is none
heartbeat   a comment while nothing happens, with the number up to which nothing did
end         at shutdown, when the job is over or the dataset gone, and after an hour: of a client that takes nothing and
            is sent little, nothing else would be seen. The client comes again by itself
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
from tarn.api.http.services.event_hub import Follower, Found
from tarn.api.http.streaming.stream_response import ClientStalled
from tarn.datasets import registry as datasets
from tarn.datasets.registry import Dataset
from tarn.db import outbox as events
from tarn.db.outbox import OutboxEvent
from tarn.errors import BodyTimeout, TarnError, Unauthenticated
from tarn.model.event import EventKind
from tarn.model.tenant import Identity

MEDIA_TYPE = "text/event-stream"

RETRY = b"retry: 2000\n\n"
"""Milliseconds after which a client comes again."""

log = structlog.get_logger(__name__)


class Standing(NamedTuple):
    """What a client was found to be allowed at a moment."""

    revision: str
    known: CachedIdentity
    gone: bool
    """Whether the dataset is deleted: what was told of it until then may be heard."""


@dataclass(frozen=True)
class Listener:
    """Who follows what: a dataset, or one job."""

    house: Services
    authorization: str | None
    stream: str
    dataset: Dataset | None
    job: str | None = None
    kinds: frozenset[EventKind] = frozenset()
    """Only these, if there are any."""

    @property
    def has_token(self) -> bool:
        """Whether the client is known by a JWT, which runs out without a change that anybody sees."""
        return self.house.authenticator.mark(self.authorization) is None

    def standing(self) -> Standing:
        """What the client may hear now. Raises Unauthenticated for one that may hear nothing, and Unavailable."""
        with self.house.authenticator.identified(self.authorization) as sight:
            gone = False
            if self.dataset is not None:
                if sight.identity.level_on(self.dataset.name) is None:
                    raise Unauthenticated("the grant was taken back")
                found = datasets.find(sight.connection, self.dataset.name)
                gone = found is None or found.id != self.dataset.id
            return Standing(sight.revision, sight.known, gone)

    def hears(self, identity: Identity, told: OutboxEvent) -> bool:
        if self.kinds and told.kind not in self.kinds and told.kind is not EventKind.MISSED:
            return False
        return told.audience is None or identity.tenant in told.audience or identity.administers_lake


class EventStream(Response):
    """An answer that goes on while there is something to tell."""

    media_type = MEDIA_TYPE

    def __init__(self, listener: Listener, tenant: str, since: int | None) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._listener = listener
        self._house = listener.house
        self._tenant = tenant
        self._since = since
        self._left = asyncio.Event()
        self._standing: Standing | None = None
        self._told = 0
        self._spoke = 0.0
        """When something was last sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises, before anything is sent, what `Hub.place` and `Hub.following` do: that is answered as a problem."""
        hub, listener = self._house.hub, self._listener
        with hub.place(self._tenant):
            async with hub.following(listener.stream, listener.job) as follower:
                with self._house.metrics.streams.track_inprogress():
                    await self._answer(follower, scope, receive, send)

    async def _answer(self, follower: Follower, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(follower, receive))
        reason = "broken off"
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            reason = await self._tell_all(follower, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientStalled:
            reason = "stood still"
            log.info("events broken off: their client takes nothing", told=self._told)
            scope[ABORT]()
            await self._left.wait()  # until the server knows, too, that there is nobody to complete an answer for
        finally:
            self._house.metrics.streams_ended.labels(reason).inc()
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher

    async def _watch(self, follower: Follower, receive: Receive) -> None:
        # A client that stops in the middle of a body, which nobody needs here, counts as gone.
        with suppress(BodyTimeout):
            while (await receive())["type"] != "http.disconnect":
                pass
        self._left.set()
        follower.woken.set()

    async def _tell_all(self, follower: Follower, send: Send) -> str:
        """Tell what there is, and what comes; returns why there is an end to it."""
        end = time.monotonic() + self._house.settings.event_longest
        position = shown = follower.begun if self._since is None else self._since
        first, ended = True, False
        await self._send(send, RETRY)
        while (reason := self._over(end)) is None:
            follower.woken.clear()
            try:
                found = await (follower.read(position) if first else follower.after(position))
                if not await self._may_go_on(found):
                    return "refused"
            except TarnError:
                # The database is away: nothing is told while nobody can say who may hear it.
                await self._pause(follower, send, self._house.settings.event_poll, position)
                continue
            first = False
            if found is None and self._standing is not None and self._standing.gone:
                if ended:
                    return "gone"
                # Seen to be gone later than events were looked for: its last ones may not be found yet.
                first = ended = True
                continue
            if found is None:
                shown = await self._pause(follower, send, self._house.settings.event_heartbeat, position, shown)
                continue
            heard, position = self._heard(found, position)
            for told in heard:
                await self._send(send, frame(told))
                self._told += 1
                self._house.metrics.events_sent.inc()
                shown = told.number
            if self._listener.job is not None and any(told.kind.ends_job for told in heard):
                return "over"
        return reason

    def _over(self, end: float) -> str | None:
        if self._left.is_set():
            return "left"
        if self._house.hub.stopping:
            return "stopping"
        return "long" if time.monotonic() >= end else None

    async def _pause(
        self, follower: Follower, send: Send, seconds: float, position: int, shown: int | None = None
    ) -> int:
        """Wait until there is something to do; a heartbeat if there was nothing for long. Returns the number shown."""
        with move_on_after(seconds):
            await follower.woken.wait()
        if time.monotonic() < self._spoke + self._house.settings.event_heartbeat:
            return position if shown is None else shown
        if self._listener.has_token:
            self._standing = None  # a token may have run out meanwhile
        # A number without data is no event, but where a client goes on from when it comes again.
        await self._send(send, b":\n\n" if shown in (None, position) else b":\nid: %d\n\n" % position)
        return position

    async def _may_go_on(self, found: Found | None) -> bool:
        """Whether the client may hear what was found. Raises Unavailable."""
        revision = self._house.hub.revision if found is None else found.revision
        standing = self._standing
        try:
            if standing is None or standing.revision != revision:
                # An issuer of tokens may be slow; the hub's thread is for what is quick.
                run = ADMISSION.run if self._listener.has_token else self._house.hub.run
                standing = self._standing = await run(self._listener.standing)
            standing.known.check_expiry()
        except Unauthenticated:
            return False
        return True

    def _heard(self, found: Found, position: int) -> tuple[list[OutboxEvent], int]:
        """What of a page the client hears, and how far that brings it."""
        page, listener = found.page, self._listener
        assert self._standing is not None
        told = list(page.told)
        if self._since is None and listener.job is not None:
            position = max(position, page.tail)
        if position < page.tail or position > page.last:
            name = None if listener.dataset is None else listener.dataset.name
            told = [each for each in told if each.number > page.tail]
            told.insert(0, events.missed(page, listener.stream, name, position))
            position = page.tail if position > page.last else max(page.through, page.tail)
        else:
            position = page.through
        identity = self._standing.known.identity
        return [each for each in told if listener.hears(identity, each)], position

    async def _send(self, send: Send, piece: bytes) -> None:
        """Raises StandsStill if the client takes nothing of it for too long."""
        with move_on_after(self._house.settings.stream_patience) as wait:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if wait.cancelled_caught:
            raise ClientStalled
        self._spoke = time.monotonic()


def frame(told: OutboxEvent) -> bytes:
    """An event as it goes over the wire."""
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (told.number, told.kind.encode(), told.body)
