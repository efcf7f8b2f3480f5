"""A simulation of the real commit protocol with two workers, a maintainer, a client and a reader."""

import random
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tarn.access.bootstrap import ensure_admin
from tarn.datasets.head import recorded_head
from tarn.datasets.registry import Dataset
from tarn.db import migrate
from tarn.db.engine import Database
from tarn.errors import ManifestInvalid, TarnError
from tarn.lake.commit import SnapshotPublisher
from tarn.pipeline.jobs.flush import Flush
from tarn.settings import Settings, load_settings
from tarn.storage.connection import Connection
from tarn.storage.lake_root import open_lake
from tarn.storage.store import ObjectMissing, Store

from tests.faults.checks import check, fold_unflushed, read_recorded_state
from tests.faults.scene import SHORT_BACKOFF, Scene
from tests.pipeline.history import shown
from tests.pipeline.kernels import DirectKernels
from tests.simulation.scheduler import Actor, Scheduler, SteppedDatabase, SteppedStore

EXPECTED_PROBLEMS = (None, "locked", "snapshot-conflict")
"""Problems that a worker may get: another worker holds the lease, or won the race every time."""

ROUNDS = 4
"""How often each worker flushes."""


class SimulationFailed(AssertionError):
    """A seed whose simulation broke an invariant. `SIM_SEED` repeats it step by step."""

    def __init__(self, seed: int, trace: list[str], cause: BaseException) -> None:
        steps = "\n".join(f"  {number:4} {step}" for number, step in enumerate(trace))
        super().__init__(
            f"seed {seed}: {type(cause).__name__}: {cause}\n{steps}\nRepeat: SIM_SEED={seed} pytest tests/simulation"
        )


@dataclass(frozen=True)
class Simulation:
    """A database and a lake with one empty dataset, which are copied for each seed."""

    folder: Path
    dataset: Dataset
    pool: ProcessPoolExecutor

    @classmethod
    def build(cls, folder: Path, pool: ProcessPoolExecutor) -> "Simulation":
        empty = folder / "empty"
        settings = _settings(empty)
        database = Database(settings.database_url)
        migrate.upgrade(database)
        ensure_admin(database, settings)
        store = Store(Connection.from_settings(settings))
        open_lake(store)
        scene = Scene.make(settings, database, store, DirectKernels(settings, pool), seed=0)
        database.close()
        return cls(folder, scene.dataset, pool)

    def run(self, seed: int, fault_rates: Mapping[str, float] | None = None) -> list[str]:
        """Run a seed, check the invariants at its end, and return the trace. Raises SimulationFailed.

        `fault_rates` replaces the random probabilities of a fault after each step of the protocol.
        """
        folder = self.folder / "run"
        shutil.copytree(self.folder / "empty", folder)
        settings = _settings(folder)
        database = Database(settings.database_url)
        try:
            store = Store(Connection.from_settings(settings))
            kernels = DirectKernels(settings, self.pool)
            scene = Scene(settings, database, store, kernels, self.dataset, random.Random(seed))
            return _run(scene, seed, fault_rates)
        finally:
            database.close()
            shutil.rmtree(folder)


def _settings(folder: Path) -> Settings:
    loaded = load_settings(
        database_url=f"sqlite:///{folder}/tarn.db", lake_uri=str(folder / "lake"), admin_key_file=folder / "admin.key"
    )
    # Leases expire only when the scheduler expires them.
    return loaded.model_copy(update={**SHORT_BACKOFF, "lease_seconds": 3600.0, "commit_retries": 3})


def _run(scene: Scene, seed: int, fault_rates: Mapping[str, float] | None) -> list[str]:
    draw = scene.draw
    for _ in range(draw.randrange(2)):
        scene.write()
        scene.flush("earlier")
    scene.write()
    scheduler = Scheduler(draw, scene.expire_leases, fault_rates)
    # A revert needs a snapshot that a vacuum could expire, so a simulation has either reverts or vacuums.
    scene.reverts = draw.random() < 0.5
    actors = [
        _worker(scene, 1),
        _worker(scene, 2),
        *([_maintainer(scene)] if draw.random() < 0.7 else []),
        _client(scene, batches=draw.randrange(1, 5)),
        _reader(scene, reads=4),
    ]
    numbers = iter(range(3, 100))

    def restart(dead: Actor) -> Actor:
        """Return an actor that replaces a killed one, with a new name, as a restarted process has."""
        number = next(numbers)
        return _worker(scene, number) if dead.name.startswith("worker") else _maintainer(scene, number)

    try:
        scheduler.run(actors, restart)
        scheduler.trace.append("all actors have ended: expire the leases and check the invariants")
        scene.expire_leases()
        check(scene)
    except Exception as error:
        raise SimulationFailed(seed, scheduler.trace, error) from error
    return scheduler.trace


def _worker(scene: Scene, number: int) -> Actor:
    def work(actor: Actor) -> None:
        database, store = SteppedDatabase(scene.database, actor), SteppedStore(scene.store, actor)
        publisher = SnapshotPublisher(database, store, scene.settings, actor.name, actor.reached)
        flush = Flush(database, store, publisher, lambda: scene.kernels, actor.reached)
        rest = 0
        for _ in range(ROUNDS):
            actor.step("flush", rest)
            done = flush.run([scene.dataset], lambda: None)[scene.dataset.id]
            problem = None if done.error is None else done.error.slug
            assert problem in EXPECTED_PROBLEMS, f"{actor.name}: {done.error!r}"
            rest = 10 if problem is None else 40

    return Actor(f"worker {number}", work, weight=5, stickiness=0.9)


def _maintainer(scene: Scene, number: int = 1) -> Actor:
    def maintain(actor: Actor) -> None:
        database, store = SteppedDatabase(scene.database, actor), SteppedStore(scene.store, actor)
        maintenance = scene.maintenance(actor.name, actor.reached, database, store)
        for _ in range(3):
            actor.step("maintain the dataset", rest=20)
            with scene.database.read() as connection:
                head = recorded_head(connection, scene.dataset)
            operations: list[Callable[[], object]] = [
                maintenance.compact,
                maintenance.compact,
                maintenance.optimize,
            ]
            if scene.reverts and head.seq:
                operations.append(partial(maintenance.revert, scene.draw.randrange(1, head.seq + 1)))
            elif not scene.reverts:
                operations.append(maintenance.vacuum)
            try:
                scene.draw.choice(operations)()
            except TarnError as error:
                if error.slug not in EXPECTED_PROBLEMS:
                    raise

    return Actor(f"maintainer {number}", maintain, weight=4, stickiness=0.9)


def _client(scene: Scene, batches: int) -> Actor:
    def write(actor: Actor) -> None:
        for _ in range(batches):
            actor.step("write")
            scene.write()

    return Actor("client", write)


def _reader(scene: Scene, reads: int) -> Actor:
    def read(actor: Actor) -> None:
        for _ in range(reads):
            actor.step("read the recorded state")
            with scene.database.read() as connection:
                head, unflushed = read_recorded_state(connection, scene.dataset)
            expected = shown(scene.expected().live)
            actor.step("read the files")
            try:
                actual = shown(fold_unflushed(scene.store, scene.dataset, head, unflushed))
            except (ManifestInvalid, ObjectMissing):
                # This reader sends no heartbeat, so a vacuum may delete its files.
                assert not scene.reverts
                continue
            assert actual == expected, "a read differs from the acknowledged writes"

    return Actor("reader", read)
