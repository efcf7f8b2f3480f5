"""Outer middleware: request id, log line, metrics, and the handler of unexpected exceptions."""

import re
import time
from asyncio import CancelledError

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tarn.api.http.problems import path_of, problem_response
from tarn.api.http.services.metrics import Metrics
from tarn.errors import Internal, TarnError, Unavailable
from tarn.model.ids import new_id

HEADER = "X-Request-ID"
GOOD_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

CLIENT_GONE = 499
"""Status for logs and metrics only: the client disconnected while it was sending."""

log = structlog.get_logger(__name__)


class RequestMiddleware:
    """ASGI middleware around all others but tracing: every request gets an id, one log line and its metrics."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics
        self.log = log.bind()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        request_id = _request_id(request)
        scope.setdefault("state", {})["request_id"] = request_id
        structlog.contextvars.bind_contextvars(request=request_id)
        header = (HEADER.lower().encode(), request_id.encode())
        start, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        self.metrics.running.inc()
        try:
            await self.app(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - start
            self.metrics.running.dec()
            tenant = scope["state"].get("tenant")
            self.metrics.answered(scope["method"], _template(scope), status, seconds, tenant)
            self.log.info(
                "request",
                method=scope["method"],
                path=path_of(request),
                status=status,
                ms=round(seconds * 1000, 1),
                tenant=tenant,
            )
            structlog.contextvars.unbind_contextvars("request")


class ExceptionMiddleware:
    """ASGI middleware inside `RequestMiddleware` that turns unhandled exceptions into problems.

    The problem contains no text of the exception. Once the headers are sent, the exception is raised again, which
    aborts the connection, so that no client takes a partial response for a complete one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        has_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except (Exception, CancelledError) as error:  # no exception may leak to the client
            response = _response_to(error, Request(scope))
            if has_started:
                raise
            await response(scope, receive, send)


def _response_to(error: Exception | CancelledError, request: Request) -> Response:
    if isinstance(error, TarnError):
        return problem_response(error, request)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, CancelledError):
        return problem_response(Unavailable("the server is stopping", retry_after=1), request)
    log.exception("unexpected error", path=path_of(request))
    return problem_response(
        Internal(
            f"an unexpected error occurred; search the server's log for the request id {request.state.request_id}"
        ),
        request,
    )


def _request_id(request: Request) -> str:
    requested = request.headers.get(HEADER, "")
    return requested if GOOD_ID.fullmatch(requested) else new_id()


def _template(scope: Scope) -> str:
    """Return the route's path template, such as `/v1/datasets/{dataset}`."""
    return str(scope["state"].get("template", "unmatched"))
