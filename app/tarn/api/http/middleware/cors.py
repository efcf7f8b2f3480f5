"""Which pages browsers let call us, and the refusal of all others in the form of every other problem."""

from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tarn.api.http.problems import problem_response
from tarn.errors import Forbidden


class Cors(CORSMiddleware):
    """Starlette's, except for what a refused preflight is answered."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        return response if response.status_code == 200 else _Refusal()


class _Refusal(Response):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = Forbidden("TARN_CORS_ORIGINS does not let a page of this origin make this request")
        await problem_response(error, Request(scope))(scope, receive, send)
