"""Ingest of request bodies into the journal: small bodies on the event loop, large ones streamed to a parser."""

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
from tarn.db.connection_semaphore import TENANT
from tarn.db.idempotency import IdempotencyKey
from tarn.errors import (
    Backpressure,
    CodecConfigured,
    CodecNotStreamable,
    DatasetNotFound,
    EmptyBody,
    FieldError,
    IdempotencyMismatch,
    QuotaExceeded,
    SchemaViolation,
    StageClosed,
    StorageFull,
    TarnError,
)
from tarn.journal.batches import Batch, BatchOutcome
from tarn.journal.bulk import CONNECTIONS
from tarn.journal.formats import COLUMNAR, FTM_ENTITIES
from tarn.journal.formats.record import ByteSource
from tarn.journal.parsing.event_buffer import Chunk, Events
from tarn.journal.parsing.event_chunks import DEFAULT_ORIGIN, BodyReader, OnError, ReadOptions
from tarn.journal.parsing.parser_pool import BodyParser
from tarn.model.ftm.entity import TimeLimitExceeded, Values
from tarn.model.ftm.omissions import Omissions
from tarn.model.ids import now
from tarn.model.names import DatasetName, Origin
from tarn.model.timestamps import since_epoch
from tarn.query import delete_counts as counts
from tarn.query.live import LookupTooLarge
from tarn.query.reader import Reading

SMALL = 16 << 10
SMALL_SECONDS = 0.003
"""A body of lines or JSON up to SMALL bytes is parsed on the event loop, which is faster than passing it to a parser.
If that takes more than SMALL_SECONDS (cleaning one value may take three milliseconds), a parser starts over with it."""

HEAD = 1 << 20
"""Bytes of a large body that are buffered before a thread takes it: most bodies are complete by then, and no thread and
no parser has to wait for their clients."""

LOOKED_UP = 1000
"""Deleted entities whose referents are looked up in one query."""

UPLOADS = CONNECTIONS
"""Maximum number of large bodies that are read concurrently; others wait for a slot."""

RAISES = (Backpressure, DatasetNotFound, IdempotencyMismatch, QuotaExceeded, StageClosed, StorageFull)
RECORDS_RAISE = (*RAISES, CodecConfigured, CodecNotStreamable)

