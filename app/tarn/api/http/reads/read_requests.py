"""Read requests: parse which state to read, run the read on a thread, interrupt it if the client disconnects."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

import duckdb
from fastapi import Depends, Query, Request
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from tarn.api.http.commit_wait import flush_first
from tarn.api.http.problems import Responses, raises
from tarn.api.http.reads.read_scheduling import read_scheduler
from tarn.api.http.route_access import Caller, CallerDep
from tarn.api.http.services.container import Services, ServicesDep
from tarn.datasets.registry import Dataset
from tarn.db.connection_semaphore import TENANT
from tarn.errors import (
    BodyTimeout,
    FieldError,
    InvalidFormat,
    ManifestInvalid,
    QueryTimeout,
    RefNotFound,
    SnapshotGone,
    SnapshotNotFound,
    TarnError,
)
from tarn.model.datasets.ref import StateName
from tarn.query.live import LookupTooLarge
from tarn.query.reader import Reading, RequestedState

Result = TypeVar("Result")

INTERRUPT_INTERVAL = 0.1
"""Seconds between two interrupts of a read whose client has disconnected."""

HEADER = "Tarn-Snapshot"
HEADERS = {
    HEADER: {
        "description": "The id of the snapshot that was read; missing if the dataset has none yet.",
        "schema": {"type": "string"},
    }
}

Fresh = Literal["overlay", "flush", "snapshot"]
AtParam = Annotated[
    StateName | None,
    Query(description="The snapshot to read: its id or number, a ref, or a time (the head at that time)."),
]
FreshParam = Annotated[
    Fresh | None,
    Query(
        description="`overlay` (the default): the head and everything acknowledged since; `flush`: flush first, then "
        "read the same; `snapshot`: the head only. Not together with `at`."
    ),
]


@dataclass(slots=True)
class ClientWatch:
    """Tracks whether the client is connected, and interrupts its read when it disconnects or a time limit passes."""

    reading: Reading | None = None
    started: float = 0.0
    disconnected: bool = field(default=False)
    timed_out: bool = field(default=False)

    def begin(self, reading: Reading) -> None:
        """Set the read to interrupt. Raises ClientDisconnect if the client has disconnected already."""
        self.started = time.monotonic()
        self.reading = reading
        if self.disconnected:
            raise ClientDisconnect

    def disconnect(self) -> None:
        """Record that the client has disconnected, and interrupt its read."""
        self.disconnected = True
        self._interrupt()

    def _interrupt(self) -> None:
        if self.reading is not None:
            # A read that has ended meanwhile needs no interrupt.
            with suppress(duckdb.ConnectionException):
                self.reading.interrupt()

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Interrupt the read after these seconds, and raise QueryTimeout in place of the interrupt's exception.

        Only for reads in this process; the session of a read in another process enforces its own limit.
        """
        loop = asyncio.get_running_loop()

        def check() -> None:
            remaining = seconds if self.reading is None else self.started + seconds - time.monotonic()
            if remaining <= 0:
                self.timed_out = True
                self._interrupt()
            # Repeatedly: an interrupt between two queries of a read does not stop the second one.
            timers[0] = loop.call_later(max(remaining, INTERRUPT_INTERVAL), check)

        timers = [loop.call_later(seconds, check)]
        try:
            yield
        except duckdb.InterruptException:
            if not self.timed_out or self.disconnected:
                raise
            raise QueryTimeout(f"the read was stopped after {seconds:g} seconds", seconds=seconds) from None
        finally:
            timers[0].cancel()

    @asynccontextmanager
    async def watching(self, receive: Receive) -> AsyncIterator[None]:
        """Watch for the client's disconnect while the context is open."""

        async def watch() -> None:
            # This route needs no body: a client that stops sending one counts as disconnected.
            with suppress(BodyTimeout):
                while (await receive())["type"] != "http.disconnect":
                    pass
            # Repeatedly: an interrupt between two queries of a read does not stop the second one.
            while True:
                self.disconnect()
                await asyncio.sleep(INTERRUPT_INTERVAL)

        # Not a task group: it would wrap the exceptions of the read.
        watcher = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            # The server shuts down, and nothing waits for the thread any more.
            self.disconnect()
            raise
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A read request: its caller, and the state that it asks for."""

    request: Request
    services: Services
    caller: Caller
    state: RequestedState
    flushes: bool

    async def read(self, datasets: Sequence[Dataset], work: Callable[[Reading], Result]) -> Result:
        """Run a query on a thread, after a flush if requested. It is interrupted if the client disconnects."""
        session = self.services.reader.reading(TENANT.get(), self.services.settings.query_seconds)
        return await self._read(datasets, work, session, read_scheduler(self.services).query)

    async def look_up(self, datasets: Sequence[Dataset], work: Callable[[Reading], Result]) -> Result:
        """Run a point lookup on a thread: short however large the dataset is, and scheduled separately from queries.

        A lookup that turns out to be too long is run again as a query.
        """
        client = ClientWatch()
        try:
            with client.limited(self.services.settings.query_seconds):
                lookup = self.services.reader.lookup()
                return await self._read(datasets, work, lookup, read_scheduler(self.services).look_up, client)
        except LookupTooLarge:
            return await self.read((), work)

    async def _read(
        self,
        datasets: Sequence[Dataset],
        work: Callable[[Reading], Result],
        session: AbstractContextManager[Reading],
        schedule: Callable[[Callable[[], Result]], Awaitable[Result]],
        client: ClientWatch | None = None,
    ) -> Result:
        await self.ready(datasets)
        client = client or ClientWatch()

        def run() -> Result:
            with session as reading:
                client.begin(reading)
                return work(reading)

        async with client.watching(self.request.receive):
            try:
                return await schedule(run)
            except duckdb.InterruptException:
                if client.timed_out:
                    raise
                raise ClientDisconnect from None

    async def ready(self, datasets: Sequence[Dataset]) -> None:
        """Flush the datasets first, if requested."""
        if self.flushes:
            for dataset in datasets:
                await flush_first(self.services, self.caller, dataset)


async def _read_request(
    request: Request, services: ServicesDep, caller: CallerDep, at: AtParam = None, fresh: FreshParam = None
) -> ReadRequest:
    if at is not None and fresh is not None:
        reason = "cannot be combined with `at`, which names a past state"
        raise InvalidFormat(f"`fresh` {reason}", errors=[FieldError(field="query.fresh", reason=reason)])
    state = RequestedState(at, "snapshot" if fresh == "snapshot" else "overlay")
    return ReadRequest(request, services, caller, state, flushes=fresh == "flush")


ReadRequestDep = Annotated[ReadRequest, Depends(_read_request)]


def read_problems(*more: type[TarnError]) -> Responses:
    """Return the problems of a route that reads a state."""
    return raises(InvalidFormat, ManifestInvalid, QueryTimeout, RefNotFound, SnapshotGone, SnapshotNotFound, *more)


def snapshot_header(snapshot: str | None) -> dict[str, str]:
    """Return the header that names the snapshot that was read."""
    return {} if snapshot is None else {HEADER: snapshot}
