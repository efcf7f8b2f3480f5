"""`spark.read.format("tarn")`: a snapshot, read by many tasks, found by Spark by itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tarn_client import Dataset
from tarn_client.spark import boundaries

from tests.clients.conftest import person
from tests.clients.test_records import SDK
from tests.server import Server, clean_environment

SCRIPT = """
import json, sys
from pyspark.sql import SparkSession

url, key, dataset = sys.argv[1:]
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
source = spark.read.format("tarn").option("url", url).option("key", key).option("dataset", dataset)
statements, entities = source.load(), source.option("table", "entities").option("partitions", "3").load()
first = source.option("at", "1").load()
print(json.dumps({
    "statements": sorted([row.entity_id, row.origin] for row in statements.where("prop = 'name'").collect()),
    "origins": statements.rdd.getNumPartitions(),
    "entities": sorted(row.id for row in entities.collect()),
    "names": entities.selectExpr("explode(properties['name']) as name").distinct().count(),
    "ranges": entities.rdd.getNumPartitions(),
    "first": sorted(row.id for row in first.collect()),
    "seen": statements.selectExpr("typeof(first_seen) as kind").first().kind,
}))
spark.stop()
"""


@pytest.mark.xdist_group("spark")
def test_spark_reads_one_snapshot_in_parts_and_nothing_that_came_later(
    dataset: Dataset, server: Server, tmp_path: Path
):
    (tmp_path / "script.py").write_text(SCRIPT)
    for part, origin in enumerate(("crawl", "mapping")):
        with dataset.writer(origin) as writer:
            writer.add_all(person(number) for number in range(part * 10, part * 10 + 10))
        dataset.flush()
    with dataset.writer("later") as writer:
        writer.add(person(99))
    exported = dataset.export("entities", tmp_path / "entities.ftm.json")

    done = subprocess.run(
        [sys.executable, "script.py", server.url, server.admin_key, dataset.name],
        cwd=tmp_path,
        env=clean_environment(PYTHONPATH=str(SDK), PYSPARK_PYTHON=sys.executable),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    everybody = [f"p{number:05}" for number in (*range(20), 99)]
    assert len(exported.read_bytes().splitlines()) == 21
    assert [entity for entity, _ in found["statements"]] == found["entities"] == everybody
    assert (found["origins"], found["ranges"], found["names"]) == (3, 3, 21)
    assert found["first"] == everybody[:10]
    assert found["seen"] == "timestamp"


def test_boundaries_divide_files_evenly_and_never_twice_at_one_id():
    files = [{"canonical_id_min": f"id{number % 50:02}", "rows": 10} for number in range(100)]

    bounds = boundaries(files, 4)

    assert bounds == ["id12", "id25", "id37"]
    assert boundaries(files[:1], 4) == boundaries([], 4) == boundaries([{"rows": 3}], 4) == []
