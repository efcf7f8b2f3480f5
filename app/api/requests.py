"""What surrounds every request: its id, its log line, its metrics, and the last net under it."""

import re
import time

import structlog
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.metrics import Metrics
from app.api.problems import answer
from app.errors import Internal, TarnError
from app.model.ids import new_id

HEADER = "X-Request-ID"
GOOD_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

log = structlog.get_logger(__name__)


class RequestScope:
    """Outermost ASGI middleware.

    An exception that nobody turned into a problem becomes one here, without a word of its own; after the headers
    are sent it breaks the connection off instead, so that no client takes half an answer for a whole one.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        request_id = _request_id(request)
        scope.setdefault("state", {})["request_id"] = request_id
        structlog.contextvars.bind_contextvars(request=request_id)
        begun, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        self.metrics.running.inc()
        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:  # the last net: whatever it is, it must not leak
            if not isinstance(error, TarnError):
                log.exception("unexpected error", path=scope["path"])
            if status:
                raise
            problem = error if isinstance(error, TarnError) else Internal(f"look for {request_id} in the server's log")
            await answer(problem, request)(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - begun
            self.metrics.running.dec()
            self.metrics.answered(scope["method"], _template(scope), status, seconds)
            log.info(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status,
                ms=round(seconds * 1000, 1),
                tenant=scope["state"].get("tenant"),
            )
            structlog.contextvars.unbind_contextvars("request")


def _request_id(request: Request) -> str:
    given = request.headers.get(HEADER, "")
    return given if GOOD_ID.fullmatch(given) else new_id()


def _template(scope: Scope) -> str:
    """The route's path with its parameters unfilled."""
    return str(scope["state"].get("template", "unmatched"))
