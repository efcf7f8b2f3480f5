"""One read: a connection to DuckDB, and the states of datasets that were resolved for it."""

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
from tarn.query.active_reads import ActiveRead, ActiveReads
from tarn.query.duckdb_process import DuckdbSession
from tarn.query.engine import Engine, IsolatedEngine, ProcessEngine, answering
from tarn.query.live import MAX_LOOKUP_ROWS, IncompleteEvents, LookupTooLarge
from tarn.query.tenant_isolation import IsolatedTenants
from tarn.query.views import View, Views
from tarn.settings import Settings
from tarn.storage.store import Store
from tarn.telemetry import Telemetry


class RequestedState(NamedTuple):
    """Which state of a dataset is asked for: the present one, the head without what is unflushed, or a snapshot."""

    at: str | None = None
    fresh: Literal["overlay", "snapshot"] = "overlay"


NOW = RequestedState()


class Reader:
    """Reads of one process. Safe to share between threads; each read has a session of its own."""

    def __init__(self, settings: Settings, database: Database, store: Store, watch: Telemetry | None = None) -> None:
        self._watch = watch or Telemetry()
        self._near = Engine(settings, store.connection)
        self._near.warm_up()
        self._apart = ProcessEngine(settings, store.connection)
        self._confined = IsolatedEngine(settings, store.connection)
        self._confinement = IsolatedTenants()
        self._seconds = settings.query_seconds
        self._views = Views(database, store, settings.overlay_rows)
        self._store = store
        self.running = ActiveReads()

    def reading(self, tenant: str = "", seconds: float | None = None) -> AbstractContextManager["Reading"]:
        """Begin a read for a tenant, with a time limit. What it made ends with it. DuckDB's errors are ours.

        A query that must be killed ends those of others that run in the same process. After one, the queries of its
        tenant run in another process for a while.
        """
        return self._begun(lambda: self._engine_of(tenant), tenant, self._seconds if seconds is None else seconds)

    def looking(self) -> AbstractContextManager["Reading"]:
        """The same for what is over in a moment: it costs no more than a thread's time.

        It runs in this process, which cannot be killed: for work only that stops when it is interrupted. Whoever begins
        it sees to that.
        """
        return self._begun(lambda: self._near, "", self._seconds)

    def is_confined(self, tenant: str) -> bool:
        """Whether a query of this tenant had to be killed a short time ago."""
        return tenant in self._confinement

    def warm_up(self) -> None:
        """Have ready what the first query would wait for; if that cannot be, it is tried again then."""
        with suppress(Unavailable):
            self._apart.warm_up()

    def share(self, shared: bool) -> None:
        """Say whether tenants are beside each other: then queries leave a part of the processors to what is brief."""
        self._apart.share(shared)
        self._confined.share(shared)

    def _engine_of(self, tenant: str) -> Engine:
        return self._confined if self.is_confined(tenant) else self._apart

    @contextmanager
    def _begun(self, choose: Callable[[], Engine], tenant: str, seconds: float) -> Iterator["Reading"]:
        # Chosen when the read begins: it may have waited for a slot while another of its tenant was killed.
        engine, watch = choose(), self._watch
        with watch.timed(watch.queries, "query"), answering(), engine.session() as duck:
            reading = Reading(duck, self._views, self._store, engine.scratch, self.running, brief=engine is self._near)
            reading.limit(seconds)
            if isinstance(duck, DuckdbSession):
                duck.on_kill = lambda: self._confinement.add(tenant)
            try:
                yield reading
            except (duckdb.Error, QueryTimeout):
                watch.queries_failed.inc()
                raise
            finally:
                reading.clean()

    def close(self) -> None:
        self._near.close()
        self._apart.close()
        self._confined.close()


class Reading:
    """A read under way, on one thread at a time. Another thread may interrupt it."""

    def __init__(
        self,
        duck: duckdb.DuckDBPyConnection,
        views: Views,
        store: Store,
        scratch: Path,
        running: ActiveReads,
        brief: bool = False,
    ) -> None:
        self.duck = duck
        self.brief = brief
        """Whether it is a lookup, which raises NotBrief if it concerns too much."""
        self._views = views
        self.store = store
        self._scratch = scratch
        self._running = running
        self._holds: list[ActiveRead] = []
        self._spooled: list[Path] = []

    def view(self, dataset: Dataset, state: RequestedState, entities: Collection[str] | None = None) -> View:
        """Resolve a state once. With `entities`, it may be good for these alone. Its files stay until the read ends."""
        hold = self._running.begin(dataset.id)
        self._holds.append(hold)
        view = self._resolved(dataset, state, entities)
        if view.snapshot is not None:
            hold.seq = view.snapshot.seq
        return view

    def _resolved(self, dataset: Dataset, state: RequestedState, entities: Collection[str] | None) -> View:
        if state.at is not None:
            return self._views.at(dataset, state.at)
        if state.fresh == "snapshot":
            return self._views.head(dataset)
        return self._views.now(dataset, self._spool, None if entities is None else frozenset(entities))

    def everything(
        self, dataset: Dataset, state: RequestedState, origin: str | None = None, name: str = "live"
    ) -> View:
        """Make `live` a view of every live statement: of every origin, or at least of one."""
        view = self.view(dataset, state)
        self.show(view, origin, name)
        return view

    def show(self, view: View, origin: str | None = None, name: str = "live") -> None:
        live.make_all(self.duck, self.store, view, name, origin)

    def entities(self, dataset: Dataset, state: RequestedState, ids: Collection[str], name: str = "live") -> View:
        """Make `live` a table of the entities that these ids name."""
        view = self.view(dataset, state, ids)
        try:
            self.show_entities(view, ids, name)
        except IncompleteEvents:
            view = self.view(dataset, state)
            self.show_entities(view, ids, name)
        return view

    def show_entities(self, view: View, ids: Collection[str], name: str = "live") -> None:
        """The same in a state that was resolved before. Raises NotWhole if it is good for fewer entities."""
        live.make_entities(self.duck, self.store, view, ids, name, self.brief)

    def entity(
        self, dataset: Dataset, state: RequestedState, entity_id: str, origin: str | None = None
    ) -> tuple[View, list[Statement]]:
        """The view, and the statements of the entities that an id names; there is more than one if it was divided."""
        view = self.view(dataset, state, [entity_id])
        found = live.own_statements(self.duck, self.store, view, entity_id, origin, self.brief)
        if found is None:
            view = self.entities(dataset, state, [entity_id])
            if self.brief and self.duck.execute("SELECT count(*) FROM live").fetchall()[0][0] > MAX_LOOKUP_ROWS:
                raise LookupTooLarge
            found = [Statement(*row) for row in self.duck.execute(f"SELECT {live.COLUMNS} FROM live").fetchall()]  # noqa: S608
        return view, [one for one in found if origin in (None, one.origin)]

    def limit(self, seconds: float) -> None:
        """Start the time limit of what follows anew, if the read has a process of its own to enforce it."""
        if isinstance(self.duck, DuckdbSession):
            self.duck.limit(seconds)

    def interrupt(self) -> None:
        """End the query that is running now, from another thread."""
        self.duck.interrupt()

    def clean(self) -> None:
        for hold in self._holds:
            self._running.end(hold)
        for path in self._spooled:
            path.unlink(missing_ok=True)

    def _spool(self) -> Path:
        path = self._scratch / f"{new_id()}.parquet"
        self._spooled.append(path)
        return path
