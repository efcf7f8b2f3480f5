"""Timestamps in the journal and the tables: microseconds since 1970, in UTC."""

from datetime import UTC, datetime

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

FIRST_MOMENT, LAST_MOMENT = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999: the range of Python's datetime, which computes the column statistics."""


def since_epoch(moment: datetime) -> int:
    """Return a time in microseconds since 1970."""
    since = moment - EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
