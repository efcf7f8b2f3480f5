"""Statements on their way: parts of a stage that are sent until the server has them, and one commit."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tarn.cli.commands.datasets.datasets import BASE
from tarn.cli.failures import Failure, ProblemAnswered, Unreachable
from tarn.cli.paths import at

if TYPE_CHECKING:
    import pyarrow as pa

    from tarn.cli.connection import Client

PAUSES = (1, 2, 4, 8, 15, 30, 60, 60, 60)
"""Seconds between attempts, if the server does not say itself when to come again."""

PART_ROWS, PART_BYTES = 100_000, 16 << 20
ARROW = "application/vnd.apache.arrow.stream"

T = TypeVar("T")


class StagePart(NamedTuple):
    """A body of one request."""

    body: bytes
    rows: int
    kind: str
    encoding: str | None = None


class StageExpired(Exception):
    """The stage was left alone for too long, and is gone with everything that was sent to it."""


class Stage:
    """A stage of a dataset. What is sent to it is seen when it is committed, and not at all if it never is."""

    def __init__(self, client: "Client", dataset: str, origin: str | None, source: str, on_error: str) -> None:
        """Opens it. Raises ProblemAnswered, Unreachable."""
        self._client = client
        self._stages = at(BASE, dataset, "stages")
        self._on_error = on_error
        self._parts = 0
        self.rejected = 0
        self.faults: list[dict[str, Any]] = []
        self.ignored: dict[str, int] = {}
        about = {"origin": origin, "message": f"import of {source}"}
        opened = patiently(lambda: client.document("POST", self._stages, about))
        self.id: str = opened["id"]

    def send(self, part: StagePart) -> None:
        """Send a part, more than once if need be: its key makes sure that it is taken once. Raises ProblemAnswered."""
        self._parts += 1
        headers = {"Content-Type": part.kind, "Idempotency-Key": f"import-{self.id}-{self._parts}"}
        headers |= {} if part.encoding is None else {"Content-Encoding": part.encoding}
        path, params = f"{self._stages}/{self.id}/statements", {"on_error": self._on_error}
        written = patiently(lambda: self._client.upload(path, [part.body], headers, params)).json()
        self.rejected += written["rejected"]
        self.faults += written["errors"]
        for name, count in written["ignored"].items():
            self.ignored[name] = self.ignored.get(name, 0) + count

    def commit(self) -> dict[str, Any]:
        """Make it visible; what it holds then. Raises Expired, ProblemAnswered."""

        def committed() -> dict[str, Any]:
            try:
                return self._client.document("POST", f"{self._stages}/{self.id}/commit")
            except ProblemAnswered as problem:
                if problem.slug not in ("stage-closed", "stage-not-found"):
                    raise
            # The answer to a commit before this one may have been lost.
            return self._as_committed()

        return patiently(committed)

    def abort(self) -> None:
        """Give it up, if the server can be reached; otherwise it goes by itself."""
        with suppress(Failure):
            self._client.request("DELETE", f"{self._stages}/{self.id}")

    def _as_committed(self) -> dict[str, Any]:
        try:
            stage = self._client.document("GET", f"{self._stages}/{self.id}")
        except ProblemAnswered as problem:
            if problem.slug != "stage-not-found":
                raise
            raise StageExpired from None
        if stage["state"] != "committed":
            raise StageExpired
        return stage


def patiently(attempt: Callable[[], T]) -> T:
    """What the attempt gives, made again while the server is away or busy. Raises what the last one does."""
    for pause in PAUSES:
        try:
            return attempt()
        except Unreachable:
            time.sleep(pause)
        except ProblemAnswered as problem:
            if not problem.problem.get("retryable") or problem.slug == "quota-exceeded":
                raise
            time.sleep(pause if problem.after is None else problem.after)
    return attempt()


def arrow_parts(batches: Iterator["pa.RecordBatch"]) -> Iterator[StagePart]:
    """Batches of statements gathered into bodies of bounded size."""
    gathered: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in _split(batches):
        if gathered and (rows + batch.num_rows > PART_ROWS or size + batch.nbytes > PART_BYTES):
            yield _part(gathered)
            gathered, rows, size = [], 0, 0
        gathered.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
    if gathered:
        yield _part(gathered)


def _split(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
    """The same rows in batches that fit a part, unless a single row does not."""
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
