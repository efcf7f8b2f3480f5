"""DuckDB for reads: in this process for what is brief, in one of its own for queries.

Each is bounded in memory, threads and temporary space.
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
from tarn.query.duckdb_process import START_SECONDS, DuckdbProcess, DuckdbSession
from tarn.settings import Settings
from tarn.storage.connection import Connection
from tarn.storage.s3_identity import Keys

log = structlog.get_logger(__name__)

ACCESS_DENIED = re.compile(r"\(HTTP 40[13] |(Expired|Invalid)Token")


class Engine:
    """Hands out connections that share one instance, its memory and its caches of files that never change.

    In this process, with no thread but those that ask.
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
        """A folder for what outgrows memory, removed with the engine."""
        return Path(self._folder.name)

    @contextmanager
    def session(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection of the caller's own, whose temporary tables end with it. Another thread may interrupt it.

        Keys are those of this moment. Raises Unavailable.
        """
        with self._ready().cursor() as duck:
            yield duck

    def warm_up(self) -> None:
        """Start what the first session would wait for. Raises Unavailable."""
        self._ready()

    def _ready(self) -> duckdb.DuckDBPyConnection:
        """The instance, started if there is none, with the keys of this moment."""
        with self._starting:
            keys = self._connection.keys()
            if self._root is None or not self._is_alive():
                if self._root is not None:
                    self._root.close()
                with ExitStack() as unless_ready, _starting_in_time():
                    root = unless_ready.enter_context(closing(self._start(self._config)))
                    self._connection.prepare(root)
                    _enable_caches(root, self._connection.scheme)
                    unless_ready.pop_all()
                self._root = root
            elif keys != self._keys:
                if isinstance(self._root, DuckdbSession):
                    self._root.limit(START_SECONDS)
                with _starting_in_time():
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
    """The same in a process of its own, which stands back. If it dies, the next session has another."""

    def __init__(self, settings: Settings, connection: Connection) -> None:
        self.threads = settings.query_threads
        super().__init__(settings, connection)
        self._child: DuckdbProcess | None = None
        self._are_shared = False

    @property
    def pid(self) -> int | None:
        """The process, if there is one."""
        return None if self._child is None else self._child.pid

    def share(self, shared: bool) -> None:
        """Say whether others need processors, too."""
        self._are_shared = shared
        if self._child is not None:
            self._child.share(shared)

    def _start(self, config: dict[str, Any]) -> duckdb.DuckDBPyConnection:
        if self._child is not None:
            if not self._child.is_alive:
                log.warning("the process that answered queries died", pid=self._child.pid)
            self._child.end()
        self._child = DuckdbProcess(config)
        self._child.share(self._are_shared)
        # It has as much of a connection as whoever reads needs.
        return cast("duckdb.DuckDBPyConnection", self._child.session())

    def _is_alive(self) -> bool:
        return self._child is not None and self._child.is_alive

    def close(self) -> None:
        if self._child is not None:
            self._child.end()
        super().close()


class IsolatedEngine(ProcessEngine):
    """The same for tenants whose query had to be killed: smaller, and its process ends with its last session."""

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
        if self._child is not None:
            self._child.end()
        self._root = self._child = None


def _half(size: str) -> str:
    """Half of a size such as `1g`, in DuckDB's words."""
    return f"{int(size[:-1]) * (1024 if size.endswith('g') else 1) * 512}KiB"


@contextmanager
def _starting_in_time() -> Iterator[None]:
    """What takes too long before a query begins is no fault of the query."""
    try:
        yield
    except QueryTimeout as error:
        raise Unavailable("the process that answers queries did not start in time", retry_after=2) from error


def _enable_caches(root: duckdb.DuckDBPyConnection, scheme: str) -> None:
    # Data files never change, so what is known of one is known for good. It yields to queries that need the memory.
    root.execute("SET GLOBAL parquet_metadata_cache = true")
    if scheme == "s3":
        root.execute("SET GLOBAL enable_http_metadata_cache = true")
    if scheme == "file":
        # What a disk holds, the system keeps at hand already, and lets go of with the file.
        root.execute("SET GLOBAL enable_external_file_cache = false")


@contextmanager
def answering() -> Iterator[None]:
    """DuckDB's errors in our own terms: what is away comes back, and what is too large says so."""
    try:
        yield
    except (duckdb.OutOfMemoryException, duckdb.IOException, duckdb.HTTPException) as error:
        raise _unavailable(error) from error
    except OSError as error:
        # Of rows that come as Arrow, the kind of error is known by its text alone.
        if str(error).startswith("INTERRUPT Error"):
            raise duckdb.InterruptException(str(error)) from None
        if str(error).startswith(("Out of Memory Error", "IO Error", "HTTP Error")):
            raise _unavailable(error) from error
        raise


def _unavailable(error: Exception) -> Unavailable:
    if isinstance(error, duckdb.OutOfMemoryException) or str(error).startswith("Out of Memory Error"):
        return Unavailable("the query needs more memory or temporary space than there is now", retry_after=5)
    if ACCESS_DENIED.search(str(error)):
        return Unavailable("the object store refuses the identity that Tarn has; its operator must look at it")
    return Unavailable(f"the store does not answer: {type(error).__name__}", retry_after=2)
