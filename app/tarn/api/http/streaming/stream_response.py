"""Streams: chunks as they are made, no faster than the client takes them, and never a half that looks whole."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, NamedTuple

import duckdb
import orjson
import structlog
from anyio import move_on_after
from anyio.lowlevel import RunVar
from fastapi import Query, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from tarn.api.http.limits.tenant_semaphore import FairSemaphore, fair_semaphore
from tarn.api.http.middleware.protocol import ABORT
from tarn.api.http.problems import path_of
from tarn.api.http.reads.read_requests import ClientWatch, ReadRequest, snapshot_header
from tarn.api.http.reads.read_scheduling import read_scheduler
from tarn.datasets.registry import Dataset
from tarn.errors import Internal, TarnError, Unavailable
from tarn.query.engine import answering
from tarn.query.reader import Reading

EndParam = Annotated[
    bool,
    Query(
        description='End with a line `{"$end": {"snapshot", "count"}}`, or `{"$error": problem}` if it fails halfway. '
        "`count` is the number of lines before it; where lines are made of entities, `invalid` is how many of them are "
        "of an entity whose statements do not assemble. "
        "Without it, too, a stream that fails is broken off and never ends as if it were whole."
    ),
]

STEP = 64 << 10
"""Bytes sent at once: as much as a connection holds, and what a client must take of a stream to keep it open."""

log = structlog.get_logger(__name__)

_places: RunVar[FairSemaphore] = RunVar("streams")
"""How many streams may be open at once."""


class ClientStalled(Exception):
    """The client took nothing for too long."""


class StreamPiece(NamedTuple):
    """Some records of a stream."""

    content: bytes
    records: int
    invalid: int = 0
    """How many of the records are of entities whose statements do not assemble."""


class Chunks:
    """What a stream is made of: the snapshot it shows, pieces of it, and how many records were in those so far."""

    def __init__(self, snapshot: str | None, pieces: Iterator[StreamPiece], of_entities: bool = False) -> None:
        self.snapshot = snapshot
        self.count = 0
        self._invalid = 0
        self._of_entities = of_entities
        self._pieces = pieces

    @property
    def end(self) -> dict[str, Any]:
        """What the last line says of all that came before it."""
        told = {"snapshot": self.snapshot, "count": self.count}
        return {**told, "invalid": self._invalid} if self._of_entities else told

    def next(self) -> bytes | None:
        """The next piece; None at the end. DuckDB's errors are ours."""
        with answering():
            found = next(self._pieces, None)
        if found is None:
            return None
        self.count += found.records
        self._invalid += found.invalid
        return found.content


async def stream_response(
    asked: ReadRequest, datasets: Sequence[Dataset], media_type: str, end: bool, begin: Callable[[Reading], Chunks]
) -> Response:
    """Answer with a stream. Until its first piece is made, what goes wrong is answered as a problem."""
    await asked.ready(datasets)
    house, patience, held = asked.house, ClientWatch(), ExitStack()
    open_streams = fair_semaphore(_places, house.settings.query_streams)
    tenant = open_streams.acquire_now()
    if tenant is None:
        raise Unavailable(f"as many streams are open as may be: {house.settings.query_streams} in all", retry_after=5)
    held.callback(open_streams.release, tenant)

    def first() -> tuple[Chunks, bytes | None]:
        reading = held.enter_context(house.reader.reading(tenant, house.settings.stream_seconds))
        patience.begin(reading)
        with answering():
            chunks = begin(reading)
        return chunks, chunks.next()

    try:
        async with patience.watching(asked.request.receive):
            chunks, piece = await read_scheduler(house).query(first)
    except BaseException as error:
        held.close()
        if isinstance(error, duckdb.InterruptException):
            raise ClientDisconnect from None
        raise
    return Stream(asked, chunks, piece, patience, held, media_type, end)


class Stream(Response):
    """An answer that is still being read."""

    def __init__(
        self,
        asked: ReadRequest,
        chunks: Chunks,
        piece: bytes | None,
        patience: ClientWatch,
        held: ExitStack,
        media_type: str,
        end: bool,
    ) -> None:
        super().__init__(media_type=media_type, headers=snapshot_header(chunks.snapshot))
        del self.headers["content-length"]
        self._asked = asked
        self._chunks = chunks
        self._piece = piece
        self._patience = patience
        self._held = held
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._patience.watching(receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_all(send)
        except ClientStalled:
            log.info("stream broken off: its client takes nothing", made=self._chunks.count)
            scope[ABORT]()
            while (await receive())["type"] != "http.disconnect":
                pass  # until the server knows, too, that there is nobody to complete an answer for
        except Exception:
            if not self._patience.left:
                raise
        finally:
            self._held.close()

    async def _send_all(self, send: Send) -> None:
        """Send every piece. Whatever is raised here breaks the connection off."""
        try:
            piece = self._piece
            while piece is not None and not self._patience.left:
                await self._send(send, piece)
                piece = await read_scheduler(self._asked.house).query(self._next)
        except ClientStalled:
            raise
        except Exception as error:
            if self._end and not self._patience.left:
                known = error if isinstance(error, TarnError) else Internal("the stream failed halfway")
                await self._send(send, _line("$error", known.problem(path_of(self._asked.request)).model_dump()))
            raise
        if self._patience.left:
            return
        if self._end:
            await self._send(send, _line("$end", self._chunks.end))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _next(self) -> bytes | None:
        """The next piece. Its time limit begins now: the time that the client took for the last one is its own."""
        assert self._patience.reading is not None
        self._patience.reading.limit(self._asked.house.settings.stream_seconds)
        return self._chunks.next()

    async def _send(self, send: Send, piece: bytes) -> None:
        """Send a piece in steps. Raises StandsStill if the client takes none of one: it holds what others need."""
        for start in range(0, len(piece), STEP):
            with move_on_after(self._asked.house.settings.stream_patience) as wait:
                await send({"type": "http.response.body", "body": piece[start : start + STEP], "more_body": True})
            if wait.cancelled_caught:
                raise ClientStalled


def _line(name: str, value: object) -> bytes:
    return orjson.dumps({name: value}, option=orjson.OPT_APPEND_NEWLINE)
