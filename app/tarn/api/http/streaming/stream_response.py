"""Streamed read responses with backpressure. A partial stream never looks complete to the client."""

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
from tarn.query.engine.engine import duckdb_errors_converted
from tarn.query.reader import Reading

EndParam = Annotated[
    bool,
    Query(
        description='End with a line `{"$end": {"snapshot", "count"}}`, or `{"$error": problem}` if the stream fails. '
        "`count` is the number of lines before it; in streams of entities, `invalid` is the number of lines for "
        "entities whose statements do not assemble. "
        "With or without it, a stream that fails is aborted: the connection closes without the end of the response."
    ),
]

STEP = 64 << 10
"""Bytes sent at once: about one socket buffer. A client must read this much per `stream_timeout` seconds."""

log = structlog.get_logger(__name__)

_stream_slots: RunVar[FairSemaphore] = RunVar("streams")
"""Limits the streams that are open at once."""


class ClientStalled(Exception):
    """The client read nothing for `stream_timeout` seconds."""


class StreamPiece(NamedTuple):
    """Some serialized records of a stream."""

    content: bytes
    records: int
    invalid: int = 0
    """Records for entities whose statements do not assemble."""


class Chunks:
    """The content of a stream: its snapshot, the iterator of pieces, and the number of records so far."""

    def __init__(self, snapshot: str | None, pieces: Iterator[StreamPiece], of_entities: bool = False) -> None:
        self.snapshot = snapshot
        self.count = 0
        self._invalid = 0
        self._of_entities = of_entities
        self._pieces = pieces

    @property
    def end(self) -> dict[str, Any]:
        """The content of the `$end` line."""
        end = {"snapshot": self.snapshot, "count": self.count}
        return {**end, "invalid": self._invalid} if self._of_entities else end

    def next(self) -> bytes | None:
        """Return the next piece, or None at the end. DuckDB errors are raised as TarnErrors."""
        with duckdb_errors_converted():
            piece = next(self._pieces, None)
        if piece is None:
            return None
        self.count += piece.records
        self._invalid += piece.invalid
        return piece.content


async def stream_response(
    read_request: ReadRequest,
    datasets: Sequence[Dataset],
    media_type: str,
    end: bool,
    begin: Callable[[Reading], Chunks],
) -> Response:
    """Respond with a stream. An error before the first piece is ready becomes a problem."""
    await read_request.ready(datasets)
    services, client, resources = read_request.services, ClientWatch(), ExitStack()
    open_streams = fair_semaphore(_stream_slots, services.settings.query_streams)
    tenant = open_streams.acquire_now()
    if tenant is None:
        raise Unavailable(
            f"the limit of {services.settings.query_streams} open streams is reached; retry later", retry_after=5
        )
    resources.callback(open_streams.release, tenant)

    def first() -> tuple[Chunks, bytes | None]:
        reading = resources.enter_context(services.reader.reading(tenant, services.settings.stream_seconds))
        client.begin(reading)
        with duckdb_errors_converted():
            chunks = begin(reading)
        return chunks, chunks.next()

    try:
        async with client.watching(read_request.request.receive):
            chunks, piece = await read_scheduler(services).query(first)
    except BaseException as error:
        resources.close()
        if isinstance(error, duckdb.InterruptException):
            raise ClientDisconnect from None
        raise
    return Stream(read_request, chunks, piece, client, resources, media_type, end)


class Stream(Response):
    """A response whose rows are read from DuckDB while it is sent."""

    def __init__(
        self,
        read_request: ReadRequest,
        chunks: Chunks,
        piece: bytes | None,
        client: ClientWatch,
        resources: ExitStack,
        media_type: str,
        end: bool,
    ) -> None:
        super().__init__(media_type=media_type, headers=snapshot_header(chunks.snapshot))
        del self.headers["content-length"]
        self._read_request = read_request
        self._chunks = chunks
        self._piece = piece
        self._client = client
        self._resources = resources
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._client.watching(receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_all(send)
        except ClientStalled:
            log.info("stream aborted: the client stopped reading", records=self._chunks.count)
            scope[ABORT]()
            while (await receive())["type"] != "http.disconnect":
                pass  # until Uvicorn has seen the disconnect: else it reports an incomplete response
        except Exception:
            if not self._client.disconnected:
                raise
        finally:
            self._resources.close()

    async def _send_all(self, send: Send) -> None:
        """Send every piece. An exception raised here aborts the connection."""
        try:
            piece = self._piece
            while piece is not None and not self._client.disconnected:
                await self._send(send, piece)
                piece = await read_scheduler(self._read_request.services).query(self._next)
        except ClientStalled:
            raise
        except Exception as error:
            if self._end and not self._client.disconnected:
                known = error if isinstance(error, TarnError) else Internal("the stream failed halfway")
                await self._send(send, _line("$error", known.problem(path_of(self._read_request.request)).model_dump()))
            raise
        if self._client.disconnected:
            return
        if self._end:
            await self._send(send, _line("$end", self._chunks.end))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _next(self) -> bytes | None:
        """Return the next piece. Its time limit begins now: time the client took for the last one does not count."""
        assert self._client.reading is not None
        self._client.reading.limit(self._read_request.services.settings.stream_seconds)
        return self._chunks.next()

    async def _send(self, send: Send, piece: bytes) -> None:
        """Send a piece in steps. Raises ClientStalled if the client does not read one: it holds a slot others need."""
        for start in range(0, len(piece), STEP):
            with move_on_after(self._read_request.services.settings.stream_timeout) as wait:
                await send({"type": "http.response.body", "body": piece[start : start + STEP], "more_body": True})
            if wait.cancelled_caught:
                raise ClientStalled


def _line(name: str, value: object) -> bytes:
    return orjson.dumps({name: value}, option=orjson.OPT_APPEND_NEWLINE)
