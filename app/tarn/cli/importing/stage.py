"""Upload of statements to a stage of the server, in parts that are retried, and its commit."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tarn_client.errors import Problem
from tarn_client.paths import path_of
from tarn_client.stage import Stage

from tarn.cli.connection import DATASETS, LONG_TIMEOUT

if TYPE_CHECKING:
    import pyarrow as pa
    from tarn_client.connection import Connection

RETRY_TIMEOUT = 300.0
"""Seconds for which a request of an import is retried while the server is unreachable or busy."""

PART_ROWS, PART_BYTES = 100_000, 16 << 20
ARROW = "application/vnd.apache.arrow.stream"


class StagePart(NamedTuple):
    """The body of one request."""

    body: bytes
    rows: int
    media_type: str
    encoding: str | None = None


class StageExpired(Exception):
    """The stage expired, and everything that was sent to it is lost."""


class ImportStage:
    """An open stage that collects the statements of an import until all of them become visible at once."""

    def __init__(self, connection: "Connection", dataset: str, origin: str | None, source: str, on_error: str) -> None:
        """Open the stage. Raises LakeError."""
        retrying = connection.with_retries(RETRY_TIMEOUT)
        self._stage = Stage(retrying, path_of(DATASETS, dataset), origin, f"import of {source}")
        self._on_error = on_error
        self.rejected = 0
        self.invalid: list[dict[str, Any]] = []
        self.ignored: dict[str, int] = {}

    def send(self, part: StagePart) -> None:
        """Send a part. Raises LakeError."""
        headers = {"Content-Type": part.media_type}
        headers |= {} if part.encoding is None else {"Content-Encoding": part.encoding}
        written = self._stage.send("statements", part.body, headers, {"on_error": self._on_error}, timeout=LONG_TIMEOUT)
        self.rejected += written["rejected"]
        self.invalid += written["errors"]
        for name, count in written["ignored"].items():
            self.ignored[name] = self.ignored.get(name, 0) + count

    def commit(self) -> dict[str, Any]:
        """Make the statements visible and return the committed stage. Raises StageExpired, LakeError."""
        try:
            return self._stage.commit()
        except Problem as problem:
            if problem.slug in ("stage-closed", "stage-not-found"):
                raise StageExpired from None
            raise

    def abort(self) -> None:
        """Abort the stage if the server can be reached; otherwise it expires."""
        self._stage.abort()


def arrow_parts(batches: Iterator["pa.RecordBatch"]) -> Iterator[StagePart]:
    """Yield batches of statements collected into bodies of bounded size."""
    pending: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in _split(batches):
        if pending and (rows + batch.num_rows > PART_ROWS or size + batch.nbytes > PART_BYTES):
            yield _part(pending)
            pending, rows, size = [], 0, 0
        pending.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
    if pending:
        yield _part(pending)


def _split(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
    """Yield the same rows in batches that fit into a part, unless a single row does not."""
    for batch in batches:
        if batch.nbytes > PART_BYTES and batch.num_rows > 1:
            half = batch.num_rows // 2
            yield from _split(iter((batch.slice(0, half), batch.slice(half))))
        elif batch.num_rows:
            yield batch


def _part(batches: list["pa.RecordBatch"]) -> StagePart:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out, pa.ipc.new_stream(out, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return StagePart(sink.getvalue().to_pybytes(), sum(batch.num_rows for batch in batches), ARROW, "zstd")
