"""Ids (UUIDv7) and timestamps that are safe in a path."""

from datetime import UTC, datetime

import uuid_utils


def new_id() -> str:
    """Return a new UUIDv7: time-ordered, and unique without coordination."""
    return str(uuid_utils.uuid7())


def first_id(moment: datetime) -> str:
    """Return a lower bound of all ids created at a moment or later."""
    digits = f"{max(0, int(moment.timestamp() * 1000)):012x}"
    return f"{digits[:8]}-{digits[8:]}"


def now() -> datetime:
    """Return the current time in UTC, with the microseconds that every back end keeps."""
    return datetime.now(UTC)


def stamp(moment: datetime) -> str:
    """Format a moment for a path: sortable, without colon and slash."""
    return moment.astimezone(UTC).strftime("%Y%m%dT%H%M%S.%fZ")


def parse_stamp(text: str) -> datetime:
    """Parse the output of `stamp`. Raises ValueError for anything else."""
    return datetime.strptime(text, "%Y%m%dT%H%M%S.%fZ").replace(tzinfo=UTC)
