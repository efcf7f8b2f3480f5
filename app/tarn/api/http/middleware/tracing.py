"""OpenTelemetry tracing middleware: one span per request. Installed only if traces are sent."""

import structlog
from opentelemetry import propagate
from opentelemetry.trace import SpanKind, Tracer, format_trace_id
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class TraceMiddleware:
    """Outermost ASGI middleware: one span per request, a child of the caller's span if `traceparent` names one.

    Every log line of the request has the trace id. A span names the route template, never the path: paths contain
    dataset names.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app = app
        self.tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method = scope["method"]
        parent = propagate.extract(Headers(scope=scope))
        with self.tracer.start_as_current_span(method, parent, SpanKind.SERVER) as span:
            span.set_attribute("http.request.method", method)
            structlog.contextvars.bind_contextvars(trace=format_trace_id(span.get_span_context().trace_id))

            async def send_with_status(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            try:
                await self.app(scope, receive, send_with_status)
            finally:
                structlog.contextvars.unbind_contextvars("trace")
                state = scope.get("state", {})
                route = state.get("template", "unmatched")
                span.update_name(f"{method} {route}")
                span.set_attribute("http.route", route)
                span.set_attribute("tarn.request", state.get("request_id", ""))
                span.set_attribute("tarn.tenant", state.get("tenant") or "")
