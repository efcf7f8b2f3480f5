"""Flush planning: divide segments into tasks, and pack tasks into Spark partitions."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TypeVar

from tarn.datasets.registry import Dataset
from tarn.journal.segments import Segment
from tarn.model.datasets.dataset import DatasetConfig
from tarn.model.datasets.shards import ALL_SHARDS
from tarn.model.datasets.snapshot import Head
from tarn.pipeline.tasks.flush_segment import FlushSegment
from tarn.pipeline.tasks.task import Task

Result = TypeVar("Result")

TASK_ROWS = 500_000
"""Rows per task at most; approximate, as a segment is divided by shards."""

TASK_CHARACTERS = 64 << 20
"""Characters of values per task at most; approximate. Long texts are few rows, but must be sorted, too."""

WORTH_SPLITTING = 50_000
"""Rows from which on a segment is divided among all cores."""

OVERHEAD = 500
"""Fixed cost of a task, in rows."""

PARTITIONS_PER_CORE = 2


@dataclass(frozen=True, slots=True)
class PendingSegment:
    """A dataset's oldest closed segment, and the head that it is built on."""

    dataset: Dataset
    config: DatasetConfig
    segment: Segment
    head: Head

    @property
    def rows(self) -> int:
        return self.segment.rows


def tasks_of(pending: PendingSegment, first: int, cores: int, moment: int) -> list[FlushSegment]:
    """Return the tasks of one segment, numbered from `first` on. They are ranges of shards, so that all events of an
    entity are in one task."""
    rows = pending.rows
    parts = max(
        -(-rows // TASK_ROWS), -(-pending.segment.size // TASK_CHARACTERS), cores if rows >= WORTH_SPLITTING else 1
    )
    low, high = ALL_SHARDS
    bounds = [low + (high + 1 - low) * part // parts for part in range(parts + 1)]
    return [
        FlushSegment(
            number=first + part,
            dataset=pending.dataset.name,
            dataset_id=pending.dataset.id,
            after=pending.segment.after,
            upto=pending.segment.number,
            shards=(bounds[part], bounds[part + 1] - 1),
            head=None if pending.head.id is None else pending.head.seq,
            moment=moment,
            target_file_bytes=pending.config.target_file_bytes,
            checksum=pending.config.checksum is not None,
        )
        for part in range(parts)
    ]


def pack_into_partitions(tasks: Sequence[tuple[Task[Result], int]], cores: int) -> list[list[Task[Result]]]:
    """Pack tasks, given with their rows, into partitions of about the same work: a Spark task for each costs more."""
    count = min(len(tasks), cores * PARTITIONS_PER_CORE)
    partitions: list[list[Task[Result]]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    heapify(loads)
    for task, rows in sorted(tasks, key=lambda pair: pair[1], reverse=True):
        load, number = heappop(loads)
        partitions[number].append(task)
        heappush(loads, (load + rows + OVERHEAD, number))
    return partitions
