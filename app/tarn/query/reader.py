"""Reader: starts reads, each with a DuckDB session and the dataset states that were resolved for it."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

import duckdb

from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.errors import QueryTimeout, Unavailable
from tarn.lake.live.reference import Statement
from tarn.model.ids import new_id
from tarn.query import live
from tarn.query.engine.active_reads import ActiveRead, ActiveReads
from tarn.query.engine.duckdb_process import DuckdbSession
from tarn.query.engine.engine import Engine, IsolatedEngine, ProcessEngine, duckdb_errors_converted
from tarn.query.engine.tenant_isolation import IsolatedTenants
from tarn.query.live import MAX_LOOKUP_ROWS, IncompleteEvents, LookupTooLarge
from tarn.query.views import View, Views
from tarn.settings import Settings
from tarn.storage.store import Store
from tarn.telemetry import Telemetry


class RequestedState(NamedTuple):
    """The requested state of a dataset: the current one, the head without unflushed events, or a snapshot."""

    at: str | None = None
    fresh: Literal["overlay", "snapshot"] = "overlay"


NOW = RequestedState()


class Reader:
    """The reads of one process. Thread-safe; each read has its own session."""

    def __init__(self, settings: Settings, database: Database, store: Store, watch: Telemetry | None = None) -> None:
        self._watch = watch or Telemetry()
        self._local = Engine(settings, store.connection)
        self._local.warm_up()
        self._remote = ProcessEngine(settings, store.connection)
        self._isolated = IsolatedEngine(settings, store.connection)
        self._isolated_tenants = IsolatedTenants()
        self._seconds = settings.query_seconds
        self._views = Views(database, store, settings.overlay_rows)
        self._store = store
        self.active_reads = ActiveReads()

    def reading(self, tenant: str = "", seconds: float | None = None) -> AbstractContextManager["Reading"]:
        """Start a read for a tenant, with a time limit. Its temporary tables and files are deleted when it ends.

        DuckDB's errors are converted to Tarn's. If a query must be killed, all other queries in the same process end
        with it; so afterwards the queries of its tenant run in another process for a while.
        """
        return self._start(lambda: self._engine_of(tenant), tenant, self._seconds if seconds is None else seconds)

    def lookup(self) -> AbstractContextManager["Reading"]:
        """Start a short lookup in this process, which needs no query process and no time limit.

        This process cannot be killed, so the caller must ensure that the work is small and stops when interrupted.
        """
        return self._start(lambda: self._local, "", self._seconds)

    def is_isolated(self, tenant: str) -> bool:
        """Return whether a query of this tenant had to be killed recently."""
        return tenant in self._isolated_tenants

    def warm_up(self) -> None:
        """Start the query process, so that the first query does not wait. If it fails, that query retries."""
        with suppress(Unavailable):
            self._remote.warm_up()

    def set_cpus_shared(self, is_shared: bool) -> None:
        """Set whether several tenants are active: then queries leave a part of the processors to short requests."""
        self._remote.set_cpus_shared(is_shared)
        self._isolated.set_cpus_shared(is_shared)

    def _engine_of(self, tenant: str) -> Engine:
        return self._isolated if self.is_isolated(tenant) else self._remote

    @contextmanager
    def _start(self, choose: Callable[[], Engine], tenant: str, seconds: float) -> Iterator["Reading"]:
        # Chosen when the read starts: it may have waited for a slot while another query of its tenant was killed.
        engine, watch = choose(), self._watch
        with watch.timed(watch.queries, "query"), duckdb_errors_converted(), engine.session() as duck:
            reading = Reading(
                duck, self._views, self._store, engine.scratch, self.active_reads, is_lookup=engine is self._local
            )
            reading.limit(seconds)
            if isinstance(duck, DuckdbSession):
                duck.on_kill = lambda: self._isolated_tenants.add(tenant)
            try:
                yield reading
            except (duckdb.Error, QueryTimeout):
                watch.queries_failed.inc()
                raise
            finally:
                reading.clean()

    def close(self) -> None:
        self._local.close()
        self._remote.close()
        self._isolated.close()


class Reading:
    """A running read. Not thread-safe, except that another thread may interrupt it."""

    def __init__(
        self,
        duck: duckdb.DuckDBPyConnection,
        views: Views,
        store: Store,
        scratch: Path,
        active_reads: ActiveReads,
        is_lookup: bool = False,
    ) -> None:
        self.duck = duck
        self.is_lookup = is_lookup
        """Whether it is a lookup in this process, which raises LookupTooLarge if it needs too many rows."""
        self._views = views
        self.store = store
        self._scratch = scratch
        self._active_reads = active_reads
        self._registered: list[ActiveRead] = []
        self._spool_files: list[Path] = []

    def view(self, dataset: Dataset, state: RequestedState, entities: Collection[str] | None = None) -> View:
        """Resolve a state once. Its files are kept until the read ends.

        With `entities`, the view may have the unflushed events on these entities only.
        """
        read = self._active_reads.begin(dataset.id)
        self._registered.append(read)
        view = self._resolve(dataset, state, entities)
        if view.snapshot is not None:
            read.seq = view.snapshot.seq
        return view

    def _resolve(self, dataset: Dataset, state: RequestedState, entities: Collection[str] | None) -> View:
        if state.at is not None:
            return self._views.at(dataset, state.at)
        if state.fresh == "snapshot":
            return self._views.head(dataset)
        return self._views.now(dataset, self._spool, None if entities is None else frozenset(entities))

    def everything(
        self, dataset: Dataset, state: RequestedState, origin: str | None = None, name: str = "live"
    ) -> View:
        """Create the view `name` of every live statement: of every origin, or at least of one."""
        view = self.view(dataset, state)
        self.show(view, origin, name)
        return view

    def show(self, view: View, origin: str | None = None, name: str = "live") -> None:
        live.make_all(self.duck, self.store, view, name, origin)

    def entities(self, dataset: Dataset, state: RequestedState, ids: Collection[str], name: str = "live") -> View:
        """Create the table `name` of the entities that these ids name."""
        view = self.view(dataset, state, ids)
        try:
            self.show_entities(view, ids, name)
        except IncompleteEvents:
            view = self.view(dataset, state)
            self.show_entities(view, ids, name)
        return view

    def show_entities(self, view: View, ids: Collection[str], name: str = "live") -> None:
        """Do the same in a resolved view. Raises IncompleteEvents if the view lacks events on an entity."""
        live.make_entities(self.duck, self.store, view, ids, name, self.is_lookup)

    def entity(
        self, dataset: Dataset, state: RequestedState, entity_id: str, origin: str | None = None
    ) -> tuple[View, list[Statement]]:
        """Return the view, and the statements of the entities that an id names: several if an entity was split."""
        view = self.view(dataset, state, [entity_id])
        statements = live.own_statements(self.duck, self.store, view, entity_id, origin, self.is_lookup)
        if statements is None:
            view = self.entities(dataset, state, [entity_id])
            if self.is_lookup and self.duck.execute("SELECT count(*) FROM live").fetchall()[0][0] > MAX_LOOKUP_ROWS:
                raise LookupTooLarge
            rows = self.duck.execute(f"SELECT {live.COLUMNS} FROM live").fetchall()  # noqa: S608
            statements = [Statement(*row) for row in rows]
        return view, [statement for statement in statements if origin in (None, statement.origin)]

    def limit(self, seconds: float) -> None:
        """Restart the time limit, if the read runs in the query process; there is none in this process."""
        if isinstance(self.duck, DuckdbSession):
            self.duck.limit(seconds)

    def interrupt(self) -> None:
        """Interrupt the running query, from another thread."""
        self.duck.interrupt()

    def clean(self) -> None:
        for read in self._registered:
            self._active_reads.end(read)
        for path in self._spool_files:
            path.unlink(missing_ok=True)

    def _spool(self) -> Path:
        path = self._scratch / f"{new_id()}.parquet"
        self._spool_files.append(path)
        return path
