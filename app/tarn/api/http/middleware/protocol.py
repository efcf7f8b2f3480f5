"""Uvicorn HTTP protocol with limits on the size and the arrival time of a request head. Violations get a problem.

httptools buffers an incomplete URL or header without a limit, and Uvicorn waits for the rest of it without a time-out.
"""

from asyncio import BaseTransport, TimerHandle
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tarn.api.http.middleware.request_middleware import HEADER
from tarn.api.http.problems import response_to
from tarn.errors import InvalidFormat
from tarn.model.ids import new_id

LARGEST_HEAD = 64 << 10
"""Bytes of an incomplete request line and headers, or trailers, that are accepted."""

STEP = 16 << 10
"""Bytes parsed at once: how far a head may exceed the limit before that is noticed."""

HEAD_SECONDS = 15.0
"""Seconds within which the head of a request must arrive."""

ABORT = "tarn.abort"
"""Scope key of the function that aborts the connection at once. Closing it would wait until the client has read what is
written already, and a client that reads nothing would keep it open forever."""

log = structlog.get_logger(__name__)


class Protocol(HttpToolsProtocol):
    """Uvicorn's protocol with limits on what an unauthenticated client may send."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head = 0
        self._deadline: TimerHandle | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # Uvicorn narrows it; it is a Transport
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._progress()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), STEP):
            step = data[start : start + STEP]
            self._head += len(step)
            super().data_received(step)
            if self._head > LARGEST_HEAD:
                self.send_400_response(f"the request's URL and headers are longer than {LARGEST_HEAD} bytes")
            if self.transport.is_closing():
                return
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._progress()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]  # a key of our own
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head = 0
        if not self._idle:
            # The rest of the body of an answered request has as much time as the head of the next request.
            self._progress()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._progress()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Reject an invalid request and close the connection.

        No response is written if the client would take it for the response to an earlier request.
        """
        request_id = new_id()
        log.info("invalid request", request=request_id, reason=msg)
        if self._may_answer:
            response = response_to(InvalidFormat(msg, errors=[]), instance="")
            own = [(HEADER.lower().encode(), request_id.encode()), (b"connection", b"close")]
            headers = [*self.server_state.default_headers, *response.raw_headers, *own]
            lines = [name + b": " + value + b"\r\n" for name, value in headers]
            self.transport.write(b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", bytes(response.body)]))
        self.transport.close()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _may_answer(self) -> bool:
        """Whether the client takes a response written now as the response to this request, not to an earlier one."""
        return self._idle or (self.cycle.more_body and not self.cycle.response_started and not self.pipeline)

    def _expect_head(self) -> None:
        """Start the timer that closes the connection unless a request head is complete in time."""
        if self._idle and self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _progress(self) -> None:
        self._head = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
