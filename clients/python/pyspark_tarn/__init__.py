"""Where Spark finds the format `tarn` by itself: it looks for a `DefaultSource` in packages of such names."""

from tarn_client.spark import TarnDataSource as DefaultSource

__all__ = ["DefaultSource"]
