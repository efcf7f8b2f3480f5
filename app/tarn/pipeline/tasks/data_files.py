"""Data files: sorted rows into Parquet, with statistics as the writer saw them."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from threading import BoundedSemaphore
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tarn.model.datasets.snapshot import Column, File
from tarn.model.ids import new_id
from tarn.storage.layout import data_file
from tarn.storage.store import Store

ROW_GROUP = 16_384
"""Rows of a row group: about what is read for one entity."""

LARGEST_GROUP = 16 << 20
"""Approximate bytes of a row group at most: with long values, row groups have fewer rows."""

LONGEST_BOUND = 64
"""Characters of a bound that are stored."""

PUT_BYTES = 8 << 20

CONCURRENT_PUTS = 4

LARGEST_PENDING = 16 << 20
"""Bytes of a file up to which the next one is written while it is put."""


class FilePuts:
    """Puts files in a thread pool. `begin` blocks while too many are waiting."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(CONCURRENT_PUTS)
        self._slots = BoundedSemaphore(2 * CONCURRENT_PUTS)

    def __enter__(self) -> "FilePuts":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def begin(self, put_file: Callable[[], File]) -> Future[File]:
        self._slots.acquire()
        future = self._pool.submit(put_file)
        future.add_done_callback(lambda _: self._slots.release())
        return future


class DataFileWriter:
    """Writes the rows of one table of one task. The rows are sorted, and passed one partition after the other."""

    def __init__(
        self,
        store: Store,
        folder: str,
        schema: pa.Schema,
        partition: str,
        pruning: tuple[str, ...],
        target: int,
        checksum: bool,
        puts: FilePuts,
    ) -> None:
        self._store = store
        self._folder = folder
        self._partition = partition
        self._schema = pa.schema([field for field in schema if field.name != partition])
        self._pruning = tuple(name for name in pruning if name in self._schema.names)
        self._target = target
        self._checksum = checksum
        self._puts = puts
        self._pending: list[Future[File]] = []

    def files(self) -> list[File]:
        """Wait until all files are durable, and return them in order."""
        return [pending.result() for pending in self._pending]

    def write(self, value: str, rows: Iterable[pa.RecordBatch]) -> None:
        """Write the rows of one partition, into as many files as they need."""
        partition = self.begin(value)
        for batch in rows:
            partition.add(batch)
        partition.end()

    def begin(self, value: str) -> "PartitionWriter":
        return PartitionWriter(
            lambda: _OpenFile(self._schema, self._pruning), self._target, lambda file: self._put(value, file)
        )

    def _put(self, value: str, file: "_OpenFile") -> None:
        """Put a file under a new name, concurrently with the next one unless it is large."""
        data, rows, columns = file.close()
        future = self._puts.begin(lambda: self._store_file(value, data, rows, columns))
        self._pending.append(future)
        if len(data) > LARGEST_PENDING:
            wait([future])

    def _store_file(self, value: str, data: pa.Buffer, rows: int, columns: dict[str, Column]) -> File:
        path = data_file(self._partition, value, new_id())
        digest = hashlib.sha256() if self._checksum else None

        def chunks() -> Iterator[bytes]:
            for start in range(0, len(data), PUT_BYTES):
                chunk = data.slice(start, min(PUT_BYTES, len(data) - start)).to_pybytes()
                if digest is not None:
                    digest.update(chunk)
                yield chunk

        destination = f"{self._folder}/{path}"
        if len(data) <= PUT_BYTES:
            self._store.put_new(destination, b"".join(chunks()))
        else:
            self._store.put_stream(destination, chunks())
        return File(
            path=path,
            size=len(data),
            partition={self._partition: value},
            rows=rows,
            columns=columns,
            checksum=None if digest is None else digest.hexdigest(),
        )


class PartitionWriter:
    """Writes one partition, one file after the other."""

    def __init__(self, make: "Callable[[], _OpenFile]", target: int, put_file: "Callable[[_OpenFile], None]") -> None:
        self._make = make
        self._target = target
        self._put = put_file
        self._file: _OpenFile | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        parts = -(-batch.nbytes // LARGEST_GROUP)
        rows = -(-batch.num_rows // max(1, parts))
        for start in range(0, batch.num_rows, max(1, rows)):
            if self._file is None:
                self._file = self._make()
            self._file.add(batch.slice(start, rows))
            if self._file.size >= self._target:
                self.end()

    def end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._put(file)


class _OpenFile:
    """A file that is being written, in memory. It is at most as large as the target and one row group."""

    def __init__(self, schema: pa.Schema, pruning: tuple[str, ...]) -> None:
        self._schema = schema
        self._pruning = pruning
        self._sink = pa.BufferOutputStream()
        strings = [field.name for field in schema if field.type == pa.string() and field.name != "value"]
        self._collected: list[pq.FileMetaData] = []
        self._writer = pq.ParquetWriter(
            self._sink,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=strings,
            write_statistics=[name for name in (*pruning, "id", "prop", "schema") if name in schema.names],
            metadata_collector=self._collected,
        )
        self._rows = 0

    @property
    def size(self) -> int:
        return int(self._sink.tell())

    def add(self, batch: pa.RecordBatch) -> None:
        """Write one row group. It is in the sink when this returns, so that `size` includes it."""
        self._writer.write_batch(_convert(batch, self._schema), row_group_size=ROW_GROUP)
        self._rows += batch.num_rows

    def close(self) -> tuple[pa.Buffer, int, dict[str, Column]]:
        self._writer.close()
        (metadata,) = self._collected
        return self._sink.getvalue(), self._rows, dict(_column_statistics(metadata, self._schema, self._pruning))


def _convert(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert columns to the file's types; timestamps are passed as microseconds."""
    columns = []
    for field in schema:
        column = batch.column(field.name)
        if pa.types.is_timestamp(field.type) and pa.types.is_int64(column.type):
            column = column.view(field.type)
        columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column_statistics(
    metadata: pq.FileMetaData, schema: pa.Schema, pruning: tuple[str, ...]
) -> Iterator[tuple[str, Column]]:
    """Yield bounds and null counts of the pruning columns over all row groups, where Parquet's writer has them."""
    for name in pruning:
        index = schema.get_field_index(name)
        parts = [metadata.row_group(group).column(index).statistics for group in range(metadata.num_row_groups)]
        if any(part is None for part in parts):
            continue
        bounded = [part for part in parts if part.has_min_max]
        nulls = sum(part.null_count for part in parts) if all(part.has_null_count for part in parts) else None
        known = {} if nulls is None else {"nulls": nulls}
        # A row group without bounds has no values, or values too long to be stored: then no bound is known.
        if bounded and all(part.has_min_max or not part.num_values for part in parts):
            known |= _bounds(min(part.min for part in bounded), max(part.max for part in bounded))
        yield name, Column.model_validate(known)


def _bounds(low: Any, high: Any) -> dict[str, Any]:
    if isinstance(low, datetime):
        return {"min": _iso(low), "max": _iso(high)}
    if not isinstance(low, str) or len(high) <= LONGEST_BOUND >= len(low):
        return {"min": low, "max": high}
    # The value may itself have the greatest character at the position where it is cut off.
    above = high if len(high) <= LONGEST_BOUND else max(high, high[:LONGEST_BOUND] + "\U0010ffff")
    return {"min": low[:LONGEST_BOUND], "max": above, "truncated": True}


def _iso(moment: datetime) -> str:
    utc = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    # strftime would write years before 1000 with fewer than four digits.
    return utc.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
