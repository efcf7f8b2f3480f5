"""What one Spark task does for a mapping: some rows of a file into a part of a stage.

Nothing of it is seen before the stage commits. A task that dies leaves a part that is never closed; one that is tried
again writes a part of its own.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from tarn.errors import Fault
from tarn.journal.event_chunks import CHUNK_BYTES, CHUNK_ROWS, MOST_FAULTS
from tarn.journal.stage_parts import StagePartWriter
from tarn.model.mapping import MappingDocument
from tarn.model.names import DatasetName
from tarn.model.omissions import Omissions
from tarn.pipeline.tasks.delimited import Dialect
from tarn.pipeline.tasks.mapper import BLOCK_ROWS, Mapper
from tarn.pipeline.tasks.mapping_tasks import MappedRows, MapRows
from tarn.storage.store import Store


@lru_cache(1)
def mapper_of(mapping: bytes, header: tuple[str, ...], dataset: DatasetName, origin: str, moment: int) -> Mapper:
    """The mapper of a run: one for all tasks of a process, as it remembers what it has cleaned."""
    return Mapper(MappingDocument.from_yaml(mapping), header, dataset, origin, moment)


def map_rows(task: MapRows, store: Store, parts: StagePartWriter) -> MappedRows:
    """Do a task. Raises Unavailable if the stage was given up meanwhile."""
    mapper = mapper_of(task.mapping, task.header, task.dataset, task.origin, task.moment)
    form = Dialect(task.encoding, task.delimiter)
    text, is_sound = form.decoded(store.get_range(task.path, task.start, task.end))
    lines = form.rows(text)
    records = rows = entities = bad = 0
    faults: list[Fault] = []
    omitted = Omissions()
    with ThreadPoolExecutor(1, thread_name_prefix="chunk") as behind:
        part = _PartWriter(parts, task, behind)
        while block := list(islice(lines, BLOCK_ROWS)):
            # FtM reads over blank lines, and people count them.
            numbers = [number for number, row in enumerate(block, records + 1) if row]
            for found in mapper.map([row for row in block if row], is_doubtful=not is_sound):
                part.add(found.events)
                entities += found.entities
                bad += len(found.bad)
                faults += [one.fault.model_copy(update={"line": numbers[one.place]}) for one in found.bad]
                del faults[MOST_FAULTS:]
                for value in found.omitted:
                    omitted.add(value.schema, value.prop, value.value, value.reason, numbers[value.place])
            records += len(block)
            rows += len(numbers)
        part.close(entities)
    return MappedRows(part.id, records, rows, entities, part.written, bad, faults, omitted)


class _PartWriter:
    """A part of the stage, written some ten thousand events at a time, and one chunk behind: who waits for the database
    maps the next rows meanwhile."""

    def __init__(self, parts: StagePartWriter, task: MapRows, behind: ThreadPoolExecutor) -> None:
        self.id = parts.open(task.stage, task.tenant)
        self.written = 0
        self._parts = parts
        self._expiry = task.expiry
        self._in_packs = task.in_packs
        self._behind = behind
        self._under_way: Future[None] | None = None
        self._held: list[pa.RecordBatch] = []
        self._rows = 0
        self._bytes = 0
        self._characters = 0

    def add(self, events: pa.RecordBatch) -> None:
        if not events.num_rows:
            return
        self._held.append(events)
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
        chunk = self.id, self.written, self._held, self._expiry, self._in_packs
        self._under_way = self._behind.submit(self._parts.write, *chunk)
        self.written += self._rows
        self._characters += sum(pc.sum(pc.utf8_length(some.column("value"))).as_py() for some in self._held)
        self._held, self._rows, self._bytes = [], 0, 0

    def _wait(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
