"""A range of keys divided into parts of about the same size, by a look at some of its rows."""

# ruff: noqa: S608 - put together from constants and paths of ours

from collections.abc import Sequence

import duckdb

from tarn.datasets.registry import Dataset
from tarn.model.cancellation import interrupting
from tarn.model.ranges import Range
from tarn.model.snapshot import File
from tarn.storage.store import Store

TASK_ROWS = 500_000
TASK_CHARACTERS = 64 << 20
"""What one task folds at most, as near as a sample divides it."""

FINE, WORTH_A_FILE = 8, 25_000
"""A range is divided into so many files if each gets so many rows: what changes later concerns fewer of them."""

FEW_BYTES = 4 << 20
"""Of files that need no look at how long their texts are: packed well, they are some tens of megabytes at most."""

SAMPLE, MOST_SAMPLED = 2_000, 20_000
"""Rows that are looked at for each part, and in all."""


def split_range(
    store: Store,
    dataset: Dataset,
    target_file_bytes: int,
    keys: Range,
    files: Sequence[File],
    cores: int,
    fine: int = 1,
) -> list[tuple[Range, int]]:
    """A range in parts of about the same size, each for one task and one file, more or less; so `fine`, if it is worth
    it, for files that stay."""
    rows, size = sum(file.rows for file in files), sum(file.size for file in files)
    wanted = min(fine, rows // WORTH_A_FILE)
    count = max(1, wanted, -(-rows // TASK_ROWS), -(-size // target_file_bytes))
    if count == 1 and rows < 2 * WORTH_A_FILE and size < FEW_BYTES:
        return [(keys, rows)]
    sample, characters = _sampled(store, dataset, keys, files, min(MOST_SAMPLED, SAMPLE * max(count, cores)))
    count = max(count, min(cores, rows // WORTH_A_FILE), -(-characters // TASK_CHARACTERS))
    cuts = sorted({sample[len(sample) * part // count] for part in range(1, count)} - {keys.low}) if sample else []
    bounds = [keys.low, *cuts]
    return [(Range(low, high), rows // len(bounds)) for low, high in zip(bounds, [*bounds[1:], keys.high], strict=True)]


def _sampled(store: Store, dataset: Dataset, keys: Range, files: Sequence[File], most: int) -> tuple[list[str], int]:
    """Keys of some rows, in order, and about how many characters all values have together."""
    connection = store.connection
    urls = [connection.file_url(f"{dataset.layout.statements}/{file.path}") for file in files]
    rows = sum(file.rows for file in files)
    with duckdb.connect(config={"threads": 2, "memory_limit": "256MB"}) as duck, interrupting(duck.interrupt):
        connection.prepare(duck)
        above = "canonical_id >= $low" + ("" if keys.high is None else " AND canonical_id < $high")
        bounds = {"low": keys.low} | ({} if keys.high is None else {"high": keys.high})
        share = min(1.0, 50 * most / max(1, rows))
        found = duck.execute(
            "SELECT canonical_id FROM (SELECT canonical_id FROM read_parquet($urls, hive_partitioning = false) "
            f"TABLESAMPLE system({share * 100} PERCENT)) WHERE {above} USING SAMPLE {most} ROWS",
            {"urls": urls} | bounds,
        ).fetchall()
        (size,) = duck.execute(
            "SELECT sum(total_uncompressed_size) FROM parquet_metadata($urls) WHERE path_in_schema = 'value'",
            {"urls": urls},
        ).fetchall()[0]
    return sorted(key for (key,) in found), int(size or 0)
