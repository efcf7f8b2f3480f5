"""API models of the journal: unflushed segments and rejected events."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from tarn.model.tenant import Strict

MOST_RETRIED = 1000
"""Maximum events that one request retries."""

EventId = Annotated[str, Field(max_length=36, pattern=r"^[A-Za-z0-9-]+$")]


class SegmentDepth(BaseModel):
    """A segment and its unflushed batches and rows."""

    segment: int
    batches: int
    rows: int
    state: Literal["open", "closed"]


class Depth(BaseModel):
    """Committed events that are in no snapshot yet."""

    segment: int = Field(description="The open segment.")
    commit: int = Field(description="The last commit number assigned.")
    rows: int
    oldest: datetime | None = Field(description="When the oldest unflushed row was committed.")
    segments: list[SegmentDepth] = Field(description="Segments with unflushed rows, and the open one.")


class RejectedEvent(BaseModel):
    """An event that could not be flushed, stored unchanged."""

    id: str
    batch: str = Field(description="The batch it belongs to.")
    commit: int
    position: int
    tenant: str = Field(description="The tenant that wrote it.")
    event: dict[str, Any] = Field(description="The journal's row; the statement's id is hexadecimal.")
    reason: str
    at: datetime


class RejectedRetry(Strict):
    """Rejected events to write to the journal again; without ids, the oldest ones."""

    ids: Annotated[list[EventId], Field(min_length=1, max_length=MOST_RETRIED)] | None = None


class Retried(BaseModel):
    """How many events were retried, and as which commit; more may remain."""

    retried: int
    commit: int | None
