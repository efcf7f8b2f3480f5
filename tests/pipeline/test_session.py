"""Spark itself: the Python of its executors, and authentication and encryption of its connections."""

import sys
from collections.abc import Iterator

import psutil
import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession
from tarn.pipeline.session import Sessions, start_session
from tarn.settings import load_settings

from tests.pipeline.unauthenticated_client import ask_without_secret, jvm_process

pytestmark = pytest.mark.xdist_group("spark")


@pytest.fixture(scope="module")
def session() -> Iterator[SparkSession]:
    sessions = Sessions(load_settings(spark_master="local[2]", spark_memory="512m"))
    yield sessions.current()
    sessions.close()


def test_executors_run_the_drivers_python():
    session = start_session(load_settings(spark_master="local[2]", spark_memory="512m"))

    def which_python(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"python": [sys.executable] * batch.num_rows})

    executables = session.range(4).mapInArrow(which_python, "python string").distinct().collect()
    session.stop()

    assert [row.python for row in executables] == [sys.executable]


def test_driver_rejects_clients_without_its_secret(session: SparkSession):
    context = session.sparkContext

    with pytest.raises(Py4JJavaError) as refused:
        ask_without_secret(context, int(context.getConf().get("spark.driver.port", "")))

    assert "MapOutputTracker" not in str(refused.value.java_exception.getMessage())
    assert context.parallelize([1, 2], 2).map(lambda number: number + 1).collect() == [2, 3]


def test_connections_of_spark_processes_are_encrypted(session: SparkSession):
    conf = dict(session.sparkContext.getConf().getAll())

    assert {name: conf.get(name) for name in conf if "crypto" in name or "encryption" in name} == {
        "spark.network.crypto.enabled": "true",
        "spark.network.crypto.authEngineVersion": "2",
        "spark.network.crypto.saslFallback": "false",
    }
    assert (conf["spark.authenticate"], conf["spark.ui.enabled"]) == ("true", "false")


def test_local_driver_listens_only_on_the_loopback_interface(session: SparkSession):
    process = jvm_process(session.sparkContext)

    listening = {each.laddr.ip for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}

    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert listening
