"""Which tasks a round of flushing is made of, and which of them run together."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from tarn.datasets.registry import Dataset
from tarn.journal.segments import Segment
from tarn.model.dataset import DatasetConfig
from tarn.model.shards import ALL_SHARDS
from tarn.model.snapshot import Head
from tarn.pipeline.tasks.kernel import AnyTask, Task

TASK_ROWS = 500_000
"""Rows that a task takes at most, as near as shards divide them."""

TASK_CHARACTERS = 64 << 20
"""Characters of values that a task takes at most, likewise: long texts are few rows, and are sorted all the same."""

WORTH_SPLITTING = 50_000
"""Rows from which on a segment is divided among all cores."""

OVERHEAD = 500
"""Rows that a task of any size costs the time of."""

SLOTS_PER_CORE = 2


@dataclass(frozen=True, slots=True)
class PendingSegment:
    """A dataset's oldest closed segment, and the head that it is built on."""

    dataset: Dataset
    config: DatasetConfig
    segment: Segment
    head: Head


def tasks_of(job: PendingSegment, first: int, cores: int, moment: int) -> list[Task]:
    """The tasks of one segment, numbered from `first` on: ranges of shards, so that an entity's events meet in one."""
    rows = job.segment.rows
    parts = max(-(-rows // TASK_ROWS), -(-job.segment.size // TASK_CHARACTERS), cores if rows >= WORTH_SPLITTING else 1)
    low, high = ALL_SHARDS
    bounds = [low + (high + 1 - low) * part // parts for part in range(parts + 1)]
    return [
        Task(
            number=first + part,
            dataset=job.dataset.name,
            dataset_id=job.dataset.id,
            after=job.segment.after,
            upto=job.segment.number,
            shards=(bounds[part], bounds[part + 1] - 1),
            head=None if job.head.id is None else job.head.seq,
            moment=moment,
            target_file_bytes=job.config.target_file_bytes,
            checksum=job.config.checksum is not None,
        )
        for part in range(parts)
    ]


def pack_into_slots(tasks: Sequence[tuple[AnyTask, int]], cores: int) -> list[list[AnyTask]]:
    """Tasks, each with its rows, in slots of about the same work: a Spark task of its own for each would cost more."""
    count = min(len(tasks), cores * SLOTS_PER_CORE)
    slots: list[list[AnyTask]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    heapify(loads)
    for task, rows in sorted(tasks, key=lambda pair: pair[1], reverse=True):
        load, number = heappop(loads)
        slots[number].append(task)
        heappush(loads, (load + rows + OVERHEAD, number))
    return slots
