"""Ranges of keys, and where the files of a store lie among them. A key is a canonical id."""

from typing import NamedTuple

from tarn.model.snapshot import File


class Range(NamedTuple):
    """Keys from one on, and before another; None: to the end."""

    low: str
    high: str | None

    def holds(self, key: str) -> bool:
        return self.low <= key and (self.high is None or key < self.high)


EVERYTHING = Range("", None)


class ColumnSpan(NamedTuple):
    """The first and the last key of a file, or what lies below and above them; None: nothing is known."""

    first: str
    last: str | None

    def meets(self, keys: Range) -> bool:
        return (keys.high is None or self.first < keys.high) and (self.last is None or self.last >= keys.low)

    def lies_in(self, keys: Range) -> bool:
        return keys.holds(self.first) and (keys.high is None or (self.last is not None and self.last < keys.high))

    def overlaps(self, other: "ColumnSpan") -> bool:
        return (other.last is None or self.first <= other.last) and (self.last is None or other.first <= self.last)


def span(file: File) -> ColumnSpan:
    bounds = file.columns.get("canonical_id")
    if bounds is None or bounds.min is None or bounds.max is None:
        return ColumnSpan("", None)
    return ColumnSpan(str(bounds.min), str(bounds.max))
