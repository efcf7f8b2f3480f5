"""Idempotency keys for routes that do not write a journal batch (a batch stores its response itself).

The key is claimed before the route runs; the response replaces the claim afterwards. A process that dies in between
leaves a claim, which expires after a minute: then the request may be sent again, and sees the effect of the first one.
"""

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response

from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.services.container import Services, services_of
from tarn.db import idempotency
from tarn.db.idempotency import IdempotencyKey
from tarn.errors import FieldError, SchemaViolation

HEADER = "Idempotency-Key"
STORED_HEADERS = ("etag", "location")

SECRET = frozenset({"create_key"})
"""Routes whose response contains a secret. It must not be stored, so it cannot be replayed."""


async def run_once(
    request: Request, operation: str, tenant: str, handle: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Run a route at most once for its idempotency key. Raises IdempotencyMismatch, Locked, SchemaViolation."""
    key = request.headers.get(HEADER)
    if key is None:
        return await handle(request)
    once = IdempotencyKey(_checked(key, operation), fingerprint(request, hashlib.sha256(await request.body())))
    services = services_of(request)
    stored = await run_in_threadpool(idempotency.claim, services.database, tenant, once)
    if stored is not None:
        answer = stored.answer
        return Response(answer["body"], answer["status"], answer["headers"], answer["type"])
    try:
        response = await handle(request)
    except BaseException:
        await run_in_threadpool(idempotency.forget, services.database, tenant, once)
        raise
    await run_in_threadpool(_complete, services, tenant, once, response)
    return response


def idempotency_key(request: Request, key: str | None, digest: str) -> IdempotencyKey | None:
    """Return the key of a request with this hex digest of its body; None for a request without one."""
    return None if key is None else IdempotencyKey(key, fingerprint_of(request, digest))


def fingerprint(request: Request, body: Any) -> str:
    """Return the hash of method, path, query and body: requests with the same fingerprint are the same request."""
    return fingerprint_of(request, body.hexdigest())


def fingerprint_of(request: Request, digest: str) -> str:
    """Return the same hash, given the hex digest of the body."""
    path, query = request.scope["path"], request.query_params.multi_items()
    return idempotency.fingerprint(request.method, path, query, digest)


def _checked(key: str, operation: str) -> str:
    if operation in SECRET:
        reason = "cannot be used here: the response contains a secret, which is not stored and so cannot be replayed"
    elif not 1 <= len(key) <= 255 or not key.isascii() or not key.isprintable() or " " in key:
        reason = "must be 1 to 255 printable ASCII characters without spaces"
    else:
        return key
    raise SchemaViolation(f"{HEADER} {reason}", errors=[FieldError(field=f"header.{HEADER}", reason=reason)])


def _complete(services: Services, tenant: str, once: IdempotencyKey, response: Response) -> None:
    """Replace the claim with the response. Only a response below 300 is stored."""
    if response.status_code >= 300:
        idempotency.forget(services.database, tenant, once)
        return
    answer = {
        "status": response.status_code,
        "body": bytes(response.body).decode(),
        "headers": {name: response.headers[name] for name in STORED_HEADERS if name in response.headers},
        "type": response.media_type or "application/json",
    }
    idempotency.complete(services.database, tenant, once, response.status_code, answer)
