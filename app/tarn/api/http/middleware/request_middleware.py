"""What surrounds every request: its id, its log line, its metrics, and the last net under it."""

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
"""Nobody reads this status but us: the client went away while it was sending."""

log = structlog.get_logger(__name__)


class RequestMiddleware:
    """Outermost ASGI middleware: whatever happens inside, a request has its id, one log line and its metrics."""

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
        begun, status = time.perf_counter(), 0

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
            seconds = time.perf_counter() - begun
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
    """ASGI middleware, inside `RequestMiddleware`.

    An exception that nobody turned into a problem becomes one here, without a word of its own; after the headers
    are sent it breaks the connection off instead, so that no client takes half an answer for a whole one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except (Exception, CancelledError) as error:  # whatever it is, it must not leak
            instead = _response_to(error, Request(scope))
            if begun:
                raise
            await instead(scope, receive, send)


def _response_to(error: Exception | CancelledError, request: Request) -> Response:
    if isinstance(error, TarnError):
        return problem_response(error, request)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, CancelledError):
        return problem_response(Unavailable("the server is stopping", retry_after=1), request)
    log.exception("unexpected error", path=path_of(request))
    return problem_response(Internal(f"look for {request.state.request_id} in the server's log"), request)


def _request_id(request: Request) -> str:
    given = request.headers.get(HEADER, "")
    return given if GOOD_ID.fullmatch(given) else new_id()


def _template(scope: Scope) -> str:
    """The route's path with its parameters unfilled."""
    return str(scope["state"].get("template", "unmatched"))
