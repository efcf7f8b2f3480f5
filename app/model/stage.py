"""A stage: the bulk writer's open batch."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, Field

from app.model.names import Origin
from app.model.tenant import Strict

Message = Annotated[str, Field(max_length=10_000)]


class NewStage(Strict):
    origin: Origin | None = None
    message: Message | None = None
    metadata: dict[str, Any] | None = None


class StageState(StrEnum):
    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Stage(BaseModel):
    """A stage and what was sent to it so far."""

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


class StageCommit(Strict):
    """Several stages to be committed as one."""

    stages: Annotated[list[str], Field(min_length=1, max_length=1000)]
    message: Message | None = None
    metadata: dict[str, Any] | None = None
