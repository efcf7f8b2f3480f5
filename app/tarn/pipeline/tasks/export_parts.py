"""What one Spark task does for exports: a range of keys, as a part of each file; or a look at what changed.

Ranges follow on each other, and no entity is in two of them; so parts in their order are the file. Each is compressed
by itself, as gzip and zstd allow. What is made by one pass goes to the store as it comes; files that share a pass grow
on the executor's disk. Nothing is held in memory.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import duckdb
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from tarn.datasets.registry import Dataset
from tarn.lake import snapshots
from tarn.model.export import Kind, OmittedEdges
from tarn.model.ids import new_id
from tarn.pipeline.tasks.export_tasks import ExportedRange, ExportRange, Recount
from tarn.query import documents, graph, live
from tarn.query import statement_formats as forms
from tarn.query.assembly import entity_lines, invalid_count, ndjson
from tarn.query.diff import Between, differences
from tarn.query.incremental_statistics import count_changed
from tarn.query.statements import sorted_rows
from tarn.query.statistics import count_entities
from tarn.query.views import View
from tarn.storage.store import CHUNK, Store

HEADERS = {Kind.STATEMENTS: forms.CSV_HEADER, Kind.DOCUMENTS: documents.HEADER, Kind.GRAPH: graph.HEADER}

INVALID = b'{"$invalid"'


def exported(task: ExportRange | Recount, store: Store, duck: duckdb.DuckDBPyConnection, scratch: str) -> ExportedRange:
    """Do a task."""
    if isinstance(task, Recount):
        states = Between(_view(task, store, task.former), _view(task, store, task.seq))
        return ExportedRange({}, exchanged=count_changed(duck, store, states))
    return _RangeExport(task, store, duck, Path(scratch)).made()


class _RangeExport:
    """A range on its way into files."""

    def __init__(self, task: ExportRange, store: Store, duck: duckdb.DuckDBPyConnection, scratch: Path) -> None:
        self._task = task
        self._store = store
        self._duck = duck
        self._scratch = scratch
        self._invalid: Counter[Kind] = Counter()
        """Entities that each file leaves out because their statements do not assemble."""
        self._omitted_edges = OmittedEdges()

    def made(self) -> ExportedRange:
        task = self._task
        live.make_within(self._duck, self._store, _view(task, self._store, task.seq), "live", task.within)
        parts = {kind: self._put(kind, self._packed(kind, make())) for kind, make in self._passes().items()}
        parts |= self._shared()
        statistics = count_entities(self._duck) if Kind.STATISTICS in task.kinds else None
        return ExportedRange(parts, statistics, invalid=dict(self._invalid), omitted_edges=self._omitted_edges)

    def _passes(self) -> dict[Kind, Callable[[], Iterable[bytes]]]:
        """What takes a pass of its own."""
        duck = self._duck
        makers: dict[Kind, Callable[[], Iterable[bytes]]] = {
            Kind.STATEMENTS: lambda: forms.csv_rows(sorted_rows(duck, "SELECT * FROM live", [])),
            Kind.DOCUMENTS: lambda: documents.rows(self._documents()),
        }
        if (base := self._task.base) is not None:
            makers[Kind.DELTA] = lambda: self._changes(base)
        return {kind: make for kind, make in makers.items() if kind in self._task.kinds}

    def _documents(self) -> Iterator[pa.RecordBatch]:
        for batch in entity_lines(self._duck, documents.documents()):
            self._invalid[Kind.DOCUMENTS] += invalid_count(batch)
            yield batch

    def _shared(self) -> dict[Kind, str]:
        """What is made by one pass over the entities."""
        makers: dict[Kind, Callable[[pa.RecordBatch], Iterable[bytes | pa.Buffer]]] = {
            Kind.ENTITIES: lambda batch: [ndjson(batch)],
            Kind.GRAPH: lambda batch: graph.statements([batch], self._omitted_edges),
        }
        if self._task.base is None:
            makers[Kind.DELTA] = _all_new
        wanted = {kind: make for kind, make in makers.items() if kind in self._task.kinds}
        with ExitStack() as opened:
            files = {kind: opened.enter_context(_SpillFile(self._scratch / new_id())) for kind in wanted}
            for batch in entity_lines(self._duck) if wanted else ():
                # An entity whose schemata do not fit is nothing that others could load; statistics count it.
                valid = batch.filter(pc.invert(batch.column("invalid")))
                left_out = batch.num_rows - valid.num_rows
                for kind, make in wanted.items():
                    self._invalid[kind] += left_out
                    files[kind].write(make(valid))
            return {kind: self._put(kind, self._packed(kind, file.read())) for kind, file in files.items()}

    def _changes(self, base: int) -> Iterator[bytes]:
        """Since another snapshot; what cannot be loaded counts as not there."""
        task = self._task
        states = Between(_view(task, self._store, base), _view(task, self._store, task.seq))
        for some in differences(self._duck, self._store, states, within=task.within):
            for op, name, line in some:
                is_invalid = line.startswith(INVALID)
                self._invalid[Kind.DELTA] += is_invalid and op != "DEL"
                if op == "DEL" or (op == "MOD" and is_invalid):
                    yield _change("DEL", orjson.dumps({"id": name}))
                elif not is_invalid:
                    yield _change(op, line)

    def _packed(self, kind: Kind, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """A part as the file has it: with what stands above the first one, and compressed."""
        header = [HEADERS[kind]] if self._task.number == 0 and kind in HEADERS else []
        whole = chain(header, pieces)
        return iter(whole) if self._task.compression is None else _compressed(whole, self._task.compression)

    def _put(self, kind: Kind, pieces: Iterable[bytes]) -> str:
        path = f"{self._task.folder}/{kind}-{self._task.number:06d}-{new_id()}"
        self._store.put_stream(path, pieces, durable=False)
        return path


class _SpillFile:
    """A file on the executor's disk that is written, and then read once."""

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
    sink = forms.MemorySink()
    with pa.CompressedOutputStream(pa.PythonFile(sink, "w"), compression) as packing:
        for piece in pieces:
            packing.write(piece)
            yield from sink.taken()
    yield from sink.taken()


def _view(task: ExportRange | Recount, store: Store, seq: int | None) -> View:
    dataset = Dataset(task.dataset_id, task.dataset)
    return View(dataset, None if seq is None else snapshots.read(store, dataset, seq))


def _all_new(batch: pa.RecordBatch) -> Iterator[bytes]:
    for line in batch.column("line").to_pylist():
        yield _change("ADD", line.encode())


def _change(op: str, line: bytes) -> bytes:
    return b'{"op":"' + op.encode() + b'","entity":' + line.rstrip(b"\n") + b"}\n"