OnErrorParam = Annotated[
    OnError,
    Query(
        description="How to handle an invalid record. `abort`: reject the body. `skip`: leave that record out. "
        "`drop`: leave out only the property or value that is invalid, and the record if nothing valid remains."
    ),
]
ValuesParam = Annotated[
    Values | None,
    Query(
        description="`clean`: clean values with FollowTheMoney; values that it rejects are left out and reported in "
        "`omitted`. `as_is`: store values unchanged. FtM tools write clean values, so `as_is` is the default "
        "for `application/json+ftm` and for statements; otherwise `clean` is."
    ),
]
StrictParam = Annotated[bool, Query(description="Reject the body if any value would be left out.")]
KeyHeader = Annotated[
    str | None,
    Header(alias="Idempotency-Key", min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$"),
]

SnapshotField = Annotated[
    SnapshotName | None, Field(description="The snapshot that contains the write, if `commit` asked to wait for it.")
]

Result = TypeVar("Result")


class Written(BaseModel):
    """The result of a write. `commit` is null for a stage, which commits later, and for a body without records."""

    entities: int
    statements: int
    rejected: int = Field(description="Records that were left out.")
    commit: int | None = None
    snapshot: SnapshotField = None
    errors: list[FieldError] = Field(
        default=[], description="The first hundred records that were left out, with the reason."
    )
    omitted: Omissions = Field(
        default_factory=Omissions, description="Values that were left out of records that were stored."
    )
    ignored: dict[str, int] = Field(
        default={}, description="Unknown fields or columns that were ignored, and how many records had each."
    )
    nested: int = Field(default=0, description="Nested entities that were stored as entities of their own.")
    deleted: int = Field(default=0, description="Entities that were deleted by change records (`op: DEL`).")


class Deleted(BaseModel):
    """The number of live statements that were deleted."""

    tombstones: int
    commit: int | None = None
    snapshot: SnapshotField = None


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """One write request: its caller, dataset, origin, commit mode and idempotency key."""

    request: Request
    services: Services
    caller: Caller
    dataset: Dataset
    origin: Origin | None
    commit: Commit
    key: str | None
    stage: int | None = None

    @property
    def batch(self) -> Batch:
        return Batch(self.dataset, self.caller.identity.tenant, self.caller.act, self.origin, self.stage)

    async def write_entities(self, parse_options: "ParseOptions") -> Response:
        """Write a body of entities to the journal, as one batch."""
        return await self._write_body(self._read_options("entities", parse_options))

    async def write_statements(self, parse_options: "ParseOptions") -> Response:
        """Write a body of statements to the journal, as one batch."""
        return await self._write_body(self._read_options("statements", parse_options))

    async def write_replacement(self, entity: str, parse_options: "ParseOptions") -> Response:
        """Write a body of one entity to the journal, replacing the origin's statements about it."""
        options = self._read_options("entities", parse_options)
        only = {"media_type": "application/json", "replaces": entity, "values": parse_options.values or "clean"}
        return await self._write_body(options.model_copy(update=only), self.services.settings.max_record_bytes)

    async def write(self, events: Events, answer: BaseModel, body: bytes = b"") -> Response:
        """Commit a few events as one batch, together with other waiting batches. Respond with its commit number."""
        batch = self.batch
        batch.answer = answer.model_dump()
        batch.once = (
            None if self.key is None else IdempotencyKey(self.key, fingerprint(self.request, hashlib.sha256(body)))
        )
        return await self._respond(await asyncio.wrap_future(self.services.writer.submit(batch, events)))

    async def look_up(self, work: Callable[[Reading], Result]) -> Result:
        """Run a point lookup on the current state, for counts in the response. The write does not depend on it.

        A lookup that turns out to be too long is run again as a query.
        """
        client = ClientWatch()
        try:
            with client.limited(self.services.settings.query_seconds):
                return await read_scheduler(self.services).look_up(
                    lambda: self._read(work, self.services.reader.lookup(), client)
                )
        except LookupTooLarge:
            return await self.query(work)

    async def query(self, work: Callable[[Reading], Result]) -> Result:
        """Run a query that may scan the whole dataset, for counts in the response."""
        session = self.services.reader.reading(TENANT.get(), self.services.settings.query_seconds)
        return await read_scheduler(self.services).query(lambda: self._read(work, session, ClientWatch()))

    def _read(
        self, work: Callable[[Reading], Result], session: AbstractContextManager[Reading], client: ClientWatch
    ) -> Result:
        with session as reading:
            client.begin(reading)
            return work(reading)

    def _read_options(self, records: Literal["entities", "statements"], parse_options: "ParseOptions") -> ReadOptions:
        kind = media_type(self.request.headers.get("content-type", ""))[0]
        default: Values = "as_is" if records == "statements" or kind == FTM_ENTITIES else "clean"
        return ReadOptions(
            records=records,
            media_type=kind,
            dataset=self.dataset.name,
            origin=self.origin,
            moment=since_epoch(now()),
            longest=self.services.settings.max_record_bytes,
            on_error=parse_options.on_error,
            values=parse_options.values or default,
            strict=parse_options.strict,
        )

    async def _write_body(self, options: ReadOptions, most: int | None = None) -> Response:
        self.request.scope[LIMIT] = most or self.services.settings.max_body_bytes
        incoming, scheduler = Incoming(self.request, hashed=self.key is not None), read_scheduler(self.services)
        head = await incoming.head()
        if incoming.over and not head.strip():
            raise EmptyBody("the body is empty; send records")
        if options.replaces is not None and not head.lstrip().startswith(b"{"):
            fault = FieldError(line=1, reason="an entity must be a JSON object")
            raise SchemaViolation(f"the body: {fault.reason}", errors=[fault])

        tenant, ended_referents = TENANT.get(), 0

        def finished(body: BodyParser) -> Batch:
            """Return the batch with its response, once the body is read."""
            batch = self.batch
            batch.answer = written(body)
            batch.rows = body.rows + ended_referents
            batch.once = None if self.key is None else IdempotencyKey(self.key, incoming.fingerprint())
            return batch

        def read_large() -> BatchOutcome:
            with self.services.parsers.parser(options) as body:
                chunks = with_referents(body, body.chunks(incoming.source(head, scheduler)))
                return self.services.writer.write_body(self.batch, chunks, lambda: finished(body))

        def with_referents(body: BodyParser, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
            """Yield the events of a body, then those that delete the referents of the entities that it deletes."""
            nonlocal ended_referents
            yield from chunks
            ids = list(body.report.deleted_ids)
            for start in range(0, len(ids), LOOKED_UP):
                page, events = ids[start : start + LOOKED_UP], Events()
                with self.services.reader.reading(tenant, self.services.settings.query_seconds) as reading:
                    ended_referents += self._end_referents(events, self._referents(reading, page))
                if len(events):
                    yield events

        parsed = self._parse_small(options, head) if incoming.over and len(head) <= SMALL else None
        if parsed is not None:
            reader, events = parsed
            if ids := list(reader.report.deleted_ids):
                referents = await self.query(lambda reading: self._referents(reading, ids))
                ended_referents = self._end_referents(events, referents)
            outcome = await asyncio.wrap_future(self.services.writer.submit(finished(reader), events))
        else:
            async with fair_semaphore(_upload_slots, UPLOADS).slot():
                with scheduler.body():
                    outcome = await to_thread.run_sync(read_large, limiter=limiter(_threads, UPLOADS))
        return await self._respond(outcome)

    def _referents(self, reading: Reading, ids: list[str]) -> list[counts.Referent]:
        return counts.referents(reading, self.dataset, ids, self.origin or DEFAULT_ORIGIN)

    def _end_referents(self, events: Events, referents: list[counts.Referent]) -> int:
        """Add events that delete the referents of deleted entities. Return their number."""
        for referent in referents:
            events.delete(referent.id, referent.entity_id, referent.origin)
        return len(referents)

    def _parse_small(self, options: ReadOptions, body: bytes) -> tuple[BodyReader, Events] | None:
        """Parse a small body on the event loop. Return None if that takes too long or yields more than one chunk."""
        if options.media_type in COLUMNAR:
            return None
        exploder = self.services.exploder
        reader = BodyReader(options, exploder)
        try:
            with exploder.limit.of(SMALL_SECONDS):
                chunks = list(islice(reader.chunks(io.BytesIO(body)), 2))
        except TimeLimitExceeded:
            return None
        return (reader, chunks[0] if chunks else Events()) if len(chunks) < 2 else None

    async def _respond(self, outcome: BatchOutcome) -> Response:
        """Return the stored response, with the snapshot if the request waits for it, also when it is replayed.

        It was dumped from its model, so it is not validated again.
        """
        number = outcome.answer["commit"]
        named, status = await wait_for_snapshot(self.services, self.caller, self.dataset, number, self.commit)
        snapshot = None if named is None else named._asdict()
        return Response(orjson.dumps(outcome.answer | {"snapshot": snapshot}), status, media_type="application/json")


class ParseOptions(BaseModel):
    """The query parameters that control how a body is parsed."""

    on_error: OnError = "abort"
    values: Values | None = None
    strict: bool = False


async def parse_options(
    on_error: OnErrorParam = "abort", values: ValuesParam = None, strict: StrictParam = False
) -> ParseOptions:
    """Return the parse options of the query."""
    return ParseOptions(on_error=on_error, values=values, strict=strict)


ParseOptionsDep = Annotated[ParseOptions, Depends(parse_options)]


def written(body: BodyParser) -> dict[str, Any]:
    """Return the response to a body that was read."""
    report = body.report.model_dump(include={"errors", "omitted", "ignored", "nested", "deleted"})
    counts = {"entities": body.entities, "statements": body.statements, "rejected": body.report.rejected}
    return {**counts, "commit": None, **report}


def write_responses(model: type[BaseModel], *more: type[TarnError]) -> Responses:
    """Return the responses of a route that writes, besides 200."""
    return {**accepted_response(model), **raises(*RAISES, *more)}


def record_responses(model: type[BaseModel]) -> Responses:
    """Return the responses of a route that takes records, besides 200."""
    return {**accepted_response(model), **raises(*RECORDS_RAISE)}


async def _writing(
    request: Request,
    dataset: DatasetName,
    origin: Annotated[
        Origin | None,
        Query(description="The process that makes the statements; `default` if neither this nor the record names one."),
    ] = None,
    commit: CommitParam = "auto",
    key: KeyHeader = None,
) -> WriteRequest:
    # Not separate dependencies: their overhead would slow down every small request.
    return WriteRequest(
        request, services_of(request), request.state.caller, admitted(request, dataset), origin, commit, key
    )


WriteRequestDep = Annotated[WriteRequest, Depends(_writing)]


class Incoming:
    """A body as it arrives, and the digest of what has arrived."""

    def __init__(self, request: Request, hashed: bool) -> None:
        self._request = request
        self._stream = request.stream()
        self._digest = hashlib.sha256() if hashed else None
        self.over = False

    async def head(self) -> bytes:
        """Return the first `HEAD` bytes or a little more, or all of a smaller body, without using a thread."""
        pieces, size = [], 0
        while size <= HEAD and not self.over:
            pieces.append(await self.next())
            size += len(pieces[-1])
        return b"".join(pieces)

    async def next(self) -> bytes:
        """Return the next bytes, or none at the end. Raises ClientDisconnect if the client disconnects before."""
        async for data in self._stream:
            if data:
                if self._digest is not None:
                    self._digest.update(data)
                return data
        self.over = True
        return b""

    def source(self, head: bytes, scheduler: ReadScheduler) -> ByteSource:
        """Return the body as a source that a thread reads and that waits for more to arrive."""

        async def more() -> bytes:
            with scheduler.waiting():
                return await self.next()

        return ThreadSource(head, self, more)

    def fingerprint(self) -> str:
        assert self._digest is not None
        return fingerprint(self._request, self._digest)


class ThreadSource:
    """A body that a thread reads from the event loop."""

    def __init__(self, head: bytes, incoming: Incoming, more: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        self._rest = head
        self._incoming = incoming
        self._more = more

    def read(self, size: int, /) -> bytes:
        if not self._rest and not self._incoming.over:
            self._rest = from_thread.run(self._more)
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


_upload_slots: RunVar[FairSemaphore] = RunVar("uploads")
_threads: RunVar[CapacityLimiter] = RunVar("upload threads")
"""The threads that read large bodies; small requests use others."""
