"""Idempotency keys on routes whose effect is not a batch of the journal (a batch keeps its answer with itself).

The key is claimed before the route runs and holds its answer afterwards. A process that dies in between leaves a claim,
which counts for nothing after a minute: then the request may be sent again, and finds what its first try did.
"""

import hashlib
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import orjson
from fastapi import Request, Response

from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.services.container import Services, services_of
from tarn.db import idempotency as answers
from tarn.db.idempotency import IdempotencyKey
from tarn.errors import Fault, Locked, SchemaViolation
from tarn.model.ids import now

HEADER = "Idempotency-Key"
CLAIMED = 0
"""The status of an answer that is not there yet."""
STALE = timedelta(minutes=1)
STORED_HEADERS = ("etag", "location")

SECRET = frozenset({"create_key"})
"""Routes whose answer must be kept nowhere, and so cannot be given twice."""


async def run_once(
    request: Request, operation: str, tenant: str, handle: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Run a route at most once for its idempotency key. Raises IdempotencyMismatch, Locked, SchemaViolation."""
    key = request.headers.get(HEADER)
    if key is None:
        return await handle(request)
    once = IdempotencyKey(_checked(key, operation), fingerprint(request, hashlib.sha256(await request.body())))
    house = services_of(request)
    before = await run_in_threadpool(_claim, house, tenant, once)
    if before is not None:
        return Response(before["body"], before["status"], before["headers"], before["type"])
    try:
        response = await handle(request)
    except BaseException:
        await run_in_threadpool(_forget, house, tenant, once)
        raise
    await run_in_threadpool(_complete, house, tenant, once, response)
    return response


def fingerprint(request: Request, body: Any) -> str:
    """What makes two requests the same: method, path, query, and the digest of the body."""
    return fingerprint_of(request, body.hexdigest())


def fingerprint_of(request: Request, digest: str) -> str:
    """The same, where no more than the digest of the body is known."""
    query = sorted(request.query_params.multi_items())
    what = orjson.dumps([request.method, request.scope["path"], query, digest])
    return hashlib.sha256(what).hexdigest()


def _checked(key: str, operation: str) -> str:
    if operation in SECRET:
        reason = "cannot be used here: the answer holds a secret, which is kept nowhere"
    elif not 1 <= len(key) <= 255 or not key.isascii() or not key.isprintable() or " " in key:
        reason = "must be 1 to 255 printable ASCII characters without spaces"
    else:
        return key
    raise SchemaViolation(f"{HEADER} {reason}", errors=[Fault(field=f"header.{HEADER}", reason=reason)])


def _claim(house: Services, tenant: str, once: IdempotencyKey) -> dict[str, Any] | None:
    """Take the key, or return the answer that it has."""
    with house.database.write() as connection:
        kept = answers.find(connection, tenant, once)
        if kept is not None and kept.status == CLAIMED and kept.created < now() - STALE:
            answers.forget(connection, tenant, once)
            kept = None
        if kept is None and answers._insert(connection, tenant, once, CLAIMED, {}):
            return None
        if kept is None or kept.status == CLAIMED:
            raise Locked("the first request with this idempotency key is still being answered", holder=tenant)
        answer: dict[str, Any] = kept.answer
        return answer


def _complete(house: Services, tenant: str, once: IdempotencyKey, response: Response) -> None:
    """Put the answer in the claim's place; an answer that is no success is not kept."""
    with house.database.write() as connection:
        answers.forget(connection, tenant, once)
        if response.status_code < 300:
            answer = {
                "status": response.status_code,
                "body": bytes(response.body).decode(),
                "headers": {name: response.headers[name] for name in STORED_HEADERS if name in response.headers},
                "type": response.media_type or "application/json",
            }
            answers._insert(connection, tenant, once, response.status_code, answer)


def _forget(house: Services, tenant: str, once: IdempotencyKey) -> None:
    with house.database.write() as connection:
        answers.forget(connection, tenant, once)
