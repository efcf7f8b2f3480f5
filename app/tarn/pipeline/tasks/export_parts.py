"""Write one key range as a part of each export file, or count the changes between two snapshots.

Ranges are consecutive, and no entity is in two of them; so the parts in their order are the file. Each part is
compressed separately, as gzip and zstd allow. The output of a separate pass is streamed to the store; files that share
a pass are spilled to the executor's disk. No file is held in memory.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from tarn.datasets.registry import Dataset
from tarn.lake import snapshots
from tarn.model.datasets.export import ExportKind, OmittedEdges
from tarn.model.ids import new_id
from tarn.pipeline.tasks.export_tasks import CountDifferences, ExportedRange, ExportRange
from tarn.pipeline.tasks.task import TaskContext
from tarn.query import live
from tarn.query.diff import SnapshotPair, differences
from tarn.query.incremental_statistics import ChangedStatistics, count_changed
from tarn.query.output import documents_csv, graph, statement_formats
from tarn.query.output.assembly import entity_lines, invalid_count, ndjson
from tarn.query.statements import sorted_rows
from tarn.query.statistics import count_entities
from tarn.query.views import View
from tarn.storage.store import CHUNK, Store

HEADERS = {
    ExportKind.STATEMENTS: statement_formats.CSV_HEADER,
    ExportKind.DOCUMENTS: documents_csv.HEADER,
    ExportKind.GRAPH: graph.HEADER,
}

INVALID = b'{"$invalid"'


def export_range(task: ExportRange, context: TaskContext) -> ExportedRange:
    """Write the range's parts of the export files."""
    return _RangeExport(task, context).run()


def count_differences(task: CountDifferences, context: TaskContext) -> ChangedStatistics | None:
    """Count the entities that differ between two snapshots, as they are in each."""
    store = context.store
    pair = SnapshotPair(_view(task, store, task.former), _view(task, store, task.seq))
    return count_changed(context.duckdb_connection, store, pair)


class _RangeExport:
    """An export of a range in progress."""

    def __init__(self, task: ExportRange, context: TaskContext) -> None:
        self._task = task
        self._store = context.store
        self._duck = context.duckdb_connection
        self._scratch = Path(context.scratch)
        self._invalid: Counter[ExportKind] = Counter()
        """Number of entities that each file leaves out because their statements do not assemble."""
        self._omitted_edges = OmittedEdges()

    def run(self) -> ExportedRange:
        task = self._task
        live.make_within(self._duck, self._store, _view(task, self._store, task.seq), "live", task.within)
        parts = {kind: self._put(kind, self._encode(kind, make())) for kind, make in self._passes().items()}
        parts |= self._shared()
        statistics = count_entities(self._duck) if ExportKind.STATISTICS in task.kinds else None
        return ExportedRange(parts, statistics, dict(self._invalid), self._omitted_edges)

    def _passes(self) -> dict[ExportKind, Callable[[], Iterable[bytes]]]:
        """Return generators of the files that take a pass of their own."""
        duck = self._duck
        makers: dict[ExportKind, Callable[[], Iterable[bytes]]] = {
            ExportKind.STATEMENTS: lambda: statement_formats.csv_rows(sorted_rows(duck, "SELECT * FROM live", [])),
            ExportKind.DOCUMENTS: lambda: documents_csv.rows(self._documents()),
        }
        if (base := self._task.base) is not None:
            makers[ExportKind.DELTA] = lambda: self._changes(base)
        return {kind: make for kind, make in makers.items() if kind in self._task.kinds}

    def _documents(self) -> Iterator[pa.RecordBatch]:
        for batch in entity_lines(self._duck, documents_csv.documents()):
            self._invalid[ExportKind.DOCUMENTS] += invalid_count(batch)
            yield batch

    def _shared(self) -> dict[ExportKind, str]:
        """Write the files that share one pass over the entities."""
        makers: dict[ExportKind, Callable[[pa.RecordBatch], Iterable[bytes | pa.Buffer]]] = {
            ExportKind.ENTITIES: lambda batch: [ndjson(batch)],
            ExportKind.GRAPH: lambda batch: graph.statements([batch], self._omitted_edges),
        }
        if self._task.base is None:
            makers[ExportKind.DELTA] = _all_new
        requested = {kind: make for kind, make in makers.items() if kind in self._task.kinds}
        with ExitStack() as opened:
            files = {kind: opened.enter_context(_SpillFile(self._scratch / new_id())) for kind in requested}
            for batch in entity_lines(self._duck) if requested else ():
                # No tool could load an entity whose schemata do not fit; statistics count it.
                valid = batch.filter(pc.invert(batch.column("invalid")))
                left_out = batch.num_rows - valid.num_rows
                for kind, make in requested.items():
                    self._invalid[kind] += left_out
                    files[kind].write(make(valid))
            return {kind: self._put(kind, self._encode(kind, file.read())) for kind, file in files.items()}

    def _changes(self, base: int) -> Iterator[bytes]:
        """Yield the changes since another snapshot. Entities that do not assemble count as absent."""
        task = self._task
        pair = SnapshotPair(_view(task, self._store, base), _view(task, self._store, task.seq))
        for changes in differences(self._duck, self._store, pair, within=task.within):
            for op, name, line in changes:
                is_invalid = line.startswith(INVALID)
                self._invalid[ExportKind.DELTA] += is_invalid and op != "DEL"
                if op == "DEL" or (op == "MOD" and is_invalid):
                    yield _change("DEL", orjson.dumps({"id": name}))
                elif not is_invalid:
                    yield _change(op, line)

    def _encode(self, kind: ExportKind, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Yield a part of a file: with the header if it is the first, and compressed."""
        header = [HEADERS[kind]] if self._task.number == 0 and kind in HEADERS else []
        part = chain(header, pieces)
        return iter(part) if self._task.compression is None else _compressed(part, self._task.compression)

    def _put(self, kind: ExportKind, pieces: Iterable[bytes]) -> str:
        path = f"{self._task.folder}/{kind}-{self._task.number:06d}-{new_id()}"
        self._store.put_stream(path, pieces, durable=False)
        return path


class _SpillFile:
    """A temporary file on the executor's disk that is written, and then read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sink = pa.output_stream(str(path))

    def write(self, pieces: Iterable[bytes | pa.Buffer]) -> None:
        for piece in pieces:
            self._sink.write(piece)

    def read(self) -> Iterator[bytes]:
        self._sink.close()
        with self._path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk

    def __enter__(self) -> "_SpillFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._sink.close()
        self._path.unlink(missing_ok=True)


def _compressed(pieces: Iterable[bytes], compression: str) -> Iterator[bytes]:
    sink = statement_formats.MemorySink()
    with pa.CompressedOutputStream(pa.PythonFile(sink, "w"), compression) as packing:
        for piece in pieces:
            packing.write(piece)
            yield from sink.taken()
    yield from sink.taken()


def _view(task: ExportRange | CountDifferences, store: Store, seq: int | None) -> View:
    dataset = Dataset(task.dataset_id, task.dataset)
    return View(dataset, None if seq is None else snapshots.read(store, dataset, seq))


def _all_new(batch: pa.RecordBatch) -> Iterator[bytes]:
    for line in batch.column("line").to_pylist():
        yield _change("ADD", line.encode())


def _change(op: str, line: bytes) -> bytes:
    return b'{"op":"' + op.encode() + b'","entity":' + line.rstrip(b"\n") + b"}\n"
