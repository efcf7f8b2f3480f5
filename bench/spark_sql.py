"""Benchmark of plain Spark SQL against the kernels, for decision 011: fold, split, sort and write the same segment.

The comparison favours plain Spark SQL: its events are already in Parquet, it looks nothing up in existing files, and it
commits nothing to a Delta table (which would need delta-spark's JARs).
"""

import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f
from tarn.model.datasets.shards import ALL_SHARDS
from tarn.model.ftm.schema_buckets import buckets
from tarn.pipeline.tasks.journal_slice import Journal, JournalSlice

from bench.data import entities
from bench.flush import COUNT, Bench, started_bench

KEY = ("bucket", "canonical_id", "id")


def run() -> dict[str, Any]:
    """Measure statements/s of both on the same events and warm session, best of three runs each."""
    with tempfile.TemporaryDirectory() as name, started_bench(Path(name)) as bench:
        path = entities(COUNT, Path(name))
        bench.load("warm", path)
        bench.flush("warm")
        statements = bench.load("events", path)
        events = _export_events(bench, Path(name))
        kernels = []
        for number in range(3):
            bench.load(f"again{number}", path)
            kernels.append(bench.flush(f"again{number}"))
        session = bench.flusher._sessions.current()
        spark_sql = [_run_spark_sql(session, events, Path(name) / f"plain{number}") for number in range(4)][1:]
    return {
        "kernels statements/s": statements / min(kernels),
        "plain Spark SQL statements/s": statements / min(spark_sql),
        "kernels / plain Spark SQL": min(spark_sql) / min(kernels),
    }


def _export_events(bench: Bench, folder: Path) -> Path:
    """Export the dataset's events to Parquet with the kernel's reader, in a separate process as the kernel does."""
    target = folder / "events.parquet"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(export, bench.settings.database_url, bench.dataset("events"), target).result()
    return target


def export(database_url: str, dataset_id: str, target: Path) -> None:
    everything = JournalSlice(dataset_id, 0, 1 << 40, ALL_SHARDS)
    with Journal.at(database_url).open_reader() as opened, opened.events(everything) as reader:
        pq.write_table(reader.read_all(), target)


def _run_spark_sql(session: SparkSession, events: Path, target: Path) -> float:
    start = time.perf_counter()
    bucket_rows = session.createDataFrame(list(buckets().items()), "schema string, bucket string")
    by_statement = Window.partitionBy("id", "origin")
    folded = (
        session.read.parquet(str(events))
        .where("ord <> 0 AND kind = 1")
        .join(f.broadcast(bucket_rows), "schema")
        .withColumn("canonical_id", f.coalesce("canonical_id", "entity_id"))
        .withColumn("first_seen", f.min("first_seen").over(by_statement))
        .withColumn("last_seen", f.max("last_seen").over(by_statement))
        .withColumn("place", f.row_number().over(by_statement.orderBy(f.desc("ord"))))
        .where("place = 1")
        .drop("place", "kind")
        .persist()
    )
    _write(folded, target / "statements", "origin")
    log = folded.select(*KEY, "entity_id", "origin", "first_seen", "last_seen", "ord", f.lit("insert").alias("kind"))
    _write(log, target / "translog", "kind")
    folded.unpersist()
    return time.perf_counter() - start


def _write(rows: DataFrame, target: Path, partition: str) -> None:
    ordered = rows.sortWithinPartitions(partition, *KEY)
    ordered.write.partitionBy(partition).option("compression", "zstd").parquet(str(target))
