"""A play: two workers, one who keeps the dataset in shape, a client and a reader, through the real protocol."""

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
from tarn.storage.store import Missing, Store

from tests.faults.checks import check, fold_unflushed, read_recorded_state
from tests.faults.scene import SHORT_BACKOFF, Scene
from tests.pipeline.history import shown
from tests.pipeline.kernels import DirectKernels
from tests.simulation.scheduler import Actor, Scheduler, SteppedDatabase, SteppedStore

EXPECTED_PROBLEMS = (None, "locked", "snapshot-conflict")
"""What a worker may hear: another one is at it, or was faster every time."""


ROUNDS = 4
"""How often a worker looks for something to flush."""


class Failed(AssertionError):
    """A seed whose play ended badly: replays exactly with `SIM_SEED`."""

    def __init__(self, seed: int, trace: list[str], why: BaseException) -> None:
        steps = "\n".join(f"  {number:4} {step}" for number, step in enumerate(trace))
        super().__init__(
            f"seed {seed}: {type(why).__name__}: {why}\n{steps}\nAgain: SIM_SEED={seed} pytest tests/simulation"
        )


@dataclass(frozen=True)
class Stage:
    """Where plays are given: a database and a lake with one empty dataset, copied for each."""

    folder: Path
    dataset: Dataset
    pool: ProcessPoolExecutor

    @classmethod
    def build(cls, folder: Path, pool: ProcessPoolExecutor) -> "Stage":
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

    def play(self, seed: int, dangers: Mapping[str, float] | None = None) -> list[str]:
        """Play a seed, and check how it ended. Returns the trace. Raises Failed.

        `dangers` says how likely a fault is after a step of the protocol, where it is not to be drawn.
        """
        place = self.folder / "play"
        shutil.copytree(self.folder / "empty", place)
        settings = _settings(place)
        database = Database(settings.database_url)
        try:
            store = Store(Connection.from_settings(settings))
            kernels = DirectKernels(settings, self.pool)
            scene = Scene(settings, database, store, kernels, self.dataset, random.Random(seed))
            return _play(scene, seed, dangers)
        finally:
            database.close()
            shutil.rmtree(place)


def _settings(folder: Path) -> Settings:
    loaded = load_settings(
        database_url=f"sqlite:///{folder}/tarn.db", lake_uri=str(folder / "lake"), admin_key_file=folder / "admin.key"
    )
    # Time passes when the play says so, and not otherwise.
    return loaded.model_copy(update={**SHORT_BACKOFF, "lease_seconds": 3600.0, "commit_retries": 3})


def _play(scene: Scene, seed: int, dangers: Mapping[str, float] | None) -> list[str]:
    draw = scene.draw
    for _ in range(draw.randrange(2)):
        scene.write()
        scene.flush("earlier")
    scene.write()
    scheduler = Scheduler(draw, scene.expire_leases, dangers)
    # What is reverted to must be there; so it is one or the other.
    scene.reverts = draw.random() < 0.5
    actors = [
        _worker(scene, 1),
        _worker(scene, 2),
        *([_maintainer(scene)] if draw.random() < 0.7 else []),
        _client(scene, batches=draw.randrange(1, 5)),
        _reader(scene, reads=4),
    ]
    born = iter(range(3, 100))

    def reborn(dead: Actor) -> Actor:
        """Whoever dies is started again, under a new name, as a process would be."""
        number = next(born)
        return _worker(scene, number) if dead.name.startswith("worker") else _maintainer(scene, number)

    try:
        scheduler.play(actors, reborn)
        scheduler.trace.append("all have ended; the leases expire; what must hold is checked")
        scene.expire_leases()
        check(scene)
    except Exception as error:
        raise Failed(seed, scheduler.trace, error) from error
    return scheduler.trace


def _worker(scene: Scene, number: int) -> Actor:
    def work(actor: Actor) -> None:
        database, store = SteppedDatabase(scene.database, actor), SteppedStore(scene.store, actor)
        publisher = SnapshotPublisher(database, store, scene.settings, actor.name, actor.reached)
        flush = Flush(database, store, publisher, lambda: scene.kernels, actor.reached)
        rest = 0
        for _ in range(ROUNDS):
            actor.step("flushes", rest)
            done = flush.run([scene.dataset], lambda: None)[scene.dataset.id]
            problem = None if done.error is None else done.error.slug
            assert problem in EXPECTED_PROBLEMS, f"{actor.name}: {done.error!r}"
            rest = 10 if problem is None else 40

    return Actor(f"worker {number}", work, weight=5, stays=0.9)


def _maintainer(scene: Scene, number: int = 1) -> Actor:
    def maintain(actor: Actor) -> None:
        database, store = SteppedDatabase(scene.database, actor), SteppedStore(scene.store, actor)
        does = scene.maintenance(actor.name, actor.reached, database, store)
        for _ in range(3):
            actor.step("looks after the dataset", rest=20)
            with scene.database.read() as connection:
                head = recorded_head(connection, scene.dataset)
            acts: list[Callable[[], object]] = [does.compact, does.compact, does.optimize]
            if scene.reverts and head.seq:
                acts.append(partial(does.revert, scene.draw.randrange(1, head.seq + 1)))
            elif not scene.reverts:
                acts.append(does.vacuum)
            try:
                scene.draw.choice(acts)()
            except TarnError as error:
                if error.slug not in EXPECTED_PROBLEMS:
                    raise

    return Actor(f"maintainer {number}", maintain, weight=4, stays=0.9)


def _client(scene: Scene, batches: int) -> Actor:
    def write(actor: Actor) -> None:
        for _ in range(batches):
            actor.step("writes")
            scene.write()

    return Actor("client", write)


def _reader(scene: Scene, reads: int) -> Actor:
    def read(actor: Actor) -> None:
        for _ in range(reads):
            actor.step("looks")
            with scene.database.read() as connection:
                head, unflushed = read_recorded_state(connection, scene.dataset)
            expected = shown(scene.expected().live)
            actor.step("reads the files")
            try:
                found = shown(fold_unflushed(scene.store, scene.dataset, head, unflushed))
            except (ManifestInvalid, Missing):
                # An API process says what it reads, and then it stays: tests/faults/test_vacuum.py.
                assert not scene.reverts
                continue
            assert found == expected, "a reader saw something else than what had been acknowledged"

    return Actor("reader", read)
