"""The Spark data source `tarn`: Spark finds it without registration and reads one snapshot in several tasks."""

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
part = "spark_partition_id() as part"
statements = source.load().selectExpr("entity_id", "prop", "typeof(first_seen) as kind", part).collect()
source = source.option("table", "entities").option("partitions", "3")
entities = source.load().selectExpr("id", "properties['name'][0] as name", part).collect()
print(json.dumps({
    "statements": sorted(row.entity_id for row in statements if row.prop == "name"),
    "kinds": sorted({row.kind for row in statements}),
    "origins": len({row.part for row in statements}),
    "entities": sorted([row.id, row.name] for row in entities),
    "ranges": len({row.part for row in entities}),
    "first": sorted(row.id for row in source.option("at", "1").load().collect()),
}))
spark.stop()
"""


@pytest.mark.xdist_group("spark")
def test_spark_reads_the_head_or_an_earlier_snapshot_in_partitions(dataset: Dataset, server: Server, tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    for part, origin in enumerate(("crawl", "mapping")):
        with dataset.writer(origin) as writer:
            writer.add_all(person(number) for number in range(part * 10, part * 10 + 10))
        dataset.flush()
    with dataset.writer("later") as writer:
        writer.add(person(99))
    exported = dataset.export("entities", tmp_path / "entities.ftm.json")

    process = subprocess.run(
        [sys.executable, "script.py", server.url, server.admin_key, dataset.name],
        cwd=tmp_path,
        env=clean_environment(PYTHONPATH=str(SDK), PYSPARK_PYTHON=sys.executable),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    numbers = [*range(20), 99]
    ids = [f"p{number:05}" for number in numbers]
    assert len(exported.read_bytes().splitlines()) == 21
    assert result["statements"] == ids
    assert result["entities"] == [[f"p{number:05}", f"Person {number}"] for number in numbers]
    assert (result["origins"], result["ranges"], result["kinds"]) == (3, 3, ["timestamp"])
    assert result["first"] == ids[:10]


def test_boundaries_split_files_evenly_and_never_repeat_an_id():
    files = [{"canonical_id_min": f"id{number % 50:02}", "rows": 10} for number in range(100)]

    bounds = boundaries(files, 4)

    assert bounds == ["id12", "id25", "id37"]
    assert boundaries(files[:1], 4) == boundaries([], 4) == boundaries([{"rows": 3}], 4) == []
