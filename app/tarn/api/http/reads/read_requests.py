"""Reads on their way to a client: which state is read, on a thread, and given up when the client leaves."""

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
from tarn.db.connection_shares import TENANT
from tarn.errors import (
    BodyTimeout,
    Fault,
    InvalidFormat,
    ManifestInvalid,
    QueryTimeout,
    RefNotFound,
    SnapshotGone,
    SnapshotNotFound,
    TarnError,
)
from tarn.model.ref import StateName
from tarn.query.live import LookupTooLarge
from tarn.query.reader import Reading, RequestedState

Result = TypeVar("Result")

INTERRUPT_INTERVAL = 0.1
"""Seconds between two interrupts of work for a client that has left."""

HEADER = "Tarn-Snapshot"
HEADERS = {
    HEADER: {
        "description": "The id of the snapshot that is served; missing if the dataset has none yet.",
        "schema": {"type": "string"},
    }
}

Fresh = Literal["overlay", "flush", "snapshot"]
AtParam = Annotated[
    StateName | None,
    Query(description="Read a snapshot: its id or number, a ref, or a moment (what was the head then)."),
]
FreshParam = Annotated[
    Fresh | None,
    Query(
        description="`overlay` (the default): the head and all that was acknowledged since; `flush`: the same after a "
        "flush; `snapshot`: the head alone. Not together with `at`."
    ),
]


@dataclass(slots=True)
class ClientWatch:
    """Whether the client is still there. When it leaves, the query that runs for it is interrupted."""

    reading: Reading | None = None
    begun: float = 0.0
    left: bool = field(default=False)
    timed_out: bool = field(default=False)

    def begin(self, reading: Reading) -> None:
        self.begun = time.monotonic()
        self.reading = reading
        if self.left:
            raise ClientDisconnect

    def leave(self) -> None:
        self.left = True
        self._interrupt()

    def _interrupt(self) -> None:
        if self.reading is not None:
            # What has come to its end meanwhile needs no interrupt.
            with suppress(duckdb.ConnectionException):
                self.reading.interrupt()

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Interrupt the read once it has run for so long, and raise QueryTimeout in place of what that raises.

        For reads in this process alone; the session of one in another process enforces its own limit.
        """
        loop = asyncio.get_running_loop()

        def check() -> None:
            left = seconds if self.reading is None else self.begun + seconds - time.monotonic()
            if left <= 0:
                self.timed_out = True
                self._interrupt()
            # Again: an interrupt that comes between two queries of a read is lost on the second.
            timers[0] = loop.call_later(max(left, INTERRUPT_INTERVAL), check)

        timers = [loop.call_later(seconds, check)]
        try:
            yield
        except duckdb.InterruptException:
            if not self.timed_out or self.left:
                raise
            raise QueryTimeout(f"the read was stopped after {seconds:g} seconds", seconds=seconds) from None
        finally:
            timers[0].cancel()

    @asynccontextmanager
    async def watching(self, receive: Receive) -> AsyncIterator[None]:
        """Listen for the client's leaving as long as the context is open."""

        async def watch() -> None:
            # A client that stops in the middle of a body, which nobody needs here, counts as gone.
            with suppress(BodyTimeout):
                while (await receive())["type"] != "http.disconnect":
                    pass
            # An interrupt that comes between two queries of a read is lost on the second.
            while True:
                self.leave()
                await asyncio.sleep(INTERRUPT_INTERVAL)

        # Not a task group, which would wrap whatever the read raises.
        watcher = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            # The server stops, and nobody waits for the thread any more.
            self.leave()
            raise
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Which state a request asks for, and whose request it is."""

    request: Request
    house: Services
    caller: Caller
    state: RequestedState
    flushes: bool

    async def read(self, datasets: Sequence[Dataset], work: Callable[[Reading], Result]) -> Result:
        """Run a query on a thread, after a flush if that was asked for. It ends early if the client leaves."""
        begun = self.house.reader.reading(TENANT.get(), self.house.settings.query_seconds)
        return await self._read(datasets, work, begun, read_scheduler(self.house).query)

    async def look(self, datasets: Sequence[Dataset], work: Callable[[Reading], Result]) -> Result:
        """The same for what is over in a moment, however much there is: it waits for no query.

        What turns out to be more than that is begun anew as a query.
        """
        patience = ClientWatch()
        try:
            with patience.limited(self.house.settings.query_seconds):
                looking = self.house.reader.looking()
                return await self._read(datasets, work, looking, read_scheduler(self.house).look, patience)
        except LookupTooLarge:
            return await self.read((), work)

    async def _read(
        self,
        datasets: Sequence[Dataset],
        work: Callable[[Reading], Result],
        begun: AbstractContextManager[Reading],
        in_turn: Callable[[Callable[[], Result]], Awaitable[Result]],
        patience: ClientWatch | None = None,
    ) -> Result:
        await self.ready(datasets)
        patience = patience or ClientWatch()

        def run() -> Result:
            with begun as reading:
                patience.begin(reading)
                return work(reading)

        async with patience.watching(self.request.receive):
            try:
                return await in_turn(run)
            except duckdb.InterruptException:
                if patience.timed_out:
                    raise
                raise ClientDisconnect from None

    async def ready(self, datasets: Sequence[Dataset]) -> None:
        """Do what must be done before the read: a flush, if that was asked for."""
        if self.flushes:
            for dataset in datasets:
                await flush_first(self.house, self.caller, dataset)


async def _read_request(
    request: Request, house: ServicesDep, caller: CallerDep, at: AtParam = None, fresh: FreshParam = None
) -> ReadRequest:
    if at is not None and fresh is not None:
        reason = "cannot stand beside `at`, which names a state of the past"
        raise InvalidFormat(f"`fresh` {reason}", errors=[Fault(field="query.fresh", reason=reason)])
    state = RequestedState(at, "snapshot" if fresh == "snapshot" else "overlay")
    return ReadRequest(request, house, caller, state, flushes=fresh == "flush")


AskedDep = Annotated[ReadRequest, Depends(_read_request)]


def read_problems(*more: type[TarnError]) -> Responses:
    """What a route that reads a state may answer besides 200."""
    return raises(InvalidFormat, ManifestInvalid, QueryTimeout, RefNotFound, SnapshotGone, SnapshotNotFound, *more)


def snapshot_header(snapshot: str | None) -> dict[str, str]:
    """The header that says what was read."""
    return {} if snapshot is None else {HEADER: snapshot}
