"""Parsers of columnar statements: Parquet files and Arrow streams."""

import tempfile
from collections.abc import Collection, Generator, Iterator
from itertools import accumulate, islice
from typing import IO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as parquet

from tarn.journal.formats.arrow_messages import Messages
from tarn.journal.formats.batch import ROWS, check_schema, is_text, longest_row, reading, statement_rows
from tarn.journal.formats.budget import Budget
from tarn.journal.formats.parquet_pages import BY_DICTIONARY, DELTA_BYTE_ARRAY, ParquetPage, pages
from tarn.journal.formats.record import BLOCK, BadRecord, ByteSource, IgnoredColumns, Row, invalid_format

LARGEST_BATCH = 64 << 20
"""Maximum bytes read at once. A message of an Arrow stream is read as a whole, so its sender must split tables."""

FEW_PREFIXED = 64
"""Rows read at once of prefix-encoded columns, where few bytes can be many long values."""


def from_parquet(source: ByteSource, longest: int) -> Generator[Row | BadRecord | IgnoredColumns, None, int]:
    """Yield one statement per row. Spools the body to disk, because Parquet has its index at the end.

    Returns the number of rows in its metadata. Raises InvalidFormat if the body is not Parquet, lacks columns of a
    statement, is damaged, or has more rows than its size allows; BodyTooLarge if it decompresses to too much.
    """
    with tempfile.TemporaryFile() as file:
        while block := source.read(BLOCK):
            file.write(block)
        size = file.tell()
        if not size:
            return 0
        schema = reading(lambda: parquet.read_schema(file), 1)
        ignored = reading(lambda: check_schema(schema), 1)
        names = [name for name in schema.names if name not in ignored]
        if ignored:
            yield IgnoredColumns(ignored)
        budget = Budget(size)
        opened = reading(lambda: parquet.ParquetFile(file, pre_buffer=False, buffer_size=BLOCK), 1)
        groups = reading(lambda: check_pages(file, opened.metadata, budget, names), 1)
        yield from statement_rows(_batches(file, opened, schema, names, groups), longest, budget, names)
        return budget.rows


class Group(NamedTuple):
    """Reading plan of a row group."""

    rows: int
    """Maximum rows per batch."""
    encoded: list[str]
    """Columns whose first data page is dictionary-encoded."""


def check_pages(file: IO[bytes], metadata: parquet.FileMetaData, budget: Budget, names: Collection[str]) -> list[Group]:
    """Return a reading plan for each row group, by the sizes in the page headers of these columns.

    Raises InvalidFormat for headers that contradict the metadata, and what the budget raises.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    for group in groups:
        budget.add_rows(group.num_rows)
    if metadata.num_rows != budget.rows:
        raise invalid_format(f"the file's metadata has {metadata.num_rows} rows, but its row groups have {budget.rows}")
    return [_check_group(file, group, budget, names) for group in groups]


def _check_group(file: IO[bytes], group: parquet.RowGroupMetaData, budget: Budget, names: Collection[str]) -> Group:
    columns: list[list[ParquetPage]] = []
    encoded: list[str] = []
    dictionaries = largest = longest = 0
    for number in range(group.num_columns):
        if group.column(number).path_in_schema not in names:
            continue
        column_pages = list(_counted(pages(file, budget.size, group, number), budget))
        data = [page for page in column_pages if not page.is_dictionary]
        dictionary = max((page.size for page in column_pages if page.is_dictionary), default=0)
        columns.append(data)
        dictionaries += dictionary
        largest += max((page.size for page in data), default=0)
        budget.require_at_once(dictionaries + largest, "a row group, of each column its dictionary and a page,")
        if data and data[0].encoding in BY_DICTIONARY:
            encoded.append(group.column(number).path_in_schema)
        elif any(page.encoding in BY_DICTIONARY for page in data):
            longest = max(longest, dictionary)
    rows = ROWS
    # A batch at a page boundary needs two pages of a column; fewer rows per batch cannot reduce that.
    while rows > 1 and _largest_batch(columns, rows) > max(LARGEST_BATCH, 2 * largest):
        rows //= 2
    prefixed = max((page.size for column in columns for page in column if page.encoding == DELTA_BYTE_ARRAY), default=0)
    rows = min(rows, max(FEW_PREFIXED, LARGEST_BATCH // (prefixed + 1)), max(1, LARGEST_BATCH // (longest + 1)))
    return Group(rows, encoded)


def _counted(parquet_pages: Iterator[ParquetPage], budget: Budget) -> Iterator[ParquetPage]:
    for page in parquet_pages:
        budget.add_unpacked(page.size)
        yield page


def _largest_batch(columns: list[list[ParquetPage]], rows: int) -> int:
    """Return the largest total size of the pages that one batch of this many rows spans."""
    changes: dict[int, int] = {}
    for column in columns:
        start = 0
        for page in column:
            first, last = start // rows, max(start, start + page.values - 1) // rows
            changes[first] = changes.get(first, 0) + page.size
            changes[last + 1] = changes.get(last + 1, 0) - page.size
            start += page.values
    return max(accumulate(changes[batch] for batch in sorted(changes)), default=0)


def _batches(
    file: IO[bytes], opened: parquet.ParquetFile, schema: pa.Schema, names: list[str], groups: list[Group]
) -> Iterator[pa.RecordBatch]:
    """Yield the file in batches that stay small even if every row has the longest value of its dictionary.

    A dictionary stores a value once for all rows that have it, so a small file can be gigabytes of text. To know the
    dictionary before it is expanded, the first row of a group is read dictionary-encoded; reading all rows that way
    would collect every value of the group in memory.
    """
    text = [name for name in names if is_text(schema.field(name).type)]
    peeked = parquet.ParquetFile(
        file, metadata=opened.metadata, read_dictionary=text, pre_buffer=False, buffer_size=BLOCK
    )
    for number, group in enumerate(groups):
        first = (
            peeked.iter_batches(1, [number], columns=group.encoded, use_threads=False) if group.encoded else iter(())
        )
        largest = sum(longest_row(batch) for batch in islice(first, 1))
        at_once = min(group.rows, max(1, LARGEST_BATCH // (largest + 1)))
        yield from opened.iter_batches(at_once, [number], names, use_threads=False)


def from_arrow(source: ByteSource, longest: int) -> Generator[Row | BadRecord | IgnoredColumns, None, int]:
    """Yield one statement per row, batch by batch as they arrive.

    Returns the number of rows in the headers of its batches. Raises InvalidFormat if the body is not an Arrow stream,
    is truncated, lacks columns of a statement, is damaged, has a batch of more than 64 MiB, or has more rows than its
    size allows; BodyTooLarge if it decompresses to too much.
    """
    budget = Budget()
    messages = Messages(source, max(longest, LARGEST_BATCH), budget)
    if messages.is_empty():
        return 0
    stream = reading(lambda: pa.ipc.open_stream(pa.PythonFile(messages, mode="r")), 1)
    if ignored := reading(lambda: check_schema(stream.schema), 1):
        yield IgnoredColumns(ignored)
    names = [name for name in stream.schema.names if name not in ignored]
    yield from statement_rows(iter(stream), longest, budget, names)
    if messages.is_cut_off:
        raise invalid_format("the stream is cut off before its end marker")
    if messages.rest():
        raise invalid_format("expected nothing after the end of the stream")
    return messages.rows
