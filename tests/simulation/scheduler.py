"""One actor at a time, in an order that a seed decides: the same seed, the same order, step by step."""

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

MOST_STEPS = 4000
"""Far more than any of these plays needs: who gets there goes in circles."""

DANGERS = {
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
"""How likely a fault is at a step, by what was reached before it."""


@dataclass
class Actor:
    """A thread that runs only when it is its turn, from one step to the next."""

    name: str
    act: Callable[["Actor"], None]
    weight: float = 1
    stays: float = 0
    """How likely it is to run on. Most faults need a long run of one worker against a pause of another."""
    at: str = "begins"
    since: str = ""
    """The last step of the protocol that it reached."""
    rest: int = 0
    over: bool = False
    doomed: bool = False
    asleep_until: int = 0
    error: BaseException | None = None
    _turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _stopped: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def step(self, at: str, rest: int = 0) -> None:
        """Stand still until it is this actor's turn, and for some turns of others. Raises Killed if it dies here."""
        if self.doomed:
            raise Killed(at)
        self.at, self.rest = at, rest
        self._stopped.release()
        self._turn.acquire()
        if self.doomed:
            raise Killed(at)

    def reached(self, step: str) -> None:
        """Told by the protocol."""
        self.since = step
        self.step(f"reached: {step}")

    def go_on(self) -> None:
        """Let it run up to its next step, or its end."""
        self._turn.release()
        if not self._stopped.acquire(timeout=TIMEOUT_SECONDS):
            raise TimeoutError(f"{self.name} does not come to a step after {self.at!r}")

    def die(self) -> None:
        self.doomed = True
        self._turn.release()
        self._thread.join(TIMEOUT_SECONDS)

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self.doomed:
                self.act(self)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - whoever watches the play raises it
            self.error = error
        self.over = True
        self._stopped.release()


class Scheduler:
    """Plays actors against each other. `trace` says what happened, in order.

    Faults come where they hurt: seldom outside a commit, often within it, most around the manifest; or else all of
    them after two steps.
    """

    def __init__(
        self, draw: random.Random, time_passes: Callable[[], None], dangers: Mapping[str, float] | None = None
    ) -> None:
        self.trace: list[str] = []
        self._draw = draw
        self._time_passes = time_passes
        self._faults_left = draw.randrange(1, 5)
        two = dict.fromkeys(draw.sample(sorted(DANGERS), 2), 0.5)
        self._dangers = dangers or draw.choice((DANGERS, two))

    def play(self, actors: list[Actor], reborn: Callable[[Actor], Actor]) -> None:
        """Until all have ended. `reborn` gives whoever takes a dead one's place."""
        cast = list(actors)
        for actor in cast:
            actor.start()
        try:
            last = cast[0]
            for number in range(1, MOST_STEPS):
                living = [actor for actor in cast if not actor.over]
                if not living:
                    return
                awake = [actor for actor in living if actor.asleep_until <= number] or living
                if last not in awake or self._draw.random() > last.stays:
                    last = self._draw.choices(awake, [actor.weight for actor in awake])[0]
                if not self._falls(last, number, cast, reborn):
                    self._go_on(last, number)
            raise AssertionError("the play does not end")
        finally:
            for actor in cast:
                if not actor.over:
                    actor.die()

    def _go_on(self, actor: Actor, number: int) -> None:
        self.trace.append(f"{actor.name}: {actor.at}")
        actor.go_on()
        actor.asleep_until = number + actor.rest
        if actor.error is not None:
            raise actor.error

    def _falls(self, actor: Actor, number: int, cast: list[Actor], reborn: Callable[[Actor], Actor]) -> bool:
        """Whether the actor is killed or paused here instead of going on."""
        if not self._faults_left or self._draw.random() >= self._dangers.get(actor.since, 0):
            return False
        self._faults_left -= 1
        if self._draw.random() < 0.5:
            # The worst moment for whoever stood still to go on.
            for sleeper in cast:
                sleeper.asleep_until = number
        if self._draw.random() < 0.5:
            self.trace.append(f"{actor.name} dies before: {actor.at}")
            actor.die()
            cast.append(reborn(actor))
            cast[-1].start()
        else:
            self.trace.append(f"{actor.name} stands still before: {actor.at}")
            actor.asleep_until = number + self._draw.randrange(20, 150)
        if self._draw.random() < 0.8:
            self.trace.append("the leases expire")
            self._time_passes()
        return True


class SteppedStore(FaultyStore):
    """A store each of whose calls is a step of its actor."""

    def __init__(self, inner: Store, actor: Actor) -> None:
        super().__init__(inner)
        self._actor = actor

    @contextmanager
    def _call(self, method: str, *paths: str) -> Iterator[None]:
        self._actor.step(f"{method} {' '.join(paths)}")
        yield


class SteppedDatabase(Database):
    """A database each of whose transactions is a step of its actor. Nobody stands still within one."""

    def __init__(self, inner: Database, actor: Actor) -> None:
        self.url, self.is_sqlite, self.engine = inner.url, inner.is_sqlite, inner.engine
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
