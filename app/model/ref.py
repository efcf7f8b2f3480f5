"""Refs: names that pin snapshots."""

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, Field

from app.model.names import RefName
from app.model.tenant import Strict


class Ref(BaseModel):
    """A named pin: retention keeps the snapshot for as long as the ref is there."""

    name: RefName
    seq: int
    snapshot: str
    tenant: str = Field(description="Who set it last.")
    updated: datetime


class NewRef(Strict):
    snapshot: Annotated[str, Field(max_length=128, description="A snapshot's id or number, `latest`, or a moment.")]
