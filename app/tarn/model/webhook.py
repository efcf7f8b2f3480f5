"""Webhooks: where a tenant wants its events sent, how they are signed, and how that goes."""

import hashlib
import hmac
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, Field, SecretStr

from tarn.model.event import EventKind
from tarn.model.names import DatasetPattern, TenantName
from tarn.model.tenant import Strict

EVENT_HEADER = "Tarn-Event-Id"
TIME_HEADER = "Tarn-Timestamp"
SIGNATURE_HEADER = "Tarn-Signature"

Secret = Annotated[SecretStr, Field(min_length=16, max_length=256)]


class WebhookState(StrEnum):
    """How a webhook does: `failing` is tried again, `given_up` is not until it is set again."""

    ACTIVE = "active"
    FAILING = "failing"
    GIVEN_UP = "given_up"


class NewWebhook(Strict):
    """Where to send which events."""

    url: Annotated[str, Field(max_length=2048)] = Field(
        description="An http or https address of a public host, or one that the operator opened. No redirects."
    )
    secret: Secret | None = Field(
        None, description="What deliveries are signed with; never shown. Left out, the one that is there stays."
    )
    kinds: Annotated[list[EventKind], Field(max_length=100)] = Field(
        default=[], description="Only these kinds, and `missed`; none: every kind."
    )
    datasets: Annotated[list[DatasetPattern], Field(max_length=1000)] = Field(
        default=[DatasetPattern("*")], description="Of these datasets, as far as the tenant may read them."
    )


class Webhook(BaseModel):
    """A tenant's webhook and how it does, without its secret."""

    id: str
    tenant: TenantName
    url: str
    kinds: list[EventKind]
    datasets: list[DatasetPattern]
    created: datetime
    updated: datetime
    state: WebhookState
    attempts: int = Field(description="At the event that is next.")
    problem: str | None = Field(description="Why the last attempt failed.")
    next_try: datetime | None
    delivered: int = Field(description="Events that arrived.")
    failed: int = Field(description="Attempts that failed.")
    last_delivered: datetime | None


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """What `Tarn-Signature` says: HMAC-SHA256 over `Tarn-Timestamp`, a full stop and the body."""
    made = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256)
    return f"sha256={made.hexdigest()}"
