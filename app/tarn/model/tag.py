"""Tags: keys with a moment, by which it is decided whether something derived is still fresh."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, BaseModel, Field

from tarn.model.metadata import checked_value
from tarn.model.names import LAKEHOUSE, TagKey
from tarn.model.tenant import AnyMoment, Strict

LARGEST_VALUE = 4096
"""Bytes of a tag's value as JSON."""

CORE = f"{LAKEHOUSE}/"
"""What keys of the core's own tags begin with, as tenants see them."""


def _small(value: Any) -> Any:
    size = len(orjson.dumps(checked_value(value)))
    if size > LARGEST_VALUE:
        raise ValueError(f"is {size} bytes of JSON, at most {LARGEST_VALUE} are kept")
    return value


class NewTag(Strict):
    """What a tag is to say. Without a moment it is the present one."""

    at: Annotated[AnyMoment | None, Field(description="Its moment; without one, now.")] = None
    value: Annotated[
        Any, Field(description=f"Any JSON of up to {LARGEST_VALUE} bytes to be kept with it."), AfterValidator(_small)
    ] = None


class Tag(BaseModel):
    """A tag of the caller's, or one of the core's, whose keys begin with `lakehouse/`."""

    key: str
    at: datetime
    value: Any = Field(None, description="What was kept with it; null: nothing.")

    def to_json(self) -> bytes:
        """The tag as it lies in the layout: its value, or its moment."""
        return orjson.dumps(self.at.isoformat() if self.value is None else self.value)


class Latest(BaseModel):
    """Whether a tag is newer than others."""

    key: str
    latest: bool
    at: datetime | None = Field(description="The tag's own moment; null: there is no such tag.")
    newer: list[str] = Field(description="Those that it is not newer than.")


def is_core(key: str) -> bool:
    """Whether a key is of the core's namespace, in which nobody else writes."""
    return key == LAKEHOUSE or key.startswith(CORE)


def newer_tags(at: datetime | None, others: Mapping[TagKey, datetime], keys: Iterable[TagKey]) -> list[str]:
    """Those of some keys whose tags are there, and not older than a moment."""
    return [key for key in keys if key in others and (at is None or others[key] >= at)]
