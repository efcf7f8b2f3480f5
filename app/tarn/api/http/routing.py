"""Route class and router factory: authenticates and authorizes the caller before it reads the request."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from inspect import iscoroutinefunction
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Path, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from tarn.api.http.idempotency import HEADER, run_once
from tarn.api.http.limits.tenant_semaphore import request_slot
from tarn.api.http.limits.threads import thread_slot
from tarn.api.http.problems import as_responses
from tarn.api.http.route_access import Handler, access_of, admit, recording
from tarn.api.http.services.container import services_of
from tarn.errors import (
    BodyTimeout,
    BodyTooLarge,
    EmptyBody,
    FieldError,
    IdempotencyMismatch,
    Internal,
    InvalidFormat,
    Locked,
    NotAcceptable,
    RateLimited,
    SchemaViolation,
    StorageFull,
    TarnError,
    Unavailable,
    UnsupportedMediaType,
)

JSON = "application/json"

LONGEST_MEDIA_TYPE = 1024
"""Bytes of `Accept` and `Content-Type`. FastAPI takes quadratic time to parse the latter."""

WRITING = frozenset({"POST", "PUT", "PATCH", "DELETE"})

REFUSAL_DELAY = 0.5, 1.0
"""Range of seconds by which the refusal of a request over its tenant's rate is delayed. Without it, a client that
retries at full speed costs all others time; it has to wait for a second in any case. The delay is random, so that
requests that came together do not come back together."""

IdParam = Annotated[str, Path(max_length=36, pattern=r"^[A-Za-z0-9-]+$")]
"""An id in a path. Only its form is checked here, not that the resource exists."""


class GuardedRoute(APIRoute):
    """A route that checks, in this order, the caller, the query parameter names, `Accept` and the body, then runs."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        operation = endpoint.__name__
        responses = dict(options.pop("responses", None) or {})
        own: set[type[TarnError]] = set(responses.pop("raises", {}).get("errors", ()))
        # InvalidFormat: a head that is too long or not HTTP is refused before the route is known.
        common: set[type[TarnError]] = {Internal, InvalidFormat, Unavailable, SchemaViolation}
        methods = WRITING.intersection(options.get("methods") or ())
        if methods:
            common |= {BodyTimeout, IdempotencyMismatch, Locked, StorageFull}
        if methods - {"DELETE"}:
            common |= {EmptyBody, BodyTooLarge, UnsupportedMediaType}
        if _answers_json(options):
            common |= {NotAcceptable}
        problems = as_responses(own | common | access_of(operation).problems)
        super().__init__(
            path, endpoint, **options | {"operation_id": operation, "responses": {**responses, **problems}}
        )

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if not iscoroutinefunction(self.endpoint):
            handle = _with_thread_slot(handle)
        operation = self.name
        access = access_of(operation)
        queries = set(_query_names(self.dependant))
        answers_json = _answers_json({"response_class": self.response_class})
        takes_body = self.body_field is not None
        needs_body = self.body_field is not None and self.body_field.field_info.is_required()
        answers_once = bool(WRITING.intersection(self.methods or ())) and HEADER not in _header_names(self.dependant)

        async def guarded(request: Request) -> Response:
            request.state.template = self.path_format
            try:
                await admit(request, operation, access)
            except RateLimited:
                await asyncio.sleep(random.uniform(*REFUSAL_DELAY))  # noqa: S311 - not a secret
                raise
            _check_query(request, queries)
            _check_lengths(request)
            if answers_json:
                _check_accept(request)
            if not access.identified:
                return await handle(request)
            async with request_slot() as is_shared:
                services_of(request).reader.set_cpus_shared(is_shared)
                if takes_body:
                    await _check_body(request, needs_body)
                if answers_once:
                    return await run_once(request, operation, request.state.caller.identity.tenant, handle)
                return await handle(request)

        return recording(operation, guarded)


def _with_thread_slot(handle: Handler) -> Handler:
    """Wrap the handler of a synchronous route: it waits for a slot of the route threads first."""

    async def handled(request: Request) -> Response:
        async with thread_slot():
            return await handle(request)

    return handled


def router(prefix: str, tag: str) -> APIRouter:
    """Create a router whose routes are `GuardedRoute`s."""
    return APIRouter(prefix=prefix, tags=[tag], route_class=GuardedRoute)


def _query_names(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _query_names(inner)


def _header_names(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.header_params)
    for inner in dependant.dependencies:
        yield from _header_names(inner)


def _answers_json(options: dict[str, Any]) -> bool:
    response_class = options.get("response_class")
    return getattr(response_class, "value", response_class) in (None, JSONResponse)


def _check_query(request: Request, known: set[str]) -> None:
    unknown = sorted(set(request.query_params) - known)
    if unknown:
        reason = f"is not a parameter of this route; it takes {', '.join(sorted(known)) or 'none'}"
        raise SchemaViolation(
            f"{unknown[0]!r} {reason}", errors=[FieldError(field=f"query.{name}", reason=reason) for name in unknown]
        )


def _check_lengths(request: Request) -> None:
    for name in ("accept", "content-type"):
        if len(request.headers.get(name, "")) > LONGEST_MEDIA_TYPE:
            reason = f"is longer than {LONGEST_MEDIA_TYPE} bytes"
            raise SchemaViolation(f"{name} {reason}", errors=[FieldError(field=f"header.{name}", reason=reason)])


def _check_accept(request: Request) -> None:
    accept = request.headers.get("accept")
    if not accept:
        return
    ranges = [media_type(part) for part in accept.split(",")]
    if not any(kind in ("*/*", "application/*", JSON) and quality > 0 for kind, quality in ranges):
        raise NotAcceptable(f"this route can respond with {JSON}; Accept does not allow it", supported=[JSON])


async def _check_body(request: Request, needed: bool) -> None:
    """Check that the body is present, has the media type JSON, and is valid JSON (no NaN, no Infinity).

    An optional body may be missing.
    """
    body = await request.body()
    if not body and not needed:
        return
    if not body.strip():
        raise EmptyBody("the body is empty; send a JSON document")
    kind, _ = media_type(request.headers.get("content-type", ""))
    if kind != JSON:
        raise UnsupportedMediaType(f"send {JSON}, not {kind or 'a body without a type'}", supported=[JSON])
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        fault = FieldError(line=error.lineno, reason=f"{error.msg} at column {error.colno}")
        raise InvalidFormat(f"the body is not valid JSON: line {fault.line}, {fault.reason}", errors=[fault]) from None


def records_body(types: tuple[str, ...]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that is a stream of records in one of these media types.

    JSON is described as one record, although an array is accepted too: client generators handle that best.
    """
    record = {"type": "object", "additionalProperties": True}
    forms = {JSON: record}
    content = {kind: {"schema": forms.get(kind, {"type": "string", "format": "binary"})} for kind in types}
    return {"requestBody": {"required": True, "content": content}}


def media_type(text: str) -> tuple[str, float]:
    """Return a media type without its parameters, and its quality (`q`).

    Quoted parameters are not parsed: no supported type has one, and Python's own parser takes quadratic time.
    """
    kind, *parameters = text.split(";")
    quality = 1.0
    for name, _, value in (parameter.partition("=") for parameter in parameters):
        if name.strip().lower() == "q":
            with suppress(ValueError):
                quality = float(value)
    return kind.strip().lower(), quality
