"""CORS middleware that refuses a preflight request with a problem."""

from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tarn.api.http.problems import problem_response
from tarn.errors import Forbidden


class Cors(CORSMiddleware):
    """Starlette's CORS middleware, except that a refused preflight request gets a problem."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        return response if response.status_code == 200 else _Refusal()


class _Refusal(Response):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = Forbidden("TARN_CORS_ORIGINS does not allow this request from a page of this origin")
        await problem_response(error, Request(scope))(scope, receive, send)
