"""Spark itself."""

import sys
from collections.abc import Iterator

import pyarrow as pa
import pytest

from app.pipeline.session import start_session
from app.settings import load_settings


@pytest.mark.xdist_group("spark")
def test_executors_run_under_the_drivers_python():
    session = start_session(load_settings(spark_master="local[2]", spark_memory="512m"))

    def which_python(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"python": [sys.executable] * batch.num_rows})

    found = session.range(4).mapInArrow(which_python, "python string").distinct().collect()
    session.stop()

    assert [row.python for row in found] == [sys.executable]
