"""A body of records on its way into the journal: small ones at once, large ones as they arrive."""

import asyncio
import hashlib
import io
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

import orjson
from anyio import CapacityLimiter, from_thread, to_thread
from anyio.lowlevel import RunVar
from fastapi import Depends, Header, Query, Request, Response
from pydantic import BaseModel, Field

from tarn.api.http.bodies.body_middleware import LIMIT
from tarn.api.http.commit_wait import Commit, CommitParam, SnapshotName, accepted_response, wait_for_snapshot
from tarn.api.http.idempotency import fingerprint
from tarn.api.http.limits.tenant_semaphore import FairSemaphore, fair_semaphore, limiter
from tarn.api.http.problems import Responses, raises
from tarn.api.http.reads.read_requests import ClientWatch
from tarn.api.http.reads.read_scheduling import ReadScheduler, read_scheduler
from tarn.api.http.route_access import Caller, admitted
from tarn.api.http.routing import media_type
from tarn.api.http.services.container import Services, services_of
from tarn.datasets.registry import Dataset
from tarn.db.connection_shares import TENANT
from tarn.db.idempotency import IdempotencyKey
from tarn.errors import (
    Backpressure,
    CodecConfigured,
    CodecNotStreamable,
    DatasetNotFound,
    EmptyBody,
    Fault,
    IdempotencyMismatch,
    QuotaExceeded,
    SchemaViolation,
    StageClosed,
    StorageFull,
    TarnError,
)
from tarn.journal.batches import Batch, BatchOutcome
from tarn.journal.bulk import CONNECTIONS
from tarn.journal.event_buffer import Chunk, Events
from tarn.journal.event_chunks import DEFAULT_ORIGIN, BodyReader, OnError, ReadOptions
from tarn.journal.formats import COLUMNAR, FTM_ENTITIES
from tarn.journal.formats.record import ByteSource
from tarn.journal.parser_pool import BodyParser as Body
from tarn.model.entity import TimeLimitExceeded, Values
from tarn.model.ids import now
from tarn.model.names import DatasetName, Origin
from tarn.model.omissions import Omissions
from tarn.model.statement import EPOCH
from tarn.query import delete_counts as counts
from tarn.query.live import LookupTooLarge
from tarn.query.reader import Reading

SMALL = 16 << 10
SMALL_SECONDS = 0.003
"""A body of lines or of JSON up to this size is parsed on the event loop, in less time than it takes to pass it on. One
that takes more seconds than this (a value may take three milliseconds to clean) is begun anew in a parser."""

HEAD = 1 << 20
"""Bytes of a large one that are gathered before a thread takes it: most bodies are whole by then, and no thread and no
parser has to wait for their clients."""

LOOKED_UP = 1000
"""Deleted entities whose referents are looked up at once."""

UPLOADS = CONNECTIONS
"""Large bodies that are read at once; more wait for their turn."""

RAISES = (Backpressure, DatasetNotFound, IdempotencyMismatch, QuotaExceeded, StageClosed, StorageFull)
RECORDS_RAISE = (*RAISES, CodecConfigured, CodecNotStreamable)

OnErrorParam = Annotated[
    OnError,
    Query(
        description="What a bad record does. `abort`: the whole body is refused. `skip`: that record is left out. "
        "`drop`: only the property or value that cannot be stored is left out, and the record if nothing else can be."
    ),
]
ValuesParam = Annotated[
    Values | None,
    Query(
        description="`clean`: values are cleaned as FollowTheMoney does, and those that it rejects are left out and "
        "listed. `as_is`: values are stored as they are given. What FtM's tools write is clean: `as_is` is the default "
        "for `application/json+ftm` and for statements, `clean` for everything else."
    ),
]
StrictParam = Annotated[bool, Query(description="Refuse the body if any value would be left out.")]
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
    rejected: int = Field(description="Records that were left out.")
    commit: int | None = None
    snapshot: HeldIn = None
    errors: list[Fault] = Field(default=[], description="The first hundred of the records that were left out.")
    omitted: Omissions = Field(
        default_factory=Omissions, description="Values that were left out of records that were stored."
    )
    ignored: dict[str, int] = Field(
        default={}, description="Fields or columns that no entity or statement has, and how many records had them."
    )
    nested: int = Field(default=0, description="Entities that were given inside of others and stored on their own.")
    deleted: int = Field(default=0, description="Entities that lines of changes (`op: DEL`) deleted.")


