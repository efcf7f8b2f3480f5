"""Range of timestamps in the journal and the tables: microseconds since 1970, in UTC."""

FIRST_MOMENT, LAST_MOMENT = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999: the range of Python's datetime, which computes the column statistics."""
