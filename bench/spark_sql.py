"""The same segment by plain Spark SQL, for docs/decisions/011: fold, split, sort and write, without kernels.

It is given a head start: its events are in Parquet already, nothing is looked up in the store, and nothing is committed
to a Delta table, which without delta-spark's JARs it could not be.
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
from tarn.model.schema_buckets import buckets
from tarn.model.shards import ALL_SHARDS
from tarn.pipeline.tasks.journal_slice import Journal, JournalSlice

from bench.data import entities
from bench.flush import COUNT, Bench, _house

KEY = ("bucket", "canonical_id", "id")


def run() -> dict[str, Any]:
    """Statements/s of both on the same events, on the same session, warm, each the best of three."""
    with tempfile.TemporaryDirectory() as name, _house(Path(name)) as house:
        path = entities(COUNT, Path(name))
        house.load("warm", path)
        house.flush("warm")
        statements = house.load("events", path)
        events = _export_events(house, Path(name))
        kernels = []
        for number in range(3):
            house.load(f"again{number}", path)
            kernels.append(house.flush(f"again{number}"))
        session = house.flusher._sessions.current()
        plain = [_run_spark_sql(session, events, Path(name) / f"plain{number}") for number in range(4)][1:]
    return {
        "kernels statements/s": statements / min(kernels),
        "plain Spark SQL statements/s": statements / min(plain),
        "kernels / plain Spark SQL": min(plain) / min(kernels),
    }


def _export_events(house: Bench, folder: Path) -> Path:
    """The dataset's events as Parquet, as the kernel would read them: in a process of its own, as it does."""
    target = folder / "events.parquet"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(export, house.settings.database_url, house.dataset("events"), target).result()
    return target


def export(database_url: str, dataset_id: str, target: Path) -> None:
    everything = JournalSlice(dataset_id, 0, 1 << 40, ALL_SHARDS)
    with Journal.at(database_url).opened() as opened, opened.events(everything) as reader:
        pq.write_table(reader.read_all(), target)


def _run_spark_sql(session: SparkSession, events: Path, target: Path) -> float:
    begun = time.perf_counter()
    families = session.createDataFrame(list(buckets().items()), "schema string, bucket string")
    newest = Window.partitionBy("id", "origin")
    folded = (
        session.read.parquet(str(events))
        .where("ord <> 0 AND kind = 1")
        .join(f.broadcast(families), "schema")
        .withColumn("canonical_id", f.coalesce("canonical_id", "entity_id"))
        .withColumn("first_seen", f.min("first_seen").over(newest))
        .withColumn("last_seen", f.max("last_seen").over(newest))
        .withColumn("place", f.row_number().over(newest.orderBy(f.desc("ord"))))
        .where("place = 1")
        .drop("place", "kind")
        .persist()
    )
    _write(folded, target / "statements", "origin")
    log = folded.select(*KEY, "entity_id", "origin", "first_seen", "last_seen", "ord", f.lit("insert").alias("kind"))
    _write(log, target / "translog", "kind")
    folded.unpersist()
    return time.perf_counter() - begun


def _write(rows: DataFrame, target: Path, partition: str) -> None:
    ordered = rows.sortWithinPartitions(partition, *KEY)
    ordered.write.partitionBy(partition).option("compression", "zstd").parquet(str(target))
