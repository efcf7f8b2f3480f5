"""Key ranges, and the key spans of data files. A key is a canonical id."""

from typing import NamedTuple

from tarn.model.datasets.snapshot import File


class Range(NamedTuple):
    """Keys from `low` inclusive to `high` exclusive; None: unbounded."""

    low: str
    high: str | None

    def holds(self, key: str) -> bool:
        return self.low <= key and (self.high is None or key < self.high)


EVERYTHING = Range("", None)


def closed_range(low: str, high: str) -> Range:
    """Return the range from `low` to `high`, both inclusive."""
    return Range(low, high + "\0")


class ColumnSpan(NamedTuple):
    """The first and last value of a column in a file, or bounds of them; `last` None: unknown."""

    first: str
    last: str | None

    def meets(self, keys: Range) -> bool:
        return (keys.high is None or self.first < keys.high) and (self.last is None or self.last >= keys.low)

    def lies_in(self, keys: Range) -> bool:
        return keys.holds(self.first) and (keys.high is None or (self.last is not None and self.last < keys.high))

    def overlaps(self, other: "ColumnSpan") -> bool:
        return (other.last is None or self.first <= other.last) and (self.last is None or other.first <= self.last)


def span(file: File, column: str = "canonical_id") -> ColumnSpan:
    """Return the bounds of a column of text in a file, by default of its keys; unbounded if none are recorded."""
    bounds = file.columns.get(column)
    if bounds is None or bounds.min is None or bounds.max is None:
        return ColumnSpan("", None)
    return ColumnSpan(str(bounds.min), str(bounds.max))
