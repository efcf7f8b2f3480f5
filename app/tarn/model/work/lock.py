"""Locks: named leases of a tenant on a dataset."""

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, Field

from tarn.model.names import DatasetName, LockName, TenantName
from tarn.model.tenant import Label, Strict

LONGEST_TTL = 24 * 3600

Token = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
"""Proof of ownership of a lock or queue item: returned once, and required by later requests."""


class NewLock(Strict):
    """A request to acquire a lock, or with its token, to refresh it."""

    ttl: Annotated[float, Field(gt=0, le=LONGEST_TTL, description="Seconds after which it expires, unless refreshed.")]
    token: Annotated[Token | None, Field(description="Token of the held lock to refresh.")] = None
    holder: Annotated[Label, Field(description="Name of the holder that others see.")] = ""


class Lock(BaseModel):
    """A lock, without its token. An expired lock goes to the first that requests it."""

    name: LockName
    holder: str
    fence: int = Field(
        description="Fencing token: higher than that of every earlier holder, over the lifetime of the dataset."
    )
    taken: datetime
    expires: datetime = Field(description="According to the database's clock.")


class HeldLock(Lock):
    """A lock as returned to its holder."""

    token: str


class AnyLock(Lock):
    """A lock of any tenant, as the lake's administrator sees it."""

    id: str
    dataset: DatasetName
    tenant: TenantName
