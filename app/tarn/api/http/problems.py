"""Error responses as `application/problem+json`, at run time and in the OpenAPI document."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Union
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from tarn.errors import (
    FieldError,
    InvalidFormat,
    MethodNotAllowed,
    RouteNotFound,
    SchemaViolation,
    TarnError,
    Unauthenticated,
    UnsupportedMediaType,
)

MEDIA_TYPE = "application/problem+json"

Responses = dict[int | str, dict[str, Any]]


def raises(*errors: type[TarnError]) -> Responses:
    """Declare the errors of a route: the value for `responses=`, which `GuardedRoute` completes."""
    return {"raises": {"errors": errors}}


def as_responses(errors: set[type[TarnError]]) -> Responses:
    """Return the OpenAPI responses of these errors: one per status, typed as the union of its problems."""
    by_status: dict[int, list[type[TarnError]]] = defaultdict(list)
    for error in sorted(errors, key=lambda error: error.slug):
        by_status[error.status].append(error)
    return {
        status: {
            "model": Union[tuple(error.model() for error in group)],  # noqa: UP007 - built from a list
            "description": " or ".join(f"`{error.slug}`: {error.title()}" for error in group),
        }
        for status, group in sorted(by_status.items())
    }


def problem_response(error: TarnError, request: Request) -> Response:
    """Return the problem response for an error of this request."""
    return response_to(error, path_of(request))


def response_to(error: TarnError, instance: str) -> Response:
    """Return the problem response for an error. The only place where errors become responses."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = 'Bearer realm="tarn"'
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.members["allowed"])
    if error.status in (408, 413):
        # The rest of the body is not read.
        headers["Connection"] = "close"
    return Response(error.problem(instance).model_dump_json(), error.status, headers, MEDIA_TYPE)


def path_of(request: Request) -> str:
    """Return the request's path for responses, logs and SQL: percent-encoded, and cut off at 500 characters."""
    return quote(request.scope["path"])[:500]


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Install handlers that turn errors of FastAPI and Starlette into problems.

    `ExceptionMiddleware` handles all others.
    """

    @app.exception_handler(TarnError)
    async def _tarn_error(request: Request, error: TarnError) -> Response:
        return problem_response(error, request)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        faults = [_fault(fault) for fault in error.errors()]
        return problem_response(SchemaViolation(_summary(faults), errors=faults), request)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        return problem_response(_translated(error, request, routes), request)


def _fault(fault: dict[str, Any]) -> FieldError:
    where, *path = fault["loc"]
    parts = [str(part) for part in path]
    field = ".".join(parts if where == "body" else [where, *parts])
    return FieldError(field=field or None, reason=fault["msg"].removeprefix("Value error, "))


def _summary(faults: list[FieldError]) -> str:
    first = f"{faults[0].field}: {faults[0].reason}" if faults[0].field else faults[0].reason
    return first if len(faults) == 1 else f"{first} (and {len(faults) - 1} more)"


def _translated(error: HTTPException, request: Request, routes: Sequence[BaseRoute]) -> TarnError:
    if isinstance(error.__cause__, TarnError):
        return error.__cause__
    if error.status_code == 405:
        return MethodNotAllowed(
            f"{path_of(request)} does not support {request.method}", allowed=_allowed(request.scope, routes)
        )
    if error.status_code == 415:
        return UnsupportedMediaType(str(error.detail), supported=["application/json"])
    if error.status_code == 404:
        return RouteNotFound(f"there is no route {path_of(request)}; see /docs for all routes")
    return InvalidFormat(str(error.detail), errors=[])


def _allowed(scope: Scope, routes: Sequence[BaseRoute]) -> list[str]:
    """Return the methods of all routes at this path. Starlette reports those of the first one only."""
    matching = (route for route in routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE)
    return sorted({method for route in matching for method in route.methods or ()})