class Deleted(BaseModel):
    """How many live statements were ended."""

    tombstones: int
    commit: int | None = None
    snapshot: HeldIn = None


@dataclass(frozen=True, slots=True)
class WriteRequest:
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

    async def take_entities(self, reading: "HowToRead") -> Response:
        """Read a body of entities into the journal, as one batch."""
        return await self._take(self._terms("entities", reading))

    async def take_statements(self, reading: "HowToRead") -> Response:
        """Read a body of statements into the journal, as one batch."""
        return await self._take(self._terms("statements", reading))

    async def take_replacement(self, entity: str, reading: "HowToRead") -> Response:
        """Read a body of one entity into the journal, in the place of what the origin says of it."""
        terms = self._terms("entities", reading)
        only = {"media_type": "application/json", "replaces": entity, "values": reading.values or "clean"}
        return await self._take(terms.model_copy(update=only), self.house.settings.max_record_bytes)

    async def write(self, events: Events, answer: BaseModel, body: bytes = b"") -> Response:
        """Commit a few events as one batch, together with whatever else waits; the answer with its commit number."""
        batch = self.batch
        batch.answer = answer.model_dump()
        batch.once = (
            None if self.key is None else IdempotencyKey(self.key, fingerprint(self.request, hashlib.sha256(body)))
        )
        return await self._answer(await asyncio.wrap_future(self.house.writer.submit(batch, events)))

    async def look(self, work: Callable[[Reading], Found]) -> Found:
        """Look at one entity of the present state, for what the answer says; the write does not depend on it."""
        patience = ClientWatch()
        try:
            with patience.limited(self.house.settings.query_seconds):
                return await read_scheduler(self.house).look(
                    lambda: self._read(work, self.house.reader.looking(), patience)
                )
        except LookupTooLarge:
            return await self.query(work)

    async def query(self, work: Callable[[Reading], Found]) -> Found:
        """The same for what takes a look at all of it."""
        begun = self.house.reader.reading(TENANT.get(), self.house.settings.query_seconds)
        return await read_scheduler(self.house).query(lambda: self._read(work, begun, ClientWatch()))

    def _read(
        self, work: Callable[[Reading], Found], begun: AbstractContextManager[Reading], patience: ClientWatch
    ) -> Found:
        with begun as reading:
            patience.begin(reading)
            return work(reading)

    def _terms(self, records: Literal["entities", "statements"], reading: "HowToRead") -> ReadOptions:
        kind = media_type(self.request.headers.get("content-type", ""))[0]
        default: Values = "as_is" if records == "statements" or kind == FTM_ENTITIES else "clean"
        return ReadOptions(
            records=records,
            media_type=kind,
            dataset=self.dataset.name,
            origin=self.origin,
            moment=moment_now(),
            longest=self.house.settings.max_record_bytes,
            on_error=reading.on_error,
            values=reading.values or default,
            strict=reading.strict,
        )

    async def _take(self, terms: ReadOptions, most: int | None = None) -> Response:
        self.request.scope[LIMIT] = most or self.house.settings.max_body_bytes
        incoming, turn = Incoming(self.request, hashed=self.key is not None), read_scheduler(self.house)
        head = await incoming.head()
        if incoming.over and not head.strip():
            raise EmptyBody("this route needs a body of records")
        if terms.replaces is not None and not head.lstrip().startswith(b"{"):
            fault = Fault(line=1, reason="an entity must be a JSON object")
            raise SchemaViolation(f"the body: {fault.reason}", errors=[fault])

        tenant, ended_referents = TENANT.get(), 0

        def finished(reading: Body) -> Batch:
            """The batch with its answer, once the body is read."""
            batch = self.batch
            batch.answer = written(reading)
            batch.rows = reading.rows + ended_referents
            batch.once = None if self.key is None else IdempotencyKey(self.key, incoming.fingerprint())
            return batch

        def read_large() -> BatchOutcome:
            with self.house.parsers.reading(terms) as reading:
                chunks = with_referents(reading, reading.chunks(incoming.source(head, turn)))
                return self.house.writer.write_body(self.batch, chunks, lambda: finished(reading))

        def with_referents(body: Body, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
            """The events of a body, and after them those that end the referents of the entities that it deletes."""
            nonlocal ended_referents
            yield from chunks
            ids = list(body.report.deleted_ids)
            for start in range(0, len(ids), LOOKED_UP):
                some, events = ids[start : start + LOOKED_UP], Events()
                with self.house.reader.reading(tenant, self.house.settings.query_seconds) as reading:
                    ended_referents += self._end_referents(events, self._referents(reading, some))
                if len(events):
                    yield events

        parsed = self._parse_soon(terms, head) if incoming.over and len(head) <= SMALL else None
        if parsed is not None:
            intake, events = parsed
            if ids := list(intake.report.deleted_ids):
                referents = await self.query(lambda reading: self._referents(reading, ids))
                ended_referents = self._end_referents(events, referents)
            outcome = await asyncio.wrap_future(self.house.writer.submit(finished(intake), events))
        else:
            async with fair_semaphore(_places, UPLOADS).place():
                with turn.body():
                    outcome = await to_thread.run_sync(read_large, limiter=limiter(_threads, UPLOADS))
        return await self._answer(outcome)

    def _referents(self, reading: Reading, ids: list[str]) -> list[counts.Referent]:
        return counts.referents(reading, self.dataset, ids, self.origin or DEFAULT_ORIGIN)

    def _end_referents(self, events: Events, referents: list[counts.Referent]) -> int:
        """Delete what makes ids referents of entities that are deleted; how many there are."""
        for referent in referents:
            events.delete(referent.id, referent.entity_id, referent.origin)
        return len(referents)

    def _parse_soon(self, terms: ReadOptions, body: bytes) -> tuple[BodyReader, Events] | None:
        """Parse a small body here, on the event loop; None if that takes too long, or is more than one chunk."""
        if terms.media_type in COLUMNAR:
            return None
        exploder = self.house.exploder
        intake = BodyReader(terms, exploder)
        try:
            with exploder.limit.of(SMALL_SECONDS):
                chunks = list(islice(intake.chunks(io.BytesIO(body)), 2))
        except TimeLimitExceeded:
            return None
        return (intake, chunks[0] if chunks else Events()) if len(chunks) < 2 else None

    async def _answer(self, outcome: BatchOutcome) -> Response:
        """The answer as it was kept, with the snapshot if it was waited for, now or when it is replayed.

        It was made from its model, and need not pass through it again.
        """
        number = outcome.answer["commit"]
        named, status = await wait_for_snapshot(self.house, self.caller, self.dataset, number, self.commit)
        shown = None if named is None else named._asdict()
        return Response(orjson.dumps(outcome.answer | {"snapshot": shown}), status, media_type="application/json")


class HowToRead(BaseModel):
    """What the caller says of how a body is to be read."""

    on_error: OnError = "abort"
    values: Values | None = None
    strict: bool = False


async def how_to_read(
    on_error: OnErrorParam = "abort", values: ValuesParam = None, strict: StrictParam = False
) -> HowToRead:
    return HowToRead(on_error=on_error, values=values, strict=strict)


HowToReadDep = Annotated[HowToRead, Depends(how_to_read)]


def written(reading: Body) -> dict[str, Any]:
    """The answer to a body that was read."""
    report = reading.report.model_dump(include={"errors", "omitted", "ignored", "nested", "deleted"})
    counts = {"entities": reading.entities, "statements": reading.statements, "rejected": reading.report.rejected}
    return {**counts, "commit": None, **report}


def write_responses(model: type[BaseModel], *more: type[TarnError]) -> Responses:
    """What a route that writes answers besides 200."""
    return {**accepted_response(model), **raises(*RAISES, *more)}


def record_responses(model: type[BaseModel]) -> Responses:
    """The same of a route that takes records."""
    return {**accepted_response(model), **raises(*RECORDS_RAISE)}


async def _writing(
    request: Request,
    dataset: DatasetName,
    origin: Annotated[
        Origin | None, Query(description="Which process says so; `default` if nothing else does.")
    ] = None,
    commit: CommitParam = "auto",
    key: KeyHeader = None,
) -> WriteRequest:
    # Not by a dependency of its own: every small request would pay for it.
    return WriteRequest(
        request, services_of(request), request.state.caller, admitted(request, dataset), origin, commit, key
    )


WritingDep = Annotated[WriteRequest, Depends(_writing)]


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

    def source(self, head: bytes, turn: ReadScheduler) -> ByteSource:
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


_places: RunVar[FairSemaphore] = RunVar("uploads")
_threads: RunVar[CapacityLimiter] = RunVar("upload threads")
"""The threads that read large bodies, apart from those that answer small requests."""
