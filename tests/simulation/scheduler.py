"""A deterministic scheduler: it runs one actor at a time, in an order that depends only on the seed."""

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from sqlalchemy import Connection
from tarn.db.engine import Database
from tarn.storage.fault_injection import TIMEOUT_SECONDS, FaultyStore
from tarn.storage.store import Store

from tests.faults.scene import Killed

MAX_STEPS = 4000
"""Far more than any simulation needs: one that takes more does not end."""

FAULT_RATES = {
    "closed": 0.02,
    "built": 0.02,
    "leased": 0.04,
    "leveled": 0.08,
    "statements committed": 0.1,
    "translog committed": 0.2,
    "manifest put": 0.3,
    "recorded": 0.05,
    "released": 0.02,
    "purged": 0.01,
}
"""The probability of a fault, by the last step of the protocol that was reached."""


@dataclass
class Actor:
    """A thread that runs from one step to the next when the scheduler lets it."""

    name: str
    act: Callable[["Actor"], None]
    weight: float = 1
    stickiness: float = 0
    """The probability that it is scheduled again. Most defects need a long run of one worker and a pause of another."""
    current_step: str = "begin"
    protocol_step: str = ""
    """The last step of the protocol that it reached."""
    rest: int = 0
    ended: bool = False
    killed: bool = False
    asleep_until: int = 0
    error: BaseException | None = None
    _resume: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _stopped: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def step(self, name: str, rest: int = 0) -> None:
        """Wait until the scheduler resumes this actor, after `rest` other steps. Raises Killed if it is killed here."""
        if self.killed:
            raise Killed(name)
        self.current_step, self.rest = name, rest
        self._stopped.release()
        self._resume.acquire()
        if self.killed:
            raise Killed(name)

    def reached(self, step: str) -> None:
        """Record a step of the protocol, and wait."""
        self.protocol_step = step
        self.step(f"reached: {step}")

    def resume(self) -> None:
        """Let the actor run to its next step or its end."""
        self._resume.release()
        if not self._stopped.acquire(timeout=TIMEOUT_SECONDS):
            raise TimeoutError(f"{self.name} reached no step after {self.current_step!r}")

    def kill(self) -> None:
        self.killed = True
        self._resume.release()
        self._thread.join(TIMEOUT_SECONDS)

    def _run(self) -> None:
        self._resume.acquire()
        try:
            if not self.killed:
                self.act(self)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - the scheduler raises it
            self.error = error
        self.ended = True
        self._stopped.release()


class Scheduler:
    """Runs actors one step at a time and injects faults. `trace` lists the steps and faults in order.

    Faults are rare outside a commit, frequent within it and most frequent around the manifest. In some runs they occur
    after two random steps only.
    """

    def __init__(
        self, draw: random.Random, expire_leases: Callable[[], None], fault_rates: Mapping[str, float] | None = None
    ) -> None:
        self.trace: list[str] = []
        self._draw = draw
        self._expire_leases = expire_leases
        self._faults_left = draw.randrange(1, 5)
        two = dict.fromkeys(draw.sample(sorted(FAULT_RATES), 2), 0.5)
        self._fault_rates = fault_rates or draw.choice((FAULT_RATES, two))

    def run(self, actors: list[Actor], restart: Callable[[Actor], Actor]) -> None:
        """Run until all actors have ended. `restart` returns the actor that replaces a killed one."""
        started = list(actors)
        for actor in started:
            actor.start()
        try:
            last = started[0]
            for number in range(1, MAX_STEPS):
                running = [actor for actor in started if not actor.ended]
                if not running:
                    return
                awake = [actor for actor in running if actor.asleep_until <= number] or running
                if last not in awake or self._draw.random() > last.stickiness:
                    last = self._draw.choices(awake, [actor.weight for actor in awake])[0]
                if not self._inject_fault(last, number, started, restart):
                    self._resume(last, number)
            raise AssertionError("the simulation does not end")
        finally:
            for actor in started:
                if not actor.ended:
                    actor.kill()

    def _resume(self, actor: Actor, number: int) -> None:
        self.trace.append(f"{actor.name}: {actor.current_step}")
        actor.resume()
        actor.asleep_until = number + actor.rest
        if actor.error is not None:
            raise actor.error

    def _inject_fault(self, actor: Actor, number: int, started: list[Actor], restart: Callable[[Actor], Actor]) -> bool:
        """Kill or pause the actor, or do nothing, at random; return whether there was a fault."""
        if not self._faults_left or self._draw.random() >= self._fault_rates.get(actor.protocol_step, 0):
            return False
        self._faults_left -= 1
        if self._draw.random() < 0.5:
            # Paused actors continue now, which is when they can do the most harm.
            for sleeper in started:
                sleeper.asleep_until = number
        if self._draw.random() < 0.5:
            self.trace.append(f"{actor.name} is killed before: {actor.current_step}")
            actor.kill()
            started.append(restart(actor))
            started[-1].start()
        else:
            self.trace.append(f"{actor.name} is paused before: {actor.current_step}")
            actor.asleep_until = number + self._draw.randrange(20, 150)
        if self._draw.random() < 0.8:
            self.trace.append("the leases expire")
            self._expire_leases()
        return True


class SteppedStore(FaultyStore):
    """A store in which each call is a step of its actor."""

    def __init__(self, inner: Store, actor: Actor) -> None:
        super().__init__(inner)
        self._actor = actor

    @contextmanager
    def _call(self, method: str, *paths: str) -> Iterator[None]:
        self._actor.step(f"{method} {' '.join(paths)}")
        yield


class SteppedDatabase(Database):
    """A database in which each transaction is a step of its actor. No actor is paused within a transaction."""

    def __init__(self, inner: Database, actor: Actor) -> None:
        # The engine, its limits and its notifications are those of the inner one.
        self.__dict__.update(inner.__dict__)
        self._actor = actor

    @contextmanager
    def read(self) -> Iterator[Connection]:
        self._actor.step("read from SQL")
        with super().read() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        self._actor.step("write to SQL")
        with super().write() as connection:
            yield connection
        self._actor.step("written to SQL")
