"""Refs: names that pin snapshots."""

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, Field

from tarn.model.names import RefName
from tarn.model.tenant import Strict


class Ref(BaseModel):
    """A named pin: retention keeps the snapshot as long as the ref exists."""

    name: RefName
    seq: int
    snapshot: str
    tenant: str = Field(description="The tenant that set it last.")
    updated: datetime


StateName = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:+-]*$")]
"""Identifies a snapshot: its id or number, a ref, or a time."""


class NewRef(Strict):
    snapshot: StateName = Field(description="A snapshot's id or number, `latest`, or a time.")
