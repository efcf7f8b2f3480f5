"""A query process that the in-process APIs of a test process share, because starting one takes a second of CPU time."""

import tempfile
from typing import Any

from tarn.query.engine import engine
from tarn.query.engine.duckdb_process import DuckdbProcess
from tarn.settings import Settings
from tarn.storage.connection import Connection


class SharedDuckdbProcess(DuckdbProcess):
    """A query process that outlives the engines that use it."""

    def end(self) -> None:
        """Do nothing: the process is kept for the next engine."""

    def stop(self) -> None:
        super().end()


class SharedQueryProcess:
    """Returns one shared process to all engines with default limits; other engines get a process of their own."""

    def __init__(self, settings: Settings) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tarn-query-")
        with_defaults = engine.ProcessEngine(settings, Connection.from_settings(settings))
        self._config = with_defaults._config | {"temp_directory": self._folder.name}
        with_defaults.close()
        self._child: SharedDuckdbProcess | None = None

    def child(self, config: dict[str, Any]) -> DuckdbProcess:
        """Return the shared process, started again if it died, or a new one if the limits differ."""
        if config | {"temp_directory": self._folder.name} != self._config:
            return DuckdbProcess(config)
        if self._child is None or not self._child.is_alive:
            self.stop()
            self._child = SharedDuckdbProcess(self._config)
        return self._child

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()
