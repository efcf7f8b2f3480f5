"""Locks: named leases of a tenant on a dataset."""

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, Field

from tarn.model.names import DatasetName, LockName, TenantName
from tarn.model.tenant import Label, Strict

LONGEST_TTL = 24 * 3600

Token = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
"""What shows that its bearer holds something: given out once, and asked for from then on."""


class NewLock(Strict):
    """How long a lock is wanted. With the token of one that is held, it is held on."""

    ttl: Annotated[float, Field(gt=0, le=LONGEST_TTL, description="Seconds after which it is free, unless refreshed.")]
    token: Annotated[Token | None, Field(description="Of the lock that is to be refreshed.")] = None
    holder: Annotated[Label, Field(description="Who others are told holds it.")] = ""


class Lock(BaseModel):
    """A lock, without what shows that one holds it. One that has expired is whose asks first."""

    name: LockName
    holder: str
    fence: int = Field(description="Higher than every earlier holder's, for as long as there is the dataset.")
    taken: datetime
    expires: datetime = Field(description="By the database's clock.")


class HeldLock(Lock):
    """A lock as its holder gets it."""

    token: str


class AnyLock(Lock):
    """A lock of anybody's, as the lake's administrator sees it."""

    id: str
    dataset: DatasetName
    tenant: TenantName
