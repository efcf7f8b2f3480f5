"""Results of reads: iterate over records, or convert them to pandas, Polars, DuckDB or Arrow tables.

Table libraries are imported only when they are used.
"""

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tarn_client.errors import InvalidEntitiesWarning
from tarn_client.ndjson import NDJSON, record_blocks

if TYPE_CHECKING:
    import duckdb
    import httpx
    import pandas
    import polars
    import pyarrow

    from tarn_client.connection import Connection

ARROW = "application/vnd.apache.arrow.stream"

MOST_INVALID = 1000
"""How many invalid entities of a read are kept; all of them are counted."""


class Records(ABC):
    """Records that match a request. Each iteration sends a new request."""

    @abstractmethod
    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the records as they arrive. Raises IncompleteResponse if the response ends early."""

    @abstractmethod
    def schema(self) -> "pyarrow.Schema":
        """Return the Arrow schema of the table."""

    @abstractmethod
    def batches(self) -> Iterator["pyarrow.RecordBatch"]:
        """Yield the records as Arrow batches, so that memory is bounded."""

    def arrow(self) -> "pyarrow.Table":
        import pyarrow

        return pyarrow.Table.from_batches(self.batches(), self.schema())

    def pandas(self) -> "pandas.DataFrame":
        return self.arrow().to_pandas()

    def polars(self) -> "polars.DataFrame":
        import polars

        frame = polars.from_arrow(self.arrow())
        assert isinstance(frame, polars.DataFrame)  # a table becomes a frame, only a column a series
        return frame

    def duckdb(self, connection: "duckdb.DuckDBPyConnection | None" = None) -> "duckdb.DuckDBPyRelation":
        """Return a relation of this connection, or of DuckDB's default one."""
        import duckdb

        return duckdb.from_arrow(self.arrow(), connection=connection or duckdb.default_connection())


class Statements(Records):
    """Statements of one state of a dataset."""

    def __init__(self, connection: "Connection", path: str, params: Mapping[str, Any]) -> None:
        self._connection = connection
        self._path = path
        self._params = params

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return lines(self._connection, f"{self._path}/stream", self._params)

    def schema(self) -> "pyarrow.Schema":
        from tarn_client import tables

        return tables.STATEMENTS

    def batches(self) -> Iterator["pyarrow.RecordBatch"]:
        import pyarrow

        with (
            self._connection.stream(f"{self._path}/stream", ARROW, self._params) as response,
            pyarrow.ipc.open_stream(ResponseFile(response)) as reader,
        ):
            yield from (batch.select(self.schema().names) for batch in reader)


class Entities(Records):
    """Entities. Those whose statements do not assemble are left out, with an InvalidEntitiesWarning at the end.

    After a read, `invalid_count` is their number, and `invalid` has the first thousand: id, reason, schemata.
    """

    def __init__(
        self,
        connection: "Connection",
        path: str,
        filters: Mapping[str, list[str]],
        state: Mapping[str, Any],
        where: dict[str, Any] | None,
        sort: list[str],
        limit: int | None,
    ) -> None:
        self._connection = connection
        self._path = path
        self._filters = filters
        self._state = state
        self._where = where
        self._sort = sort
        self._limit = limit
        self.invalid: list[dict[str, Any]] = []
        self.invalid_count = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.invalid = []
        self.invalid_count = 0
        return self._read()

    def _read(self) -> Iterator[dict[str, Any]]:
        """Yield the entities; warn of invalid ones at the end, or when the caller stops iterating."""
        try:
            if self._where is None and not self._sort and self._limit is None:
                params = {**self._filters, **self._state}
                yield from lines(self._connection, f"{self._path}/stream", params, self._leave_out)
            else:
                yield from self._paged()
        except GeneratorExit:
            self._warn()
            raise
        self._warn()

    def _leave_out(self, report: dict[str, Any]) -> None:
        self.invalid_count += 1
        if len(self.invalid) < MOST_INVALID:
            self.invalid.append(report)

    def _warn(self) -> None:
        if self.invalid_count:
            first = self.invalid[0]
            warnings.warn(
                f"entities left out because their statements do not assemble: {self.invalid_count}, the first is "
                f"{first['id']!r} ({first['reason']})",
                InvalidEntitiesWarning,
                stacklevel=3,
            )

    def schema(self) -> "pyarrow.Schema":
        from tarn_client import tables

        return tables.ENTITIES

    def batches(self) -> Iterator["pyarrow.RecordBatch"]:
        from tarn_client import tables

        return tables.entity_batches(self)

    def _paged(self) -> Iterator[dict[str, Any]]:
        parts = [{"field": name, "op": "in", "value": values} for name, values in self._filters.items()]
        conditions = [*parts, *([] if self._where is None else [self._where])]
        query = {"where": {"and": conditions} if conditions else None, "sort": self._sort}
        for page in self._connection.pages(f"{self._path}/query", self._state, query, self._limit):
            for report in page["invalid"]:
                self._leave_out(report)
            yield from page["results"]


def lines(
    connection: "Connection",
    path: str,
    params: Mapping[str, Any],
    leave_out: Callable[[dict[str, Any]], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """Yield the records of an NDJSON stream. Raises IncompleteResponse, or the Problem that the stream ended with.

    `leave_out` is called for each entity whose statements do not assemble, with its id, reason and schemata.
    """
    with connection.stream(path, NDJSON, {**params, "end": True}) as response:
        for block in record_blocks(response.iter_bytes(), leave_out):
            for line in block.splitlines():
                yield json.loads(line)


class ResponseFile:
    """The body of a response as a readable file object, for libraries that need one."""

    closed = False

    def __init__(self, response: "httpx.Response") -> None:
        self._pieces = response.iter_bytes()
        self._rest = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        pieces = [self._rest]
        length = len(self._rest)
        while size < 0 or length < size:
            piece = next(self._pieces, b"")
            if not piece:
                break
            pieces.append(piece)
            length += len(piece)
        data = b"".join(pieces)
        end = len(data) if size < 0 else size
        self._rest = data[end:]
        return data[:end]
