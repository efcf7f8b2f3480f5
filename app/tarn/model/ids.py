"""Ids and moments: time-ordered, unique without coordination, safe in a path."""

from datetime import UTC, datetime

import uuid_utils


def new_id() -> str:
    """A UUIDv7: sorts by the time at which it was made."""
    return str(uuid_utils.uuid7())


def first_id(moment: datetime) -> str:
    """What every id that was made at a moment or later is not less than."""
    digits = f"{max(0, int(moment.timestamp() * 1000)):012x}"
    return f"{digits[:8]}-{digits[8:]}"


def now() -> datetime:
    """The present, in UTC, to the microsecond that every store of ours keeps."""
    return datetime.now(UTC)


def stamp(moment: datetime) -> str:
    """A moment as it stands in a path: sortable, no colon, no slash."""
    return moment.astimezone(UTC).strftime("%Y%m%dT%H%M%S.%fZ")


def parse_stamp(text: str) -> datetime:
    """The moment that `stamp` wrote. Raises ValueError for anything else."""
    return datetime.strptime(text, "%Y%m%dT%H%M%S.%fZ").replace(tzinfo=UTC)
