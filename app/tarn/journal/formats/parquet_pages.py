"""Reader of Parquet page headers, without decompressing pages.

The metadata at the end of a file has the sizes of its columns, but they may be false. A reader allocates what the
header of each page declares, so the sizes in the headers are counted. They are structs in Thrift's compact protocol,
which pyarrow does not expose.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import pyarrow.parquet as parquet

from tarn.journal.formats.record import invalid_format

DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = 0, 2, 3
BY_DICTIONARY = frozenset({2, 8})
"""Encodings of data pages that hold indexes into the column's dictionary."""
DELTA_BYTE_ARRAY = 7
"""Prefix encoding: a value can repeat the beginning of the previous one, so few bytes can be many long values."""

WINDOW, LARGEST_HEADER = 4 << 10, 16 << 20
"""Initial and maximum bytes read for a header. The maximum is pyarrow's own: statistics may have long values."""

DEEPEST = 16


@dataclass(frozen=True, slots=True)
class ParquetPage:
    """Sizes and encoding that a page header declares."""

    values: int
    size: int
    is_dictionary: bool
    encoding: int


def pages(file: IO[bytes], size: int, group: parquet.RowGroupMetaData, number: int) -> Iterator[ParquetPage]:
    """Yield the pages of one column of a row group, in file order.

    Raises InvalidFormat for headers that cannot be read, and if the number of values differs from the group's rows.
    """
    column = group.column(number)
    name, rows = column.path_in_schema, group.num_rows
    if column.num_values != rows:
        raise invalid_format(f"the column {name} has {column.num_values} values in a group of {rows} rows")
    at, end = _extent(column)
    if not 0 <= at <= end <= size:
        raise invalid_format(f"the column {name} lies outside the file")
    value_count = 0
    while value_count < rows:
        header, length = _header(file, at, end, name)
        kind, unpacked, packed = (_number(header, field, name) for field in (1, 2, 3))
        at += length + packed
        if at > end:
            raise invalid_format(f"a page of the column {name} lies outside its column")
        body = header.get({DATA_PAGE: 5, DICTIONARY_PAGE: 7, DATA_PAGE_V2: 8}.get(kind, 0), {})
        if kind in (DATA_PAGE, DATA_PAGE_V2):
            values = _number(body, 1, name)
            encoding = _number(body, 2 if kind == DATA_PAGE else 4, name)
            value_count += values
            yield ParquetPage(values, unpacked, is_dictionary=False, encoding=encoding)
        elif kind == DICTIONARY_PAGE:
            yield ParquetPage(0, unpacked, is_dictionary=True, encoding=_number(body, 2, name))
    if value_count != rows:
        raise invalid_format(f"the pages of the column {name} have {value_count} values in a group of {rows} rows")


def _extent(column: parquet.ColumnChunkMetaData) -> tuple[int, int]:
    """Return the offset at which pyarrow begins to read a column, and the maximum end offset."""
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    return start, start + column.total_compressed_size


def _header(file: IO[bytes], at: int, end: int, name: str) -> tuple[dict[int, Any], int]:
    """Read a page header; return its fields and its length in bytes."""
    window = WINDOW
    while True:
        file.seek(at)
        reader = _Compact(file.read(min(window, end - at)))
        try:
            return reader.struct(), reader.at
        except IndexError:
            if window >= min(LARGEST_HEADER, end - at):
                raise invalid_format(f"the header of a page of the column {name} is cut off or too long") from None
            window *= 8
        except ValueError as error:
            raise invalid_format(f"the header of a page of the column {name}: {error}") from None


def _number(fields: Any, field: int, name: str) -> int:
    value = fields.get(field) if isinstance(fields, dict) else None
    if type(value) is not int or value < 0:
        raise invalid_format(f"the header of a page of the column {name} has no valid field {field}")
    return value


class _Compact:
    """Decoder of one struct of Thrift's compact protocol. Raises IndexError past the end, and ValueError.

    Stricter than Thrift where two decoders could differ: repeated fields and numbers outside their type are errors.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        if depth > DEEPEST:
            raise ValueError("nests too deeply")
        fields: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            step, kind = head >> 4, head & 0x0F
            field = field + step if step else self._signed(16)
            if field in fields:
                raise ValueError(f"repeats field {field}")
            fields[field] = kind == 1 if kind in (1, 2) else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2, 3):
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed({4: 16, 5: 32, 6: 64}[kind])
        if kind == 7:
            return self._skip(8)
        if kind == 8:
            return self._skip(self._varint(32))
        if kind in (9, 10):
            return self._list(depth)
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError(f"has a field of type {kind}")

    def _list(self, depth: int) -> None:
        if depth > DEEPEST:
            raise ValueError("nests too deeply")
        head = self._byte()
        for _ in range(head >> 4 if head >> 4 < 15 else self._varint(32)):
            self._value(head & 0x0F, depth + 1)

    def _byte(self) -> int:
        byte = self._data[self.at]
        self.at += 1
        return byte

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self._data):
            raise IndexError

    def _signed(self, bits: int) -> int:
        value = self._varint(bits)
        return (value >> 1) ^ -(value & 1)

    def _varint(self, bits: int) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if value >> bits:
                raise ValueError(f"has a number of more than {bits} bits")
            if byte < 0x80:
                return value
            shift += 7
            if shift > bits:
                raise ValueError(f"has a number of more than {bits} bits")
