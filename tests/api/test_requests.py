"""Requests that end in an unexpected way: cancelled, disconnected, or with unprintable paths."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tarn.api.http.middleware.request_middleware import ExceptionMiddleware, RequestMiddleware
from tarn.api.http.services.metrics import Metrics


def answers(route: ASGIApp, drive: Callable[[Awaitable[None]], Awaitable[Any]], metrics: Metrics) -> list[Message]:
    """Return the response of a route below both middlewares."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def run() -> None:
        scope = {"type": "http", "method": "POST", "path": "/é", "headers": []}
        await drive(RequestMiddleware(ExceptionMiddleware(route), metrics)(scope, receive, send))

    asyncio.run(run())
    return sent


def test_cancelled_request_is_answered_503():
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async def cancel(answering: Any) -> None:
        task = asyncio.create_task(answering)
        await asyncio.sleep(0)
        task.cancel()
        await task

    start, body = answers(route, cancel, Metrics())

    assert start["status"] == 503
    assert json.loads(body["body"])["type"] == "/problems/unavailable"
    assert dict(start["headers"])[b"retry-after"] == b"1"


def test_disconnected_client_is_not_logged_as_an_error():
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        raise ClientDisconnect

    async def wait(answering: Awaitable[None]) -> None:
        await answering

    metrics = Metrics()
    with structlog.testing.capture_logs() as logged:
        answers(route, wait, metrics)

    assert [(event["event"], event["log_level"], event["status"]) for event in logged] == [("request", "info", 499)]
    assert b'status="499"} 1.0' in metrics.exposition()


def test_path_is_logged_escaped_on_one_line():
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def wait(answering: Awaitable[None]) -> None:
        await answering

    with structlog.testing.capture_logs() as logged:
        answers(route, wait, Metrics())

    assert logged[0]["path"] == "/%C3%A9"
