"""A dataset with workers and clients in this process, for fault tests."""

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
from tarn.model.datasets.dataset import NewDataset
from tarn.model.datasets.flush import FlushOutcome
from tarn.model.datasets.snapshot import Snapshot, SnapshotOperation
from tarn.model.ftm.statement import statement_id
from tarn.model.ids import now
from tarn.model.tenant import ADMIN
from tarn.model.work.job import (
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
from tarn.pipeline.jobs.compact import Compact
from tarn.pipeline.jobs.flush import Flush, TaskRunner
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
"""Settings that keep retries fast."""

Event = dict[str, Any]


class Killed(BaseException):
    """A simulated kill of the process. Not an Exception, so that no handler of the tested code cleans up after it."""


def kill_at(step: str) -> StepCallback:
    """Return a callback that raises Killed at a step."""

    def reached(name: str) -> None:
        if name == step:
            raise Killed(name)

    return reached


def pause_at(step: str, gate: Gate) -> StepCallback:
    """Return a callback that waits at a step, the first time it is reached, until the gate is released."""
    first = iter([gate.hold])

    def reached(name: str) -> None:
        if name == step:
            next(first, lambda: None)()

    return reached


@dataclass
class Scene:
    """One dataset, its workers and clients, and the writes that were acknowledged."""

    settings: Settings
    database: Database
    store: Store
    kernels: TaskRunner
    dataset: Dataset
    draw: random.Random
    acknowledged: dict[int, list[Event]] = field(default_factory=dict)
    """The acknowledged events, by commit number."""
    reverts: bool = False
    """Whether the test may revert the dataset, so that the expected rows depend on the history."""

    @classmethod
    def make(
        cls, settings: Settings, database: Database, store: Store, kernels: TaskRunner, seed: int, name: str = "test"
    ) -> "Scene":
        config, _ = registry.create(database, store, NewDataset.model_validate({"name": name}), _act())
        quick = settings.model_copy(update=SHORT_BACKOFF)
        return cls(quick, database, store, kernels, Dataset(config.id, config.name), random.Random(seed))

    # Clients

    def write(self, *events: Event) -> int:
        """Commit a batch of these events, or of a few random ones; return its commit number."""
        with self.database.write() as connection:
            return self.write_in(connection, *events)

    def write_in(self, connection: Connection, *events: Event) -> int:
        """Commit a batch in the caller's transaction."""
        batch = list(events) or self.random_events()
        sized = BatchWithEvents(Batch(self.dataset, ADMIN, _act()), as_events(batch))
        (result,) = batches.write_small(connection, self.settings, [sized])
        commit: int = result.answer["commit"]
        self.acknowledged[commit] = batch
        return commit

    def with_history(self, earlier: int) -> None:
        """Make some snapshots, each of which adds to both tables, and then write something to flush."""
        for number in range(earlier):
            self.write(self.new_statement(f"earlier {number}"), *self.random_events())
            self.flush("earlier")
        self.write(*self.random_events())
        self.write(self.new_statement("new"))

    def random_events(self) -> list[Event]:
        """Return a few random events of a small set of entities, so that they affect each other."""
        return [drawn(self.draw) for _ in range(self.draw.randrange(1, 5))]

    def new_statement(self, entity: str) -> Event:
        """Return an event that adds a statement of a new entity."""
        fact = {"kind": 1, "entity_id": entity, "origin": "crawl", "prop": "name", "value": entity}
        return drawn(self.draw) | fact | {"id": statement_id(self.dataset.name, entity, "name", entity)}

    def expected(self) -> Expected:
        """Return the rows that every reader must see."""
        expected, flushed = self._recorded() if self.reverts else (Expected(), set[int]())
        for commit in sorted(self.acknowledged.keys() - flushed):
            expected.commit(self.acknowledged[commit])
        return expected

    def _recorded(self) -> tuple[Expected, set[int]]:
        """Return the rows expected from the snapshots, with reverts applied, and the commits that they contain."""
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
        kernels: TaskRunner | None = None,
        **changes: Any,
    ) -> Callable[[], FlushOutcome]:
        """Return a function that flushes the dataset as a worker with this id."""
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
        """Return the maintenance jobs of the dataset, run as a worker with this id."""
        database, store = database or self.database, store or self.store
        publisher = SnapshotPublisher(database, store, self.settings, owner, reached)
        rewriter = Rewriter(database, store, publisher, lambda: self.kernels, reached)
        flush = Flush(database, store, publisher, lambda: self.kernels, reached)
        vacuum = Vacuum(database, store, self.settings, publisher, reached)
        return MaintenanceJobs(
            compact=lambda force=True: Compact(rewriter).run(
                self.dataset, CompactOptions(force=force), _ignore_progress
            ),
            optimize=lambda: Optimize(rewriter).run(self.dataset, OptimizeOptions(), _ignore_progress),
            revert=lambda to: Revert(database, rewriter, flush).run(
                self.dataset, RevertOptions(to=str(to), message=f"to {to}"), _ignore_progress
            ),
            vacuum=lambda: vacuum.run(
                self.dataset, VacuumOptions(retention_hours=0, override_floor=True), _ignore_progress
            ),
        )

    def publisher(
        self, owner: str = "manual", reached: StepCallback = lambda _: None, **changes: Any
    ) -> SnapshotPublisher:
        return SnapshotPublisher(self.database, self.store, self.settings.model_copy(update=changes), owner, reached)

    def flush(self, owner: str = "another") -> list[Snapshot]:
        """Flush without a fault; return the snapshots."""
        done = self.worker(owner)()
        if done.error is not None:
            raise done.error
        return done.snapshots

    def expire_leases(self) -> None:
        """Expire all leases now."""
        with self.database.write() as connection:
            past = now() - timedelta(seconds=1)
            connection.execute(update(leases).where(leases.c.expires > past).values(expires=past))


@dataclass(frozen=True)
class MaintenanceJobs:
    """The maintenance jobs of a dataset, as functions."""

    compact: Callable[..., CompactResult]
    optimize: Callable[[], OptimizeResult]
    revert: Callable[[int], RevertResult]
    vacuum: Callable[[], VacuumResult]


def _ignore_progress(_: Progress | None) -> None:
    """Ignore progress reports."""


def run_concurrently(*functions: Callable[[], Any]) -> list[Any]:
    """Call each function in a thread, all from the same moment; return their results."""
    begin = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        begin.wait(30)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))


def retrying_while_locked(function: Callable[[], T]) -> Callable[[], T]:
    """Return a function that retries while another worker holds the dataset's lease, as a worker does with a job."""

    def retrying() -> T:
        while True:
            with suppress(Locked):
                return function()

    return retrying


@contextmanager
def in_background(function: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Call a function in a thread during the block; yield a function that waits for its result."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(function)
        yield lambda: future.result(60)
        future.exception(60)


def error_slug(error: TarnError | None) -> str | None:
    """Return the slug of an error, or None without one."""
    return None if error is None else error.slug


def _act() -> AuditedAction:
    return AuditedAction(None, "add_statements", "test", "r")
