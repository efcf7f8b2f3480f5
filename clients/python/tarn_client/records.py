"""What is read: records one by one, or all of them as a table of one's favourite library, imported when it is used."""

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import httpx

from tarn_client.connection import Connection
from tarn_client.errors import BrokenOff, InvalidEntitiesWarning, Problem
from tarn_client.pages import pages

if TYPE_CHECKING:
    import duckdb
    import pandas
    import polars
    import pyarrow

NDJSON = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"


MOST_INVALID = 1000
"""Invalid entities that are kept of a read; all of them are counted."""


class Records(ABC):
    """Records that match what was asked for. Each use reads them anew."""

    @abstractmethod
    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The records, as they arrive. Raises BrokenOff if they do not come to their end."""

    @abstractmethod
    def schema(self) -> "pyarrow.Schema":
        """The columns of the table."""

    @abstractmethod
    def batches(self) -> Iterator["pyarrow.RecordBatch"]:
        """The same as Arrow, a batch at a time, so that memory is bounded."""

    def arrow(self) -> "pyarrow.Table":
        import pyarrow

        return pyarrow.Table.from_batches(self.batches(), self.schema())

    def pandas(self) -> "pandas.DataFrame":
        return self.arrow().to_pandas()

    def polars(self) -> "polars.DataFrame":
        import polars

        frame = polars.from_arrow(self.arrow())
        assert isinstance(frame, polars.DataFrame)  # what a table becomes
        return frame

    def duckdb(self, connection: "duckdb.DuckDBPyConnection | None" = None) -> "duckdb.DuckDBPyRelation":
        """A relation of this connection, or of DuckDB's default one."""
        import duckdb

        return duckdb.from_arrow(self.arrow(), connection=connection or duckdb.default_connection())


class Statements(Records):
    """Statements of one state."""

    def __init__(self, connection: Connection, path: str, params: Mapping[str, Any]) -> None:
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
            pyarrow.ipc.open_stream(Body(response)) as reader,
        ):
            yield from (batch.select(self.schema().names) for batch in reader)


class Entities(Records):
    """Entities. Those whose statements do not assemble are left out, with an InvalidEntitiesWarning at the end.

    After a read, `invalid_count` is how many they were, and `invalid` has the first thousand: id, reason, schemata.
    """

    def __init__(
        self,
        connection: Connection,
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
        """The entities, and a warning at their end, or where their reader has enough of them."""
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
        given = [*parts, *([] if self._where is None else [self._where])]
        query = {"where": {"and": given} if given else None, "sort": self._sort}
        for page in pages(self._connection, f"{self._path}/query", self._state, query, self._limit):
            for report in page["invalid"]:
                self._leave_out(report)
            yield from page["results"]


def lines(
    connection: Connection,
    path: str,
    params: Mapping[str, Any],
    leave_out: Callable[[dict[str, Any]], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """The records of a stream of NDJSON. Raises BrokenOff, or the Problem that it ended with.

    `leave_out` is told of each entity whose statements do not assemble: its id, the reason, and its schemata.
    """
    with connection.stream(path, NDJSON, {**params, "end": True}) as response:
        for line in response.iter_lines():
            record = json.loads(line)
            # A record has no such members: these lines are about the stream.
            if "$end" in record:
                return
            if "$error" in record:
                raise Problem(record["$error"])
            if "$invalid" in record:
                leave_out(record["$invalid"])
            else:
                yield record
    raise BrokenOff("the stream ended without its last line: what came of it is not the whole")


class Body:
    """The body of an answer as a file, for who can only read files."""

    closed = False

    def __init__(self, response: httpx.Response) -> None:
        self._pieces = response.iter_bytes()
        self._rest = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        held = [self._rest]
        length = len(self._rest)
        while size < 0 or length < size:
            piece = next(self._pieces, b"")
            if not piece:
                break
            held.append(piece)
            length += len(piece)
        whole = b"".join(held)
        cut = len(whole) if size < 0 else size
        self._rest = whole[cut:]
        return whole[:cut]
