"""The journal as callers see it: what waits to be flushed, and what was set aside."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from tarn.model.tenant import Strict

MOST_RETRIED = 1000
"""Events that one request puts back."""

EventId = Annotated[str, Field(max_length=36, pattern=r"^[A-Za-z0-9-]+$")]


class SegmentDepth(BaseModel):
    """A segment and what waits in it."""

    segment: int
    batches: int
    rows: int
    state: Literal["open", "closed"]


class Depth(BaseModel):
    """What is committed and in no snapshot yet."""

    segment: int = Field(description="The segment that is open.")
    commit: int = Field(description="The last commit number given out.")
    rows: int
    oldest: datetime | None = Field(description="When the oldest of them was committed.")
    segments: list[SegmentDepth] = Field(description="Those in which something waits, and the open one.")


class RejectedEvent(BaseModel):
    """An event that could not be written, kept as it was."""

    id: str
    batch: str = Field(description="The batch that it came with.")
    commit: int
    position: int
    tenant: str = Field(description="Who wrote it.")
    event: dict[str, Any] = Field(description="The journal's row; the statement's id is hexadecimal.")
    reason: str
    at: datetime


class RejectedRetry(Strict):
    """Which events to put back into the journal; without ids the oldest ones."""

    ids: Annotated[list[EventId], Field(min_length=1, max_length=MOST_RETRIED)] | None = None


class Retried(BaseModel):
    """How many events were put back, and as which commit; there may be more."""

    retried: int
    commit: int | None
