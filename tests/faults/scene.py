"""A dataset with workers and clients in this process: what fault cases are played on."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from sqlalchemy import Connection, update
from tarn.access.audit import AuditedAction
from tarn.datasets import registry
from tarn.datasets.head import recorded_head
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import leases
from tarn.errors import Locked, TarnError
from tarn.integrity.vacuum import Vacuum
from tarn.journal import batches
from tarn.journal.batches import Batch, BatchWithEvents
from tarn.lake import snapshots
from tarn.lake.commit import SnapshotPublisher, StepCallback
from tarn.model.dataset import NewDataset
from tarn.model.flush import FlushOutcome
from tarn.model.ids import now
from tarn.model.job import (
    CompactOptions,
    CompactResult,
    OptimizeOptions,
    OptimizeResult,
    Progress,
    RevertOptions,
    RevertResult,
    VacuumOptions,
    VacuumResult,
)
from tarn.model.snapshot import Snapshot, SnapshotOperation
from tarn.model.statement import statement_id
from tarn.model.tenant import ADMIN
from tarn.pipeline.jobs.compact import Compact
from tarn.pipeline.jobs.flush import Flush, Kernels
from tarn.pipeline.jobs.optimize import Optimize
from tarn.pipeline.jobs.revert import Revert
from tarn.pipeline.jobs.rewrite import Rewriter
from tarn.settings import Settings
from tarn.storage.fault_injection import Gate
from tarn.storage.store import Store

from tests.pipeline.history import Expected
from tests.pipeline.test_fold import as_events, drawn

BEFORE_MANIFEST = ("closed", "built", "leased", "leveled", "statements committed", "translog committed")
AFTER_MANIFEST = ("manifest put", "recorded", "released", "purged")
STEPS = (*BEFORE_MANIFEST, *AFTER_MANIFEST)

T = TypeVar("T")

SHORT_BACKOFF = {"commit_backoff_base": 0.0001, "commit_backoff_cap": 0.001}
"""Nobody need wait for anybody here."""

Event = dict[str, Any]


class Killed(BaseException):
    """The process dies here. No Exception: nothing may tidy up after it."""


def kill_at(step: str) -> StepCallback:
    def reached(name: str) -> None:
        if name == step:
            raise Killed(name)

    return reached


def pause_at(step: str, gate: Gate) -> StepCallback:
    """Stand still at a step, the first time it is reached, until the gate is opened."""
    first = iter([gate.hold])

    def reached(name: str) -> None:
        if name == step:
            next(first, lambda: None)()

    return reached


@dataclass
class Scene:
    """One dataset, those who write to it, and what they were told is durable."""

    settings: Settings
    database: Database
    store: Store
    kernels: Kernels
    dataset: Dataset
    draw: random.Random
    acknowledged: dict[int, list[Event]] = field(default_factory=dict)
    """What was acknowledged, by commit number."""
    reverts: bool = False
    """Whether somebody may revert: then history says what is left of it."""

    @classmethod
    def make(
        cls, settings: Settings, database: Database, store: Store, kernels: Kernels, seed: int, name: str = "test"
    ) -> "Scene":
        config, _ = registry.create(database, store, NewDataset.model_validate({"name": name}), _act())
        quick = settings.model_copy(update=SHORT_BACKOFF)
        return cls(quick, database, store, kernels, Dataset(config.id, config.name), random.Random(seed))

    # Clients

    def write(self, *events: Event) -> int:
        """Commit a batch: these events, or a few that are drawn."""
        with self.database.write() as connection:
            return self.write_in(connection, *events)

    def write_in(self, connection: Connection, *events: Event) -> int:
        """Commit a batch in a transaction of the caller's."""
        batch = list(events) or self.random_events()
        sized = BatchWithEvents(Batch(self.dataset, ADMIN, _act()), as_events(batch))
        (outcome,) = batches.write_small(connection, self.settings, [sized])
        commit: int = outcome.answer["commit"]
        self.acknowledged[commit] = batch
        return commit

    def with_history(self, earlier: int) -> None:
        """Some snapshots, then something to flush. Each adds to both tables, whatever else it does."""
        for number in range(earlier):
            self.write(self.new_statement(f"earlier {number}"), *self.random_events())
            self.flush("earlier")
        self.write(*self.random_events())
        self.write(self.new_statement("new"))

    def random_events(self) -> list[Event]:
        """A few events, of few entities, so that they meet."""
        return [drawn(self.draw) for _ in range(self.draw.randrange(1, 5))]

    def new_statement(self, entity: str) -> Event:
        """A statement of an entity that nobody has heard of."""
        fact = {"kind": 1, "entity_id": entity, "origin": "crawl", "prop": "name", "value": entity}
        return drawn(self.draw) | fact | {"id": statement_id(self.dataset.name, entity, "name", entity)}

    def expected(self) -> Expected:
        """What everybody must see."""
        expected, flushed = self._kept() if self.reverts else (Expected(), set[int]())
        for commit in sorted(self.acknowledged.keys() - flushed):
            expected.commit(self.acknowledged[commit])
        return expected

    def _kept(self) -> tuple[Expected, set[int]]:
        """What history leaves of all that is in it, by what each snapshot says that it is; and what is in it."""
        with self.database.read() as connection:
            head = recorded_head(connection, self.dataset)
        states: dict[int, Expected] = {0: Expected()}
        flushed: set[int] = set()
        for snapshot in snapshots.since(self.store, self.dataset, 0, head.seq):
            states[snapshot.seq] = Expected(dict(states[snapshot.seq - 1].live))
            for batch in sorted(snapshot.batches, key=lambda batch: batch.commit):
                states[snapshot.seq].commit(self.acknowledged[batch.commit])
                flushed.add(batch.commit)
            if snapshot.operation is SnapshotOperation.REVERT:
                states[snapshot.seq] = Expected(dict(states[int(str(snapshot.message).removeprefix("to "))].live))
        return states[head.seq], flushed

    # Workers

    def worker(
        self,
        owner: str,
        reached: StepCallback = lambda _: None,
        store: Store | None = None,
        kernels: Kernels | None = None,
        **changes: Any,
    ) -> Callable[[], FlushOutcome]:
        """A worker of its own name: call it to flush the dataset."""
        settings = self.settings.model_copy(update=changes)
        publisher = SnapshotPublisher(self.database, store or self.store, settings, owner, reached)
        running = kernels or self.kernels
        flush = Flush(self.database, store or self.store, publisher, lambda: running, reached)
        return lambda: flush.run([self.dataset], lambda: None)[self.dataset.id]

    def maintenance(
        self,
        owner: str,
        reached: StepCallback = lambda _: None,
        database: Database | None = None,
        store: Store | None = None,
    ) -> "MaintenanceJobs":
        """Somebody of its own name who keeps the dataset in shape."""
        database, store = database or self.database, store or self.store
        publisher = SnapshotPublisher(database, store, self.settings, owner, reached)
        rewriting = Rewriter(database, store, publisher, lambda: self.kernels, reached)
        flush = Flush(database, store, publisher, lambda: self.kernels, reached)
        vacuum = Vacuum(database, store, self.settings, publisher, reached)
        return MaintenanceJobs(
            compact=lambda force=True: Compact(rewriting).run(self.dataset, CompactOptions(force=force), _ignored),
            optimize=lambda: Optimize(rewriting).run(self.dataset, OptimizeOptions(), _ignored),
            revert=lambda to: Revert(database, rewriting, flush).run(
                self.dataset, RevertOptions(to=str(to), message=f"to {to}"), _ignored
            ),
            vacuum=lambda: vacuum.run(self.dataset, VacuumOptions(retention_hours=0, override_floor=True), _ignored),
        )

    def publisher(
        self, owner: str = "by hand", reached: StepCallback = lambda _: None, **changes: Any
    ) -> SnapshotPublisher:
        return SnapshotPublisher(self.database, self.store, self.settings.model_copy(update=changes), owner, reached)

    def flush(self, owner: str = "another") -> list[Snapshot]:
        """Flush without a fault."""
        done = self.worker(owner)()
        if done.error is not None:
            raise done.error
        return done.snapshots

    def expire_leases(self) -> None:
        """Let the time pass that a lease lasts."""
        with self.database.write() as connection:
            past = now() - timedelta(seconds=1)
            connection.execute(update(leases).where(leases.c.expires > past).values(expires=past))


