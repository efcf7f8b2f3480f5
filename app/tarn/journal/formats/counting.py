"""Count the records of a body where they are read, to verify later that none was lost."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from tarn.journal.formats.record import IgnoredColumns

T = TypeVar("T")


class RecordsLost(RuntimeError):
    """The counts of read, stored and reported records differ: a bug in Tarn. Nothing of the body is stored."""


class Counted(Generic[T]):
    """An iterator over records that counts them.

    A generator that knows its number of records from another source (the metadata of a Parquet file, the headers of
    Arrow batches) returns that number; at the end the two must be equal.
    """

    def __init__(self, records: Iterator[T]) -> None:
        self._records = records
        self.count = 0

    def __iter__(self) -> "Counted[T]":
        return self

    def __next__(self) -> T:
        try:
            record = next(self._records)
        except StopIteration as end:
            require_equal(self.count, end.value, "records were read", "are in the body")
            raise
        if not isinstance(record, IgnoredColumns):
            self.count += 1
        return record


def require_equal(count: int, expected: int | None, counted: str, expected_what: str) -> None:
    """Raise RecordsLost if two counts of the same thing differ. An expected count of None is not checked."""
    if expected is not None and count != expected:
        raise RecordsLost(f"{count} {counted} and {expected} {expected_what}")
