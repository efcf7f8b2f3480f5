"""Split a key range into parts of about the same size, by sampling its rows."""

# ruff: noqa: S608 - put together from constants and paths of ours

from collections.abc import Sequence

import duckdb

from tarn.datasets.registry import Dataset
from tarn.lake.scans import Scans, within
from tarn.model.datasets.ranges import Range
from tarn.model.datasets.snapshot import File
from tarn.model.work.cancellation import interrupting
from tarn.storage.store import Store

TASK_ROWS = 500_000
TASK_CHARACTERS = 64 << 20
"""Rows and characters that one task folds at most; approximate, as the range is divided by a sample."""

FINE, WORTH_A_FILE = 8, 25_000
"""A range is split into FINE files if each gets WORTH_A_FILE rows, so that later changes affect fewer rows."""

FEW_BYTES = 4 << 20
"""Bytes of files below which the length of their values is not checked: uncompressed they are some tens of megabytes at
most."""

SAMPLE, MOST_SAMPLED = 2_000, 20_000
"""Rows that are sampled for each part, and in total."""


def split_range(
    store: Store,
    dataset: Dataset,
    target_file_bytes: int,
    keys: Range,
    files: Sequence[File],
    cores: int,
    fine: int = 1,
) -> list[tuple[Range, int]]:
    """Split a range into parts of about the same size, each for one task and about one file. Returns the parts with
    their estimated rows. With `fine`, it is split into that many parts if they are large enough: for files that stay.
    """
    rows, size = sum(file.rows for file in files), sum(file.size for file in files)
    target_count = min(fine, rows // WORTH_A_FILE)
    count = max(1, target_count, -(-rows // TASK_ROWS), -(-size // target_file_bytes))
    if count == 1 and rows < 2 * WORTH_A_FILE and size < FEW_BYTES:
        return [(keys, rows)]
    sample, characters = _sampled(store, dataset, keys, files, min(MOST_SAMPLED, SAMPLE * max(count, cores)))
    count = max(count, min(cores, rows // WORTH_A_FILE), -(-characters // TASK_CHARACTERS))
    cuts = sorted({sample[len(sample) * part // count] for part in range(1, count)} - {keys.low}) if sample else []
    bounds = [keys.low, *cuts]
    return [(Range(low, high), rows // len(bounds)) for low, high in zip(bounds, [*bounds[1:], keys.high], strict=True)]


def _sampled(store: Store, dataset: Dataset, keys: Range, files: Sequence[File], most: int) -> tuple[list[str], int]:
    """Return the sorted keys of a sample of rows, and the approximate number of characters of all values."""
    connection = store.connection
    scans, paths = Scans(connection, dataset.layout), [file.path for file in files]
    rows = sum(file.rows for file in files)
    with duckdb.connect(config={"threads": 2, "memory_limit": "256MB"}) as duck, interrupting(duck.interrupt):
        connection.prepare(duck)
        share = min(1.0, 50 * most / max(1, rows))
        sampled = duck.execute(
            f"SELECT canonical_id FROM (SELECT canonical_id FROM {scans.read('statements', paths)} "
            f"TABLESAMPLE system({share * 100} PERCENT)) WHERE {within(keys)} USING SAMPLE {most} ROWS"
        ).fetchall()
        size, _ = duck.execute(scans.value_sizes("statements", paths)).fetchall()[0]
    return sorted(key for (key,) in sampled), int(size)
