"""The Spark session of a worker."""

import os
import sys

from pyspark.sql import SparkSession

from app.settings import Settings


def start_session(settings: Settings) -> SparkSession:
    """A session on the configured master, quiet and without a UI.

    Executors run under the Python of this process: another one might lack the packages, or pickle differently.
    """
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.Builder().master(settings.spark_master).appName("tarn")
    options = {
        "spark.driver.memory": settings.spark_memory,
        "spark.executor.memory": settings.spark_memory,
        **({"spark.driver.host": "127.0.0.1"} if settings.spark_master.startswith("local") else {}),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "8",
        "spark.log.level": "ERROR",
    }
    for name, value in options.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
