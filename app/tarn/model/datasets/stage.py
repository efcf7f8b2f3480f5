"""Stages: open batches of a bulk writer."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from tarn.model.metadata import Metadata
from tarn.model.names import Origin
from tarn.model.tenant import Strict


def _storable(text: str) -> str:
    if "\x00" in text:
        raise ValueError("must not have the character NUL, which PostgreSQL cannot store")
    return text


Message = Annotated[str, Field(max_length=10_000), AfterValidator(_storable)]


class NewStage(Strict):
    origin: Origin | None = None
    message: Message | None = None
    metadata: Metadata | None = None


class StageState(StrEnum):
    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Stage(BaseModel):
    """A stage, and how much was sent to it."""

    id: str
    state: StageState
    origin: Origin | None
    message: str | None
    metadata: dict[str, Any]
    entities: int
    statements: int
    created: datetime
    expires: datetime
    commit: int | None


StageId = Annotated[str, Field(max_length=36, pattern=r"^[A-Za-z0-9-]+$")]


class StageCommit(Strict):
    """Several stages to commit atomically."""

    stages: Annotated[list[StageId], Field(min_length=1, max_length=1000)]
    message: Message | None = None
    metadata: Metadata | None = None
