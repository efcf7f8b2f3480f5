"""DuckDB inside the API's process: one instance, bounded in memory, threads and temporary space."""

import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import duckdb

from app.errors import Unavailable
from app.query.standing_back import stand_back
from app.settings import Settings
from app.storage.connection import Connection

REFUSED = re.compile(r"\(HTTP 40[13] |(Expired|Invalid)Token")


class Engine:
    """Hands out connections that share one instance, its memory and its caches of files that never change."""

    def __init__(self, settings: Settings, connection: Connection) -> None:
        self._connection = connection
        self._folder = tempfile.TemporaryDirectory(prefix="tarn-query-")
        self._root = _started(
            {
                "threads": settings.query_threads,
                "memory_limit": f"{settings.query_memory}b",
                "temp_directory": self._folder.name,
                "max_temp_directory_size": f"{settings.query_temp_space}b",
                "preserve_insertion_order": False,
            }
        )
        self._keys = connection.keys()
        self._renewing = Lock()
        connection.prepare(self._root)
        # Data files never change, so what is known of one is known for good. It yields to queries that need the memory.
        self._root.execute("SET GLOBAL parquet_metadata_cache = true")
        if connection.scheme == "s3":
            self._root.execute("SET GLOBAL enable_http_metadata_cache = true")
        if connection.scheme == "file":
            # What a disk holds, the system keeps at hand already, and lets go of with the file.
            self._root.execute("SET GLOBAL enable_external_file_cache = false")

    @property
    def scratch(self) -> Path:
        """A folder for what outgrows memory, removed with the engine."""
        return Path(self._folder.name)

    @contextmanager
    def session(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection of the caller's own, whose temporary tables end with it. Another thread may interrupt it.

        Keys are those of this moment. Raises Unavailable.
        """
        self._renew()
        with self._root.cursor() as duck:
            yield duck

    def _renew(self) -> None:
        with self._renewing:
            keys = self._connection.keys()
            if keys != self._keys:
                self._connection.prepare(self._root)
                self._keys = keys

    def close(self) -> None:
        self._root.close()
        self._folder.cleanup()


def _started(config: dict[str, Any]) -> duckdb.DuckDBPyConnection:
    """DuckDB with threads that stand back: they have the priority of the thread that starts it."""
    with ThreadPoolExecutor(1, initializer=stand_back) as starting:
        return starting.submit(duckdb.connect, config=config).result()


@contextmanager
def answering() -> Iterator[None]:
    """DuckDB's errors in our own terms: what is away comes back, and what is too large says so."""
    try:
        yield
    except (duckdb.OutOfMemoryException, duckdb.IOException, duckdb.HTTPException) as error:
        raise _unanswered(error) from error
    except OSError as error:
        # Of rows that come as Arrow, the kind of error is known by its text alone.
        if str(error).startswith("INTERRUPT Error"):
            raise duckdb.InterruptException(str(error)) from None
        if str(error).startswith(("Out of Memory Error", "IO Error", "HTTP Error")):
            raise _unanswered(error) from error
        raise


def _unanswered(error: Exception) -> Unavailable:
    if isinstance(error, duckdb.OutOfMemoryException) or str(error).startswith("Out of Memory Error"):
        return Unavailable("the query needs more memory or temporary space than there is now", retry_after=5)
    if REFUSED.search(str(error)):
        return Unavailable("the object store refuses the identity that Tarn has; its operator must look at it")
    return Unavailable(f"the store does not answer: {type(error).__name__}", retry_after=2)