@dataclass(frozen=True)
class MaintenanceJobs:
    """What can be done to keep a dataset in shape, each to be called."""

    compact: Callable[..., CompactResult]
    optimize: Callable[[], OptimizeResult]
    revert: Callable[[int], RevertResult]
    vacuum: Callable[[], VacuumResult]


def _ignored(_: Progress | None) -> None:
    """Nobody asks how far it is."""


def run_concurrently(*acts: Callable[[], Any]) -> list[Any]:
    """Do things at once, each in a thread, from one moment on; what they return."""
    begin = threading.Barrier(len(acts))

    def act(one: Callable[[], Any]) -> Any:
        begin.wait(30)
        return one()

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(act, acts))


def retrying_while_locked(act: Callable[[], T]) -> Callable[[], T]:
    """To do something, and to begin again while somebody else holds the dataset, as a worker does with a job."""

    def patient() -> T:
        while True:
            with suppress(Locked):
                return act()

    return patient


@contextmanager
def in_background(act: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Do something beside the block; after it, what is given here returns its result."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(act)
        yield lambda: future.result(60)
        future.exception(60)


def error_slug(error: TarnError | None) -> str | None:
    return None if error is None else error.slug


def _act() -> AuditedAction:
    return AuditedAction(None, "add_statements", "test", "r")
