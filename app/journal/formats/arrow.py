"""Statements as columns: Parquet files and Arrow streams."""

import tempfile
from collections.abc import Iterator
from itertools import islice
from typing import IO

import pyarrow as pa
import pyarrow.parquet as parquet

from app.journal.formats.batch import ROWS, check_schema, is_text, longest_row, reading, statement_rows
from app.journal.formats.record import BLOCK, BadRecord, Row, Source, broken

LARGEST_BATCH = 64 << 20
"""Bytes read at once. A message of an Arrow stream is read whole, so its sender must cut a table into batches."""


def from_parquet(source: Source, longest: int) -> Iterator[Row | BadRecord]:
    """A statement a row. The body is kept on disk while it is read, for its index is at its end.

    Raises InvalidFormat for what is not Parquet, for columns that are not a statement's, and for damaged data.
    """
    with tempfile.TemporaryFile() as file:
        while block := source.read(BLOCK):
            file.write(block)
        if not file.tell():
            return
        schema = reading(lambda: parquet.read_schema(file), 1)
        reading(lambda: check_schema(schema), 1)
        yield from statement_rows(_batches(file, schema), longest)


def _batches(file: IO[bytes], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The file in batches that stay small even where every row has the longest value of its dictionary.

    A dictionary holds a value once for all the rows that have it, so that a small file may be gigabytes of text. To see
    it before it is multiplied, the first row of a group is read with its dictionary; reading all rows that way would
    gather every value of the group in memory.
    """
    options = {"pre_buffer": False, "buffer_size": BLOCK}
    opened = parquet.ParquetFile(file, **options)
    text = [field.name for field in schema if is_text(field.type)]
    peeked = parquet.ParquetFile(file, metadata=opened.metadata, read_dictionary=text, **options)
    for group in range(opened.num_row_groups):
        largest = sum(longest_row(batch) for batch in islice(peeked.iter_batches(1, [group], use_threads=False), 1))
        rows = min(ROWS, max(1, LARGEST_BATCH // (largest + 1)))
        yield from opened.iter_batches(rows, [group], use_threads=False)


def from_arrow(source: Source, longest: int) -> Iterator[Row | BadRecord]:
    """A statement a row, batch after batch as they arrive.

    Raises InvalidFormat for what is not an Arrow stream or lacks its end, for columns that are not a statement's,
    for damaged data, and for a batch of more than 64 MiB.
    """
    messages = _Messages(source, max(longest, LARGEST_BATCH))
    if messages.empty():
        return
    stream = reading(lambda: pa.ipc.open_stream(pa.PythonFile(messages, mode="r")), 1)
    reading(lambda: check_schema(stream.schema), 1)
    yield from statement_rows(iter(stream), longest)
    if messages.ended:
        raise broken("the stream is cut off before its end marker")
    if messages.read(1):
        raise broken("expected nothing after the end of the stream")


class _Messages:
    """The source as Arrow reads it: as many bytes as it asks for, or the stream is at its end."""

    closed = False

    def __init__(self, source: Source, largest: int) -> None:
        self.ended = False
        self._source = source
        self._largest = largest
        self._ahead = b""

    def empty(self) -> bool:
        self._ahead = self._source.read(1)
        return not self._ahead

    def read(self, size: int) -> bytes:
        if size > self._largest:
            raise broken(f"a message of {size} bytes; at most {self._largest} are read at once")
        data = bytearray(self._ahead[:size])
        self._ahead = self._ahead[size:]
        while len(data) < size and (block := self._source.read(size - len(data))):
            data += block
        self.ended = len(data) < size
        return bytes(data)
