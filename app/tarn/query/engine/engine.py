"""DuckDB engines for reads: in this process for short lookups, in a child process for queries.

Each has limits on memory, threads and temporary space.
"""

import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, cast

import duckdb
import structlog

from tarn.errors import QueryTimeout, Unavailable
from tarn.query.engine.duckdb_process import START_SECONDS, DuckdbProcess, DuckdbSession
from tarn.settings import Settings
from tarn.storage.connection import Connection
from tarn.storage.s3_identity import Keys

log = structlog.get_logger(__name__)

ACCESS_DENIED = re.compile(r"\(HTTP 40[13] |(Expired|Invalid)Token")


class Engine:
    """A DuckDB instance in this process, whose sessions share its memory and its caches of immutable files.

    It has no threads of its own: queries run on the caller's thread.
    """

    threads = 1

    def __init__(self, settings: Settings, connection: Connection) -> None:
        self._connection = connection
        self._folder = tempfile.TemporaryDirectory(prefix="tarn-query-")
        self._config = {
            "threads": self.threads,
            "memory_limit": f"{settings.query_memory}b",
            "temp_directory": self._folder.name,
            "max_temp_directory_size": f"{settings.query_temp_space}b",
            "preserve_insertion_order": False,
        }
        self._starting = Lock()
        self._root: duckdb.DuckDBPyConnection | None = None
        self._keys: Keys | None = None

    @property
    def scratch(self) -> Path:
        """Return a folder for spilled data, which is deleted when the engine is closed."""
        return Path(self._folder.name)

    @contextmanager
    def session(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Open a connection for the caller alone, whose temporary tables end with it. Another thread may interrupt it.

        It uses the current S3 keys. Raises Unavailable.
        """
        with self._ready().cursor() as duck:
            yield duck

    def warm_up(self) -> None:
        """Start the instance now, so that the first session need not wait. Raises Unavailable."""
        self._ready()

    def _ready(self) -> duckdb.DuckDBPyConnection:
        """Return the instance with the current S3 keys; start it if it is not running."""
        with self._starting:
            keys = self._connection.keys()
            if self._root is None or not self._is_alive():
                if self._root is not None:
                    self._root.close()
                with ExitStack() as cleanup, _start_timeout_converted():
                    root = cleanup.enter_context(closing(self._start(self._config)))
                    self._connection.prepare(root)
                    _enable_caches(root, self._connection.scheme)
                    cleanup.pop_all()
                self._root = root
            elif keys != self._keys:
                if isinstance(self._root, DuckdbSession):
                    self._root.limit(START_SECONDS)
                with _start_timeout_converted():
                    self._connection.prepare(self._root)
            self._keys = keys
            return self._root

    def _start(self, config: dict[str, Any]) -> duckdb.DuckDBPyConnection:
        return duckdb.connect(config=config)

    def _is_alive(self) -> bool:
        return True

    def close(self) -> None:
        if self._root is not None:
            self._root.close()
        self._folder.cleanup()


class ProcessEngine(Engine):
    """An engine in a low-priority child process. If the process dies, the next session starts another."""

    def __init__(self, settings: Settings, connection: Connection) -> None:
        self.threads = settings.query_threads
        super().__init__(settings, connection)
        self._process: DuckdbProcess | None = None
        self._are_shared = False

    @property
    def pid(self) -> int | None:
        """Return the id of the child process, or None if it is not running."""
        return None if self._process is None else self._process.pid

    def set_cpus_shared(self, is_shared: bool) -> None:
        """Set whether the process must leave a part of the processors to other work."""
        self._are_shared = is_shared
        if self._process is not None:
            self._process.set_cpus_shared(is_shared)

    def _start(self, config: dict[str, Any]) -> duckdb.DuckDBPyConnection:
        if self._process is not None:
            was_alive = self._process.is_alive
            self._process.end()
            if not was_alive:
                reason = self._process.exit_reason
                log.warning("query process died; starting another", pid=self._process.pid, reason=reason)
        self._process = DuckdbProcess(config)
        self._process.set_cpus_shared(self._are_shared)
        # A DuckdbSession implements the part of the connection interface that reads use.
        return cast("duckdb.DuckDBPyConnection", self._process.session())

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive

    def close(self) -> None:
        if self._process is not None:
            self._process.end()
        super().close()


class IsolatedEngine(ProcessEngine):
    """An engine for tenants whose query had to be killed: lower limits, and its process ends with the last session."""

    def __init__(self, settings: Settings, connection: Connection) -> None:
        super().__init__(settings, connection)
        self._config["threads"] = self.threads = 1
        self._config["memory_limit"] = _half(settings.query_memory)
        self._config["max_temp_directory_size"] = _half(settings.query_temp_space)
        self._sessions = 0

    @contextmanager
    def session(self) -> Iterator[duckdb.DuckDBPyConnection]:
        with self._starting:
            self._sessions += 1
        try:
            with super().session() as duck:
                yield duck
        finally:
            with self._starting:
                self._sessions -= 1
                if not self._sessions:
                    self._stop()

    def _stop(self) -> None:
        if self._root is not None:
            self._root.close()
        if self._process is not None:
            self._process.end()
        self._root = self._process = None


def _half(size: str) -> str:
    """Return half of a size such as `1g`, in DuckDB's notation."""
    return f"{int(size[:-1]) * (1024 if size.endswith('g') else 1) * 512}KiB"


@contextmanager
def _start_timeout_converted() -> Iterator[None]:
    """Turn QueryTimeout into Unavailable: a slow start of the process is not the query's fault."""
    try:
        yield
    except QueryTimeout as error:
        raise Unavailable("the query process did not start in time", retry_after=2) from error


def _enable_caches(root: duckdb.DuckDBPyConnection, scheme: str) -> None:
    # Data files never change, so their metadata can be cached without expiry. DuckDB evicts it if queries need memory.
    root.execute("SET GLOBAL parquet_metadata_cache = true")
    if scheme == "s3":
        root.execute("SET GLOBAL enable_http_metadata_cache = true")
    if scheme == "file":
        # The operating system's page cache already holds local files, and drops them when a file is deleted.
        root.execute("SET GLOBAL enable_external_file_cache = false")


@contextmanager
def duckdb_errors_converted() -> Iterator[None]:
    """Convert DuckDB's errors to Unavailable: storage that does not respond, or a query that exceeds its limits."""
    try:
        yield
    except (duckdb.OutOfMemoryException, duckdb.IOException, duckdb.HTTPException) as error:
        raise _unavailable(error) from error
    except OSError as error:
        # Errors while fetching Arrow batches are plain OSErrors: only the text tells the kind.
        if str(error).startswith("INTERRUPT Error"):
            raise duckdb.InterruptException(str(error)) from None
        if str(error).startswith(("Out of Memory Error", "IO Error", "HTTP Error")):
            raise _unavailable(error) from error
        raise


def _unavailable(error: Exception) -> Unavailable:
    if isinstance(error, duckdb.OutOfMemoryException) or str(error).startswith("Out of Memory Error"):
        return Unavailable("the query needs more memory or temporary space than there is now", retry_after=5)
    if ACCESS_DENIED.search(str(error)):
        return Unavailable("the object store denies access: the operator must check credentials and permissions")
    return Unavailable(f"the object store does not respond: {type(error).__name__}", retry_after=2)
