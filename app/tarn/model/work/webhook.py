"""Webhooks: configuration, delivery state and signatures."""

import hashlib
import hmac
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, Field, SecretStr

from tarn.model.names import DatasetPattern, TenantName
from tarn.model.tenant import Strict
from tarn.model.work.event import EventKind

EVENT_HEADER = "Tarn-Event-Id"
TIME_HEADER = "Tarn-Timestamp"
SIGNATURE_HEADER = "Tarn-Signature"

Secret = Annotated[SecretStr, Field(min_length=16, max_length=256)]


class WebhookState(StrEnum):
    """Delivery state: `failing` is retried; `given_up` is not, until the webhook is set again."""

    ACTIVE = "active"
    FAILING = "failing"
    GIVEN_UP = "given_up"


class NewWebhook(Strict):
    """A webhook to set: its URL, secret and event filter."""

    url: Annotated[str, Field(max_length=2048)] = Field(
        description="HTTP(S) URL of a public host, or of one that the operator allows. Redirects are not followed."
    )
    secret: Secret | None = Field(
        None, description="Secret that signs deliveries; never returned. Without it, the existing secret is kept."
    )
    kinds: Annotated[list[EventKind], Field(max_length=100)] = Field(
        default=[], description="Deliver only these kinds, and `missed`; empty: every kind."
    )
    datasets: Annotated[list[DatasetPattern], Field(max_length=1000)] = Field(
        default=[DatasetPattern("*")], description="Deliver events of these datasets, if the tenant may read them."
    )


class Webhook(BaseModel):
    """A tenant's webhook and its delivery state, without its secret."""

    id: str
    tenant: TenantName
    url: str
    kinds: list[EventKind]
    datasets: list[DatasetPattern]
    created: datetime
    updated: datetime
    state: WebhookState
    attempts: int = Field(description="Failed attempts to deliver the next event.")
    problem: str | None = Field(description="Why the last attempt failed.")
    next_try: datetime | None
    delivered: int = Field(description="Events that were delivered.")
    failed: int = Field(description="Attempts that failed.")
    last_delivered: datetime | None


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Return the value of `Tarn-Signature`: HMAC-SHA256 over `Tarn-Timestamp`, a full stop and the body."""
    digest = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256)
    return f"sha256={digest.hexdigest()}"
