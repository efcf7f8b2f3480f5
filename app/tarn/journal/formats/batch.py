"""Convert untrusted Arrow record batches to statements.

A batch is fully validated, because invalid offsets would otherwise be followed. It is converted to dicts a few rows at
a time, because a dictionary stores a long value once and many rows can refer to it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from tarn.journal.formats.budget import Budget
from tarn.journal.formats.columns import NEEDED, check_columns, truth
from tarn.journal.formats.record import BadRecord, Row, invalid_format, too_long

ROWS = 8192
"""Maximum rows converted to dicts at once."""

BYTES = 8 << 20
"""Maximum bytes of text converted to dicts at once, unless a single row has more."""

_TIMES = ("first_seen", "last_seen")

T = TypeVar("T")


def check_schema(schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns that are not fields of a statement; their types are not checked.

    Raises InvalidFormat if a required column is missing or a statement's column has an unsupported type.
    """
    ignored = check_columns(schema.names)
    for field in schema:
        if field.name in ignored:
            continue
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        fits = (
            is_text(kind)
            or (field.name not in NEEDED and pa.types.is_null(kind))
            or (field.name == "external" and pa.types.is_boolean(kind))
            or (field.name in _TIMES and (pa.types.is_timestamp(kind) or pa.types.is_date(kind)))
        )
        if not fits:
            raise invalid_format(f"the column {field.name} has the unsupported type {field.type}")
    return ignored


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def longest_row(batch: pa.RecordBatch) -> int:
    """Return the bytes of a row that has the longest value of every dictionary in the batch."""
    dictionaries = [column.dictionary for column in batch.columns if pa.types.is_dictionary(column.type)]
    return sum(pc.max(_lengths(dictionary)).as_py() or 0 for dictionary in dictionaries)


def statement_rows(
    batches: Iterator[pa.RecordBatch], longest: int, budget: Budget, names: list[str]
) -> Iterator[Row | BadRecord]:
    """Yield every row as a dict of these columns, numbered from 1; one over `longest` bytes is a BadRecord.

    Raises InvalidFormat for an inconsistent batch or times outside the range of datetime; BodyTooLarge if all rows
    together have more text than the budget allows.
    """
    number = 1
    while (batch := reading(lambda: next(batches, None), number)) is not None:
        batch = batch.select(names)
        reading(partial(batch.validate, full=True), number)
        columns = [_Column(name, batch.column(name)) for name in names]
        for start in range(0, batch.num_rows, ROWS):
            end = min(start + ROWS, batch.num_rows)
            sizes = [sum(row) for row in zip(*(column.lengths(start, end) for column in columns), strict=True)]
            budget.add_text(sum(sizes))
            for first, last in _portions(sizes, start, end, longest):
                if first == last:
                    yield too_long(number + first, longest)
                else:
                    values = reading(partial(_values, columns, first, last), number + first)
                    yield from _statements(names, values, number + first)
        number += batch.num_rows


def _portions(sizes: list[int], start: int, end: int, longest: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows small enough to be converted together; an empty range marks a row that is too long."""
    total = 0
    for row, size in enumerate(sizes, start):
        if size > longest or total + size > BYTES:
            if start < row:
                yield start, row
            start, total = row, 0
        if size > longest:
            yield row, row
            start = row + 1
        else:
            total += size
    if start < end:
        yield start, end


def _values(columns: list["_Column"], start: int, end: int) -> list[list[Any]]:
    return [column.values(start, end) for column in columns]


def _statements(names: list[str], values: list[list[Any]], number: int) -> Iterator[Row | BadRecord]:
    for line, row in enumerate(zip(*values, strict=True), number):
        statement = dict(zip(names, row, strict=False))  # lengths are equal, and strict is slower
        if statement.setdefault("external", False) is None:
            yield BadRecord(line, "neither true nor false", "external")
        else:
            yield line, statement


class _Column:
    """A column of a batch, whose values are read in small ranges."""

    def __init__(self, name: str, data: pa.Array) -> None:
        self.name = name
        self._data = data
        self._dictionary_lengths = _lengths(data.dictionary) if pa.types.is_dictionary(data.type) else None

    def lengths(self, start: int, end: int) -> list[int]:
        """Return the size of each value in bytes; 0 for values that are not text."""
        data = self._data.slice(start, end - start)
        known = self._dictionary_lengths
        lengths: list[int] = (_lengths(data) if known is None else known.take(data.indices).fill_null(0)).to_pylist()
        return lengths

    def values(self, start: int, end: int) -> list[Any]:
        """Return text as str, times as datetimes, and `external` as a bool, or None if its text is not a boolean."""
        data = self._data.slice(start, end - start)
        if pa.types.is_dictionary(data.type):
            data = data.dictionary_decode()
        if pa.types.is_timestamp(data.type) or pa.types.is_date(data.type):
            zone = getattr(data.type, "tz", None) and "UTC"
            data = pc.cast(data, options=pc.CastOptions(pa.timestamp("us", zone), allow_time_truncate=True))
        values: list[Any] = data.to_pylist()
        if self.name == "external":
            return [truth(value) if isinstance(value, str) else value or False for value in values]
        return values


def _lengths(data: pa.Array) -> pa.Array:
    if not len(data) or not is_text(data.type):
        return pa.repeat(0, len(data))
    if not pa.types.is_string_view(data.type):
        return pc.binary_length(data).fill_null(0)
    # A string view has 16 bytes, the first four of which are its length. Arrow has no function for it.
    views = memoryview(data.buffers()[1]).cast("i")[::4][data.offset : data.offset + len(data)]
    return pc.if_else(data.is_valid(), pa.array(views.tolist(), pa.int64()), 0)


def reading(step: Callable[[], T], row: int) -> T:
    """Return the result of `step`. Raises InvalidFormat for this row if Arrow cannot read the data."""
    try:
        return step()
    except MemoryError:
        raise  # Arrow's out-of-memory error is also an ArrowException
    except (
        pa.ArrowException,
        UnicodeDecodeError,
        OverflowError,
        OSError,
    ) as error:  # column names may be invalid UTF-8
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise  # an error of the source or the disk, not Arrow's OSError for a truncated file
        raise invalid_format(str(error).partition("\n")[0], row) from None
