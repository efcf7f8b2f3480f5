"""A dataset with a history: written and flushed step by step, with the expected content of each snapshot."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from tarn.access.audit import AuditedAction
from tarn.datasets.registry import Dataset
from tarn.journal.batches import Batch
from tarn.lake import snapshots
from tarn.lake.commit import SnapshotPublisher
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.tenant import ADMIN
from tarn.model.work.job import CompactOptions, CompactResult, OptimizeOptions, OptimizeResult, Progress
from tarn.pipeline.jobs.compact import Compact as Compaction
from tarn.pipeline.jobs.flush import Flush as Flushing
from tarn.pipeline.jobs.flush import TaskRunner
from tarn.pipeline.jobs.optimize import Optimize
from tarn.pipeline.jobs.rewrite import Rewriter

from tests.in_process_api import InProcessApi
from tests.lake.manifests import dataset_of
from tests.pipeline.history import Expected
from tests.pipeline.test_fold import as_events
from tests.query.model import Compact, Event, Flush, Model, Move, Pack, Step, moved, under

FORCED = CompactOptions(force=True)

_numbers = count()


@dataclass
class HistoryPlayer:
    """Plays the history of one dataset: applies each step to the lake and to the model."""

    api: InProcessApi
    kernels: TaskRunner
    dataset: Dataset
    expected: Expected = field(default_factory=Expected)
    past: list[tuple[Snapshot, Model]] = field(default_factory=list)
    """Every snapshot with its expected content."""

    @classmethod
    def begin(cls, api: InProcessApi, kernels: TaskRunner) -> "HistoryPlayer":
        name = f"test{next(_numbers)}"
        api.dataset(name)
        return cls(api, kernels, dataset_of(api.services.database, name))

    @property
    def model(self) -> Model:
        """Return the expected state, including unflushed events."""
        return Model.of(self.dataset.name, self.expected)

    @property
    def head(self) -> Model:
        """Return the expected state without unflushed events."""
        return self.past[-1][1] if self.past else Model()

    def play(self, steps: list[Step]) -> Iterator[Step]:
        """Apply steps, and yield after each."""
        for step in steps:
            match step:
                case Flush():
                    self.flush()
                case Compact():
                    self.rewrite(lambda rewriting: Compaction(rewriting).run(self.dataset, FORCED, _ignored))
                case Pack():
                    self.rewrite(lambda rewriting: Optimize(rewriting).run(self.dataset, OptimizeOptions(), _ignored))
                case Move(entity, canonical, moment):
                    own = [row for row in self.model.rows if row.entity_id == entity]
                    self.commit(*moved(own, canonical, moment))
                case _:
                    self.commit(*step)
            yield step

    def commit(self, *events: Event) -> None:
        """Write a batch."""
        batch = self.expect(events)
        act = AuditedAction(None, "add_statements", self.dataset.name, "r")
        self.api.services.writer.submit(Batch(self.dataset, ADMIN, act), as_events(batch)).result(30)

    def expect(self, events: Iterable[Event]) -> list[Event]:
        """Apply a batch to the model; return the events with the ids that they have in this dataset."""
        batch = [under(self.dataset.name, event) for event in events]
        self.expected.commit(batch)
        return batch

    def flush(self) -> list[Snapshot]:
        """Flush unflushed events into a snapshot, if there are any."""
        services = self.api.services
        publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
        flushing = Flushing(services.database, services.store, publisher, lambda: self.kernels)
        done = flushing.run([self.dataset], lambda: None)[self.dataset.id]
        assert done.error is None, done.error
        self.past += [(snapshot, self.model) for snapshot in done.snapshots]
        return done.snapshots

    def rewrite(self, act: Callable[[Rewriter], CompactResult | OptimizeResult]) -> None:
        """Rewrite the head's rows into other files; the new snapshot has the same content."""
        services = self.api.services
        publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
        snapshot = act(Rewriter(services.database, services.store, publisher, lambda: self.kernels)).snapshot
        if snapshot is not None:
            self.past.append((snapshots.read(services.store, self.dataset, snapshot.seq), self.head))


def _ignored(_: Progress | None) -> None:
    """Ignore progress reports."""
