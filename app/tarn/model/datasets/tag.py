"""Tags: keys with a timestamp, which decide whether derived data is still fresh."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, BaseModel, Field

from tarn.model.metadata import checked_value
from tarn.model.names import LAKEHOUSE, TagKey
from tarn.model.tenant import AnyMoment, Strict

LARGEST_VALUE = 4096
"""Maximum bytes of a tag's value as JSON."""

CORE = f"{LAKEHOUSE}/"
"""Prefix of the keys of system tags, as tenants see them."""


def _small(value: Any) -> Any:
    size = len(orjson.dumps(checked_value(value)))
    if size > LARGEST_VALUE:
        raise ValueError(f"is {size} bytes of JSON, at most {LARGEST_VALUE} are allowed")
    return value


class NewTag(Strict):
    """A tag to set. Its timestamp is the current time by default."""

    at: Annotated[AnyMoment | None, Field(description="Its timestamp; by default, the current time.")] = None
    value: Annotated[
        Any, Field(description=f"Any JSON of up to {LARGEST_VALUE} bytes to store with it."), AfterValidator(_small)
    ] = None


class Tag(BaseModel):
    """A tag of the caller, or a system tag, whose key starts with `lakehouse/`."""

    key: str
    at: datetime
    value: Any = Field(None, description="The stored value; null: none.")

    def to_json(self) -> bytes:
        """Return the tag as it is stored in the lake: its value, or without one its timestamp."""
        return orjson.dumps(self.at.isoformat() if self.value is None else self.value)


class Latest(BaseModel):
    """Whether a tag is newer than others."""

    key: str
    latest: bool
    at: datetime | None = Field(description="The tag's timestamp; null: there is no such tag.")
    newer: list[str] = Field(description="Tags that it is not newer than.")


def is_core(key: str) -> bool:
    """Return whether a key is in the namespace of the system tags, in which tenants cannot write."""
    return key == LAKEHOUSE or key.startswith(CORE)


def newer_tags(at: datetime | None, others: Mapping[TagKey, datetime], keys: Iterable[TagKey]) -> list[str]:
    """Return the keys whose tags exist and are not older than a time."""
    return [key for key in keys if key in others and (at is None or others[key] >= at)]
