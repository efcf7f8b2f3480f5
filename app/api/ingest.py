"""A body of records on its way into the journal: small ones at once, large ones as they arrive."""

import asyncio
import hashlib
import io
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import orjson
from anyio import CapacityLimiter, from_thread, to_thread
from anyio.lowlevel import RunVar
from fastapi import Depends, Header, Query, Request, Response
from pydantic import BaseModel, Field

from app.api.access import Caller, admitted
from app.api.bodies import LIMIT
from app.api.commits import Commit, CommitParam, SnapshotName, later, wait_for_snapshot
from app.api.idempotency import fingerprint
from app.api.places import Places, places
from app.api.problems import Responses, raises
from app.api.routing import media_type
from app.api.services import Services, services
from app.api.turns import Turns, limiter, turns
from app.db.answers import Once
from app.errors import (
    Backpressure,
    CodecConfigured,
    CodecNotStreamable,
    DatasetNotFound,
    EmptyBody,
    Fault,
    IdempotencyMismatch,
    QuotaExceeded,
    StageClosed,
    StorageFull,
    TarnError,
)
from app.journal.batches import Batch, Outcome
from app.journal.bulk import CONNECTIONS
from app.journal.events import Events
from app.journal.formats.record import Source
from app.journal.intake import Intake, Terms
from app.journal.parsing import Reading as Body
from app.lake.datasets import Dataset
from app.model.ids import now
from app.model.names import DatasetName, Origin
from app.model.statement import EPOCH
from app.query.reader import Reading

SMALL = 64 << 10
"""A body up to this size is parsed where it is, in less time than a thread would take to start."""

HEAD = 1 << 20
"""Bytes of a large one that are gathered before a thread takes it: most bodies are whole by then, and no thread and no
parser has to wait for their clients."""

UPLOADS = CONNECTIONS
"""Large bodies that are read at once; more wait for their turn."""

RAISES = (Backpressure, DatasetNotFound, IdempotencyMismatch, QuotaExceeded, StageClosed, StorageFull)
RECORDS_RAISE = (*RAISES, CodecConfigured, CodecNotStreamable)

