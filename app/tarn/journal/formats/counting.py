"""Count the records of a body where they are read, for whoever has to account for each of them."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from tarn.journal.formats.record import IgnoredColumns

T = TypeVar("T")


class RecordsLost(RuntimeError):
    """The records of a body that were read, stored and reported do not add up: a fault of ours. Nothing is stored."""


class Counted(Generic[T]):
    """An iterator over records that counts them.

    A generator that knows from elsewhere how many records it has (the metadata of a Parquet file, the headers of Arrow
    batches) returns that number; at its end the two must be equal.
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


def require_equal(count: int, expected: int | None, what: str, expected_what: str) -> None:
    """Raise RecordsLost if two counts of the same thing differ; None is a count that nobody knows."""
    if expected is not None and count != expected:
        raise RecordsLost(f"{count} {what} and {expected} {expected_what}")
