"""Registers the format `tarn` with Spark, which looks for `DefaultSource` in packages named `pyspark_{format}`."""

from tarn_client.spark import TarnDataSource as DefaultSource

__all__ = ["DefaultSource"]
