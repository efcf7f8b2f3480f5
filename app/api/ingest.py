"""A body of records on its way into the journal: small ones at once, large ones as they arrive."""

import asyncio
import hashlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import orjson
from anyio import CapacityLimiter, from_thread, to_thread
from anyio.lowlevel import RunVar
from fastapi import Depends, Header, Query, Request, Response
from pydantic import BaseModel

from app.api.access import Caller, DatasetDep
from app.api.bodies import LIMIT
from app.api.idempotency import fingerprint
from app.api.routing import media_type
from app.api.services import Services, services
from app.db.answers import Once
from app.errors import (
    Backpressure,
    DatasetNotFound,
    EmptyBody,
    Fault,
    IdempotencyMismatch,
    QuotaExceeded,
    StageClosed,
    StorageFull,
)
from app.journal.batches import Batch, Outcome
from app.journal.events import Events
from app.journal.formats.record import Source
from app.journal.intake import DEFAULT_ORIGIN, Intake
from app.lake.datasets import Dataset
from app.model.entity import Exploder
from app.model.ids import now
from app.model.names import Origin
from app.model.statement import EPOCH, StatementReader

SMALL = 64 << 10
"""A body up to this size is read whole and parsed where it is, in less time than a thread would take to start."""

UPLOADS = 16
"""Large bodies that are read at once; more wait for their turn."""

RAISES = (Backpressure, DatasetNotFound, IdempotencyMismatch, QuotaExceeded, StageClosed, StorageFull)

OnErrorParam = Annotated[
    Literal["abort", "skip"], Query(description="Refuse the whole body for a bad record, or leave that one out.")
]
KeyHeader = Annotated[
    str | None,
    Header(alias="Idempotency-Key", min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$"),
]

Chunks = Callable[[Source, str, Exploder], Iterator[Events]]


class Written(BaseModel):
    """What was taken in. `commit` is null for a stage, which commits later, and for a body without records."""

    entities: int
    statements: int
    rejected: int
    commit: int | None = None
    errors: list[Fault] = []


class Deleted(BaseModel):
    """How many live statements were ended."""

    tombstones: int
    commit: int | None = None


@dataclass(frozen=True, slots=True)
class Writing:
    """One request that writes: who, where, and under which idempotency key."""

    request: Request
    house: Services
    caller: Caller
    dataset: Dataset
    origin: Origin | None
    commit: str
    key: str | None
    stage: int | None = None

    @property
    def batch(self) -> Batch:
        return Batch(self.dataset, self.caller.identity.tenant, self.caller.act, self.origin, self.stage)

    async def take_entities(self, skip: bool) -> Response:
        """Read a body of entities into the journal, as one batch."""
        intake, longest, moment = Intake(skip), self.house.settings.max_record_bytes, moment_now()
        said_by = self.origin or DEFAULT_ORIGIN

        def chunks(source: Source, kind: str, exploder: Exploder) -> Iterator[Events]:
            return intake.entities_of(source, kind, longest, exploder, self.dataset.name, said_by, moment)

        return await self._take(intake, chunks)

    async def take_statements(self, skip: bool, strict: bool) -> Response:
        """Read a body of statements into the journal, as one batch."""
        intake, longest = Intake(skip), self.house.settings.max_record_bytes
        reader = StatementReader(self.dataset.name, self.origin, DEFAULT_ORIGIN, moment_now(), strict)

        def chunks(source: Source, kind: str, _: Exploder) -> Iterator[Events]:
            return intake.statements_of(source, kind, longest, reader)

        return await self._take(intake, chunks)

    async def write(self, events: Events, answer: BaseModel, body: bytes = b"") -> Response:
        """Commit a few events as one batch, together with whatever else waits; the answer with its commit number."""
        batch = self.batch
        batch.answer = answer.model_dump()
        batch.once = None if self.key is None else Once(self.key, fingerprint(self.request, hashlib.sha256(body)))
        return answer_of(await asyncio.wrap_future(self.house.writer.submit(batch, events)))

    async def _take(self, intake: Intake, chunks: Chunks) -> Response:
        self.request.scope[LIMIT] = self.house.settings.max_body_bytes
        kind = media_type(self.request.headers.get("content-type", ""))[0]
        incoming = Incoming(self.request, hashed=self.key is not None)
        head = await incoming.head()
        if incoming.over and not head.strip():
            raise EmptyBody("this route needs a body of records")

        def finished() -> Batch:
            """The batch with its answer, once the body is read."""
            batch = self.batch
            batch.answer = Written(
                entities=intake.entities,
                statements=intake.statements,
                rejected=intake.rejected.count,
                errors=intake.rejected.faults,
            ).model_dump()
            batch.once = None if self.key is None else Once(self.key, incoming.fingerprint())
            return batch

        def read_large() -> Outcome:
            found = chunks(incoming.source(head), kind, Exploder())
            first, second = next(found, Events()), next(found, None)
            if second is None:
                return self.house.writer.submit(finished(), first).result()
            return self.house.writer.write_large(self.batch, first, _then(second, found), finished)

        if incoming.over:
            events = next(chunks(io.BytesIO(head), kind, self.house.exploder), Events())
            outcome = await asyncio.wrap_future(self.house.writer.submit(finished(), events))
        else:
            outcome = await to_thread.run_sync(read_large, limiter=_uploads())
        return answer_of(outcome)


def answer_of(outcome: Outcome) -> Response:
    """An answer as it was kept: it was made from its model, and need not pass through it again."""
    return Response(orjson.dumps(outcome.answer), media_type="application/json")


async def _writing(
    request: Request,
    dataset: DatasetDep,
    origin: Annotated[
        Origin | None, Query(description="Which process says so; `default` if nothing else does.")
    ] = None,
    commit: Annotated[Literal["auto"], Query(description="`auto`: durable in the journal when answered.")] = "auto",
    key: KeyHeader = None,
) -> Writing:
    return Writing(request, services(request), request.state.caller, dataset, origin, commit, key)


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
        """The body's beginning: all of it, if it is small."""
        head = b""
        while len(head) <= SMALL and not self.over:
            head += await self.next()
        return head

    async def next(self) -> bytes:
        """The next bytes; none at the end. Raises ClientDisconnect if the client is gone before."""
        async for data in self._stream:
            if data:
                if self._digest is not None:
                    self._digest.update(data)
                return data
        self.over = True
        return b""

    def source(self, head: bytes) -> Source:
        """The body for a thread to read, which waits for more to arrive."""
        return Pulled(head, self)

    def fingerprint(self) -> str:
        assert self._digest is not None
        return fingerprint(self._request, self._digest)


class Pulled:
    """A body that a thread pulls out of the event loop."""

    def __init__(self, head: bytes, incoming: Incoming) -> None:
        self._rest = head
        self._incoming = incoming

    def read(self, size: int, /) -> bytes:
        if not self._rest and not self._incoming.over:
            self._rest = from_thread.run(self._incoming.next)
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


_limiter: RunVar[CapacityLimiter] = RunVar("uploads")
"""The threads that read large bodies, apart from those that answer small requests."""


def _uploads() -> CapacityLimiter:
    try:
        return _limiter.get()
    except LookupError:
        limiter = CapacityLimiter(UPLOADS)
        _limiter.set(limiter)
        return limiter


def _then(first: Events, rest: Iterator[Events]) -> Iterator[Events]:
    yield first
    yield from rest