OnErrorParam = Annotated[
    Literal["abort", "skip"], Query(description="Refuse the whole body for a bad record, or leave that one out.")
]
KeyHeader = Annotated[
    str | None,
    Header(alias="Idempotency-Key", min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$"),
]

HeldIn = Annotated[
    SnapshotName | None, Field(description="The snapshot that holds the write, where that was waited for.")
]

Found = TypeVar("Found")


class Written(BaseModel):
    """What was taken in. `commit` is null for a stage, which commits later, and for a body without records."""

    entities: int
    statements: int
    rejected: int
    commit: int | None = None
    snapshot: HeldIn = None
    errors: list[Fault] = []


class Deleted(BaseModel):
    """How many live statements were ended."""

    tombstones: int
    commit: int | None = None
    snapshot: HeldIn = None


@dataclass(frozen=True, slots=True)
class Writing:
    """One request that writes: who, where, and under which idempotency key."""

    request: Request
    house: Services
    caller: Caller
    dataset: Dataset
    origin: Origin | None
    commit: Commit
    key: str | None
    stage: int | None = None

    @property
    def batch(self) -> Batch:
        return Batch(self.dataset, self.caller.identity.tenant, self.caller.act, self.origin, self.stage)

    async def take_entities(self, skip: bool) -> Response:
        """Read a body of entities into the journal, as one batch."""
        return await self._take(self._terms("entities", skip))

    async def take_statements(self, skip: bool, strict: bool) -> Response:
        """Read a body of statements into the journal, as one batch."""
        return await self._take(self._terms("statements", skip, strict))

    async def write(self, events: Events, answer: BaseModel, body: bytes = b"") -> Response:
        """Commit a few events as one batch, together with whatever else waits; the answer with its commit number."""
        batch = self.batch
        batch.answer = answer.model_dump()
        batch.once = None if self.key is None else Once(self.key, fingerprint(self.request, hashlib.sha256(body)))
        return await self._answer(await asyncio.wrap_future(self.house.writer.submit(batch, events)))

    async def look(self, work: Callable[[Reading], Found]) -> Found:
        """Look at one entity of the present state, for what the answer says; the write does not depend on it."""
        return await turns(self.house).look(lambda: self._read(work, self.house.reader.looking()))

    async def query(self, work: Callable[[Reading], Found]) -> Found:
        """The same for what takes a look at all of it."""
        return await turns(self.house).query(lambda: self._read(work, self.house.reader.reading()))

    def _read(self, work: Callable[[Reading], Found], begun: AbstractContextManager[Reading]) -> Found:
        with begun as reading:
            return work(reading)

    def _terms(self, records: Literal["entities", "statements"], skip: bool, strict: bool = False) -> Terms:
        return Terms(
            records=records,
            media_type=media_type(self.request.headers.get("content-type", ""))[0],
            dataset=self.dataset.name,
            origin=self.origin,
            moment=moment_now(),
            longest=self.house.settings.max_record_bytes,
            skip=skip,
            strict=strict,
        )

    async def _take(self, terms: Terms) -> Response:
        self.request.scope[LIMIT] = self.house.settings.max_body_bytes
        incoming, turn = Incoming(self.request, hashed=self.key is not None), turns(self.house)
        head = await incoming.head()
        if incoming.over and not head.strip():
            raise EmptyBody("this route needs a body of records")

        def finished(reading: Body) -> Batch:
            """The batch with its answer, once the body is read."""
            batch = self.batch
            batch.answer = {
                "entities": reading.entities,
                "statements": reading.statements,
                "rejected": reading.rejected.count,
                "commit": None,
                "errors": [fault.model_dump() for fault in reading.rejected.faults],
            }
            batch.once = None if self.key is None else Once(self.key, incoming.fingerprint())
            return batch

        def read_large() -> Outcome:
            with self.house.parsers.reading(terms) as reading:
                chunks = reading.chunks(incoming.source(head, turn))
                return self.house.writer.write_body(self.batch, chunks, lambda: finished(reading))

        if len(head) <= SMALL:
            intake = Intake(terms, self.house.exploder)
            events = next(intake.chunks(io.BytesIO(head)), Events())
            outcome = await asyncio.wrap_future(self.house.writer.submit(finished(intake), events))
        else:
            async with places(_places, UPLOADS).place():
                with turn.body():
                    outcome = await to_thread.run_sync(read_large, limiter=limiter(_threads, UPLOADS))
        return await self._answer(outcome)

    async def _answer(self, outcome: Outcome) -> Response:
        """The answer as it was kept, with the snapshot if it was waited for, now or when it is replayed.

        It was made from its model, and need not pass through it again.
        """
        number = outcome.answer["commit"]
        named, status = await wait_for_snapshot(self.house, self.caller, self.dataset, number, self.commit)
        shown = None if named is None else named._asdict()
        return Response(orjson.dumps(outcome.answer | {"snapshot": shown}), status, media_type="application/json")


def write_answers(model: type[BaseModel], *more: type[TarnError]) -> Responses:
    """What a route that writes answers besides 200."""
    return {**later(model), **raises(*RAISES, *more)}


def record_answers(model: type[BaseModel]) -> Responses:
    """The same of a route that takes records."""
    return {**later(model), **raises(*RECORDS_RAISE)}


async def _writing(
    request: Request,
    dataset: DatasetName,
    origin: Annotated[
        Origin | None, Query(description="Which process says so; `default` if nothing else does.")
    ] = None,
    commit: CommitParam = "auto",
    key: KeyHeader = None,
) -> Writing:
    # Not by a dependency of its own: every small request would pay for it.
    return Writing(request, services(request), request.state.caller, admitted(request, dataset), origin, commit, key)


WritingDep = Annotated[Writing, Depends(_writing)]


def moment_now() -> int:
    """The present, in microseconds."""
    return int((now() - EPOCH).total_seconds() * 1_000_000)


class Incoming:
    """The body as it arrives, and the digest of what has arrived."""

    def __init__(self, request: Request, hashed: bool) -> None:
        self._request = request
        self._stream = request.stream()
        self._digest = hashlib.sha256() if hashed else None
        self.over = False

    async def head(self) -> bytes:
        """The body's beginning, gathered before any thread waits for it: all of it, if it is not very large."""
        pieces, size = [], 0
        while size <= HEAD and not self.over:
            pieces.append(await self.next())
            size += len(pieces[-1])
        return b"".join(pieces)

    async def next(self) -> bytes:
        """The next bytes; none at the end. Raises ClientDisconnect if the client is gone before."""
        async for data in self._stream:
            if data:
                if self._digest is not None:
                    self._digest.update(data)
                return data
        self.over = True
        return b""

    def source(self, head: bytes, turn: Turns) -> Source:
        """The body for a thread to read, which waits for more to arrive."""

        async def more() -> bytes:
            with turn.waiting():
                return await self.next()

        return Pulled(head, self, more)

    def fingerprint(self) -> str:
        assert self._digest is not None
        return fingerprint(self._request, self._digest)


class Pulled:
    """A body that a thread pulls out of the event loop."""

    def __init__(self, head: bytes, incoming: Incoming, more: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        self._rest = head
        self._incoming = incoming
        self._more = more

    def read(self, size: int, /) -> bytes:
        if not self._rest and not self._incoming.over:
            self._rest = from_thread.run(self._more)
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


_places: RunVar[Places] = RunVar("uploads")
_threads: RunVar[CapacityLimiter] = RunVar("upload threads")
"""The threads that read large bodies, apart from those that answer small requests."""
