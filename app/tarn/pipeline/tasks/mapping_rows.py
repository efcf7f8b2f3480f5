"""Map some rows of a file into a part of a stage.

The part becomes visible when the stage commits. A task that dies leaves a part that is never closed; its retry writes
another part.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from tarn.errors import FieldError
from tarn.journal.parsing.event_chunks import CHUNK_BYTES, CHUNK_ROWS, MOST_FAULTS
from tarn.journal.stage_parts import StagePartWriter
from tarn.model.ftm.mapping import MappingDocument
from tarn.model.ftm.omissions import Omissions
from tarn.model.names import DatasetName
from tarn.pipeline.tasks.delimited import Dialect
from tarn.pipeline.tasks.mapper import BLOCK_ROWS, Mapper
from tarn.pipeline.tasks.mapping_tasks import MappedRows, MapRows
from tarn.storage.store import Store


@lru_cache(1)
def mapper_of(mapping: bytes, header: tuple[str, ...], dataset: DatasetName, origin: str, moment: int) -> Mapper:
    """Return the mapper of a run. All tasks of a process share it, as it caches cleaned values."""
    return Mapper(MappingDocument.from_yaml(mapping), header, dataset, origin, moment)


def map_rows(task: MapRows, store: Store, parts: StagePartWriter) -> MappedRows:
    """Map the rows into a new part of the stage. Raises Unavailable if the stage has expired."""
    mapper = mapper_of(task.mapping, task.header, task.dataset, task.origin, task.moment)
    dialect = Dialect(task.encoding, task.delimiter)
    text, is_valid = dialect.decoded(store.get_range(task.path, task.start, task.end))
    lines = dialect.rows(text)
    records = rows = entities = bad = 0
    faults: list[FieldError] = []
    omitted = Omissions()
    with ThreadPoolExecutor(1, thread_name_prefix="chunk") as pool:
        part = _PartWriter(parts, task, pool)
        while block := list(islice(lines, BLOCK_ROWS)):
            # FtM skips blank lines, but line numbers count them.
            numbers = [number for number, row in enumerate(block, records + 1) if row]
            for mapped in mapper.map([row for row in block if row], is_doubtful=not is_valid):
                part.add(mapped.events)
                entities += mapped.entities
                bad += len(mapped.bad)
                faults += [one.fault.model_copy(update={"line": numbers[one.row_index]}) for one in mapped.bad]
                del faults[MOST_FAULTS:]
                for value in mapped.omitted:
                    omitted.add(value.schema, value.prop, value.value, value.reason, numbers[value.row_index])
            records += len(block)
            rows += len(numbers)
        part.close(entities)
    return MappedRows(part.id, records, rows, entities, part.written, bad, faults, omitted)


class _PartWriter:
    """Writes a part of the stage in chunks of some ten thousand events. One chunk is written while the next rows are
    mapped."""

    def __init__(self, parts: StagePartWriter, task: MapRows, pool: ThreadPoolExecutor) -> None:
        self.id = parts.open(task.stage, task.tenant)
        self.written = 0
        self._parts = parts
        self._expiry = task.expiry
        self._in_packs = task.in_packs
        self._pool = pool
        self._pending: Future[None] | None = None
        self._batches: list[pa.RecordBatch] = []
        self._rows = 0
        self._bytes = 0
        self._characters = 0

    def add(self, events: pa.RecordBatch) -> None:
        if not events.num_rows:
            return
        self._batches.append(events)
        self._rows += events.num_rows
        self._bytes += events.nbytes
        if self._rows >= CHUNK_ROWS or self._bytes >= CHUNK_BYTES:
            self._write()

    def close(self, entities: int) -> None:
        if self._rows:
            self._write()
        self._wait()
        self._parts.close(self.id, entities, self.written, self._characters)

    def _write(self) -> None:
        self._wait()
        chunk = self.id, self.written, self._batches, self._expiry, self._in_packs
        self._pending = self._pool.submit(self._parts.write, *chunk)
        self.written += self._rows
        self._characters += sum(pc.sum(pc.utf8_length(batch.column("value"))).as_py() for batch in self._batches)
        self._batches, self._rows, self._bytes = [], 0, 0

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
