"""The worker: gives signs of life, claims jobs, runs them, hands them back when it must stop.

Flushes are claimed all at once and done in one round, with what is due by itself; all other jobs by a few threads
beside the flushes, and queues of datasets and webhooks beside both: long work must not keep short work waiting.

How the job threads share their slots:
1. A tenant that has a job running leaves the last free slot to the others.
2. The tenant with the fewest running jobs is next; among equals, the one that was served the longest time ago.
3. A dataset has one running job at a time: a tenant's jobs on it run in the order in which it asked for them.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import structlog
from sqlalchemy import Connection

from tarn.access import audit
from tarn.archive.dataset_removal import remove_files
from tarn.coordination import queue
from tarn.coordination.dataset_removal import remove_queue
from tarn.datasets import registry as datasets
from tarn.datasets.registry import Dataset, Hold
from tarn.db import jobs
from tarn.db import outbox as events
from tarn.db import worker_heartbeats as workers
from tarn.db.engine import Database
from tarn.errors import Internal, Locked, TarnError
from tarn.journal.dataset_removal import remove_journal
from tarn.journal.expiry import sweep
from tarn.model.backoff import delays
from tarn.model.cancellation import Cancellation
from tarn.model.flush import Flusher
from tarn.model.ids import new_id, now
from tarn.model.job import FlushResult, Job, MadeSnapshot, Maintainer, Operation, Progress, ResumeLater, Stopped
from tarn.model.names import DatasetName
from tarn.settings import Settings
from tarn.storage.connection import LONGEST_CALL
from tarn.storage.store import Store
from tarn.telemetry import Telemetry
from tarn.worker.deliveries import Deliveries
from tarn.worker.flush_rounds import Outcome, Rounds
from tarn.worker.maintenance_schedule import MaintenanceSchedule
from tarn.worker.queue import Consumer
from tarn.worker.run_records import record_run

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer")

FORGET_AFTER = 24 * 3600
"""Seconds after which a worker that never said goodbye is no longer listed."""

PROGRESS_SECONDS = 0.2
"""Seconds between two times that a job's progress is written down: short ones would mostly wait for the disk."""

CANCEL_POLL = 0.5
"""Seconds between two looks whether a running job was cancelled, and between two interrupts of one that was."""

SWEEP_EVERY = 30.0
"""Seconds between two looks for what was left behind in the journal."""

MOST_DUE = 250
"""Datasets that a round takes besides those that were asked for: who asks in the middle of it waits for its end."""


class JobOutcome(NamedTuple):
    """What came of a job, and how far it was told to be at last."""

    result: dict[str, Any]
    progress: Progress | None = None


class Worker:
    """One worker process. Several may run: a job belongs to whoever claimed it, for as long as it beats."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        store: Store,
        flusher: Flusher | None = None,
        maintainer: Maintainer | None = None,
        consumer: Consumer | None = None,
        watch: Telemetry | None = None,
    ) -> None:
        self._watch = watch or Telemetry()
        self.id = new_id()
        self._settings = settings
        self._database = database
        self._store = store
        self._flusher = flusher
        self._rounds = None if flusher is None else Rounds(flusher)
        self._consumer = consumer
        self._stop = threading.Event()
        self._stopped = 0.0
        """When it was asked to stop."""
        self._claiming = threading.Lock()
        """Held while a job thread claims, so that two do not give one tenant the last slot."""
        self._releasing = threading.Lock()
        """Held while jobs leave a round of flushes."""
        self._looked = time.monotonic()
        self._jobs: tuple[Job, ...] = ()
        """The flushes it works on now; replaced, never changed, since the heartbeat reads it."""
        self._other: tuple[Job, ...] = ()
        """The other jobs that run now; replaced, never changed, under `_claiming`."""
        self._moved: dict[str, tuple[int, int]] = {}
        """Of the datasets of a round, by their ids: rows that are in snapshots by now, and rows in all."""
        self._operations: dict[Operation, Callable[[Job, Hold], JobOutcome]] = {Operation.DELETE: self._delete}
        self._upkeep = None if maintainer is None else MaintenanceSchedule(database, store)
        self._deliveries = Deliveries(settings, database, self.id)
        if maintainer is not None:
            self._operations |= dict.fromkeys(maintainer.operations, partial(self._maintain, maintainer))

    def stop(self) -> None:
        """Ask the worker to finish: the jobs it has are handed back at their next step."""
        self._stopped = time.monotonic()
        self._stop.set()

    def run(self) -> None:
        """Work until told to stop. A database that is away is waited for."""
        self._insist(lambda connection: workers.register(connection, self.id))
        beats = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        beats.start()
        log.info("worker started", worker=self.id)
        try:
            self._recover()
            self._work()
        finally:
            if self._flusher is not None:
                self._flusher.close()
        beats.join()
        self._insist(lambda connection: workers.leave(connection, self.id))
        log.info("worker stopped", worker=self.id)

    def _work(self) -> None:
        others = [
            threading.Thread(target=self._work_on_others, name=f"jobs-{slot}")
            for slot in range(self._settings.job_slots)
        ]
        for thread in others:
            thread.start()
        queues = threading.Thread(target=self._work_off_queues, name="queues")
        queues.start()
        posts = threading.Thread(target=self._deliveries.run, args=[self._stop], name="webhooks")
        posts.start()
        swept = -SWEEP_EVERY
        while not self._stop.is_set():
            if time.monotonic() >= swept + SWEEP_EVERY:
                self._sweep()
                swept = time.monotonic()
            if not self.flush():
                self._stop.wait(self._settings.worker_poll)
        for thread in others:
            thread.join()
        queues.join()
        posts.join()

    def _work_on_others(self) -> None:
        while not self._stop.is_set():
            if self._upkeep is not None and self._is_upkeep_due():
                self._look_after(self._upkeep)
            try:
                worked = self.step()
            except Exception:  # without this thread nothing but flushes would be done any more
                log.exception("a job ended in a way that it should not")
                worked = False
            if not worked:
                self._stop.wait(self._settings.worker_poll)

    def _is_upkeep_due(self) -> bool:
        """Whether this thread is the one to look for datasets that are due for maintenance."""
        with self._claiming:
            is_due = time.monotonic() >= self._looked + self._settings.upkeep_every
            if is_due:
                self._looked = time.monotonic()
            return is_due

    def _work_off_queues(self) -> None:
        while self._consumer is not None and not self._stop.is_set():
            try:
                worked = self._consumer.work(self._stop.is_set)
            except Exception:  # what waits in the queues is still there at the next look
                log.exception("the queues could not be worked off")
                worked = 0
            if not worked:
                self._stop.wait(self._settings.worker_poll)

    def step(self) -> bool:
        """Claim one job and run it. False if there is none, or the database does not answer."""
        try:
            with self._claiming:
                job = self._claim()
                if job is None:
                    return False
                self._other = (*self._other, job)
        except TarnError as error:
            log.warning("cannot look for work", problem=error.slug)
            return False
        begun = time.perf_counter()
        try:
            with self._watch.span(f"job {job.operation}", job=job.id, attempt=job.attempts):
                outcome = self._run(job)
        finally:
            with self._claiming:
                self._other = tuple(each for each in self._other if each is not job)
        self._watch.jobs.labels(job.operation, outcome).observe(time.perf_counter() - begun)
        return True

    def _claim(self) -> Job | None:
        running = Counter(job.tenant for job in self._other)
        slots = self._settings.job_slots
        is_last = slots > 1 and len(self._other) >= slots - 1
        without = set(running) if is_last else set()
        if not self._is_any_free(self._operations, without):
            return None
        with self._database.write() as connection:
            silent_after = self._settings.worker_silent_after
            return jobs.claim(connection, self.id, silent_after, self._operations, running, without)

    def flush(self) -> bool:
        """Claim every flush that was asked for and do them in one round, with what is due by itself.

        False if there was nothing to do, or nothing came of it: then there is no hurry to look again.
        """
        if self._rounds is None:
            return False
        silent_after = self._settings.worker_silent_after
        asked: list[Job] = []
        try:
            if self._is_any_free([Operation.FLUSH]):
                with self._database.write() as connection:
                    asked = jobs.claim_all(connection, self.id, Operation.FLUSH, silent_after)
        except TarnError as error:
            log.warning("cannot look for flushes", problem=error.slug)
            return False
        self._jobs = tuple(asked)
        try:
            return self._flush(self._rounds)
        finally:
            self._jobs, self._moved = (), {}

    def _is_any_free(self, operations: Collection[Operation], without: Collection[str] = ()) -> bool:
        """Whether it is worth to claim: whoever looks twice a second must not hold SQLite's only pen each time."""
        with self._database.read() as connection:
            return jobs.is_any_free(connection, self._settings.worker_silent_after, operations, without)

    def _flush(self, rounds: Rounds) -> bool:
        due = rounds.due()[:MOST_DUE]
        wanted = list(dict.fromkeys([*(each for job in self._jobs for each in job.dataset_ids), *due]))
        if not wanted and not self._jobs:
            return False
        log.info("flush started", datasets=len(wanted), due=len(due), jobs=[job.id for job in self._jobs])

        def hold() -> None:
            if self._stop.is_set() or not (self._hold_all() or due):
                raise Stopped

        def moved(dataset: str, done: int, total: int) -> None:
            self._moved[dataset] = done, total

        def is_wanted() -> bool:
            return self._release_cancelled() or bool(due)

        cancellation = Cancellation()
        try:
            with cancellation.active(), self._watching(cancellation, is_wanted):
                outcomes = rounds.flush(wanted, hold, moved) if wanted else {}
        except Stopped:
            for job in self._jobs:
                self._hand_back(job)
            return True
        for job in self._jobs:
            self._settle_flush(job, [outcomes[each] for each in job.dataset_ids])
        self._tidy()
        return bool(self._jobs) or any(outcome and not isinstance(outcome, Exception) for outcome in outcomes.values())

    def _hold_all(self) -> bool:
        """Keep the jobs of a round; whichever was cancelled or lost leaves it. False if none is left."""
        with self._releasing:
            if self._jobs:
                with self._database.write() as connection:
                    kept = self._beat_all(connection, self._jobs)
                self._keep(kept)
            return bool(self._jobs)

    def _release_cancelled(self) -> bool:
        """Drop cancelled jobs from the round without a heartbeat: a cancelled flush need not wait for its round."""
        with self._releasing:
            if self._jobs:
                with self._database.read() as connection:
                    kept = jobs.held(connection, [job.id for job in self._jobs], self.id)
                self._keep(kept)
            return bool(self._jobs)

    def _keep(self, kept: Collection[str]) -> None:
        gone = [job for job in self._jobs if job.id not in kept]
        self._jobs = tuple(job for job in self._jobs if job.id in kept)
        for job in gone:
            self._hand_back(job)

    def _settle_flush(self, job: Job, outcomes: Sequence[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if failed:
            self._fail(job, failed[0])
            return
        made = [flushed for outcome in outcomes if not isinstance(outcome, Exception) for flushed in outcome]
        result = FlushResult(
            operation="flush",
            statements=sum(flushed.statements for flushed in made),
            snapshots=[MadeSnapshot(dataset=DatasetName(each.dataset), seq=each.seq, id=each.id) for each in made],
        ).model_dump()
        progress = self._progress(job)
        self._settle("done", job, lambda connection: jobs.finish(connection, job.id, self.id, result, progress))

    def _beat_all(self, connection: Connection, held: Sequence[Job]) -> set[str]:
        known = {job.id: progress for job in held if (progress := self._progress(job)) is not None}
        return jobs.beat_all(connection, [job.id for job in held], self.id, known)

    def _progress(self, job: Job) -> Progress | None:
        """How far a flush is, by the rows of its own datasets; None while that is not known."""
        moved = self._moved
        counts = [moved[each] for each in job.dataset_ids if each in moved]
        done, total = sum(done for done, _ in counts), sum(total for _, total in counts)
        return Progress(done=done, total=total, unit="rows") if counts else None

    def _run(self, job: Job) -> str:
        """Returns what came of it."""
        log.info("job started", job=job.id, operation=job.operation, dataset=job.dataset, attempt=job.attempts)

        def hold(connection: Connection, progress: Progress | None) -> None:
            if self._stop.is_set() or not jobs.beat(connection, job.id, self.id, progress):
                raise Stopped

        def is_held() -> bool:
            with self._database.read() as connection:
                return jobs.is_held(connection, job.id, self.id)

        cancellation = Cancellation(pool=threading.current_thread().name)
        try:
            with cancellation.active(), self._watching(cancellation, is_held):
                done = self._operations[job.operation](job, hold)
        except Stopped:
            self._hand_back(job)
            return "stopped"
        except ResumeLater as early:
            until = early.until
            self._settle("goes on later", job, lambda connection: jobs.requeue(connection, job.id, self.id, until))
            return "later"
        except Exception as error:  # noqa: BLE001 - a job may fail in any way; the worker goes on, and logs it below
            if cancellation.is_set() and not self._stop.is_set():  # this is how what was interrupted ends
                log.info("job broken off", job=job.id, error=f"{type(error).__name__}: {error}"[:500])
                self._hand_back(job)
                return "stopped"
            self._fail(job, error)
            return "failed"
        self._settle("done", job, lambda connection: jobs.finish(connection, job.id, self.id, *done))
        return "done"

    @contextmanager
    def _watching(self, cancellation: Cancellation, is_wanted: Callable[[], bool]) -> Iterator[None]:
        """Set a cancellation once its work is not wanted any more, or the worker must stop, and interrupt the work.

        A worker that must stop interrupts only what has not ended within the grace of a shutdown.
        """
        over = threading.Event()

        def watch() -> None:
            while not over.wait(CANCEL_POLL):
                try:
                    if not cancellation.is_set() and (self._stop.is_set() or not is_wanted()):
                        cancellation.set()
                except Exception as error:  # noqa: BLE001 - the database may be away: the work goes on until it is back
                    log.warning(
                        "cannot tell whether a job is cancelled", error=f"{type(error).__name__}: {error}"[:500]
                    )
                grace = self._settings.shutdown_grace if self._stop.is_set() else 0
                if cancellation.is_set() and time.monotonic() >= self._stopped + grace:
                    cancellation.interrupt()

        watcher = threading.Thread(target=watch, name="cancellation", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def _hand_back(self, job: Job) -> None:
        self._settle("handed back", job, lambda connection: jobs.requeue(connection, job.id, self.id))

    def _fail(self, job: Job, error: Exception) -> None:
        known = error if isinstance(error, TarnError) else Internal("the job failed; the worker's log says why")
        # Who holds a dataset's lease gives it back, or loses it.
        passes = known.retryable or isinstance(known, Locked)
        # A worker that must stop breaks its work off, which is no fault of the job's.
        again = now() if self._stop.is_set() else job.operation.next_try(job.attempts, passes, now())
        if isinstance(known, Locked) and again is not None:
            log.info("job waits for another holder", job=job.id, attempt=job.attempts, again=again, why=known.detail)
        else:
            log.error("job failed", job=job.id, attempt=job.attempts, again=again, exc_info=error)
        problem = known.problem(instance=f"/v1/jobs/{job.id}").model_dump(mode="json")
        self._settle("failed", job, lambda connection: jobs.fail(connection, job.id, self.id, problem, again))

    def _delete(self, job: Job, hold: Hold) -> JobOutcome:
        assert job.dataset is not None
        assert job.dataset_id is not None
        remove_journal(self._database, job.dataset_id, hold)
        remove_files(self._database, job.dataset_id, hold)
        remove_queue(self._database, job.dataset_id, hold)
        settling = timedelta(seconds=max(LONGEST_CALL, self._settings.worker_silent_after))
        free_from = None if job.disturbed is None else job.disturbed + settling
        return JobOutcome(
            datasets.delete(self._database, self._store, Dataset(job.dataset_id, job.dataset), hold, free_from)
        )

    def _maintain(self, maintainer: Maintainer, job: Job, hold: Hold) -> JobOutcome:
        reached: Progress | None = None
        told = time.monotonic()

        def report(progress: Progress | None) -> None:
            nonlocal reached, told
            reached = progress or reached
            if time.monotonic() < told + PROGRESS_SECONDS:
                with self._database.read() as connection:
                    if self._stop.is_set() or not jobs.is_held(connection, job.id, self.id):
                        raise Stopped
                return
            with self._database.write() as connection:
                hold(connection, reached)
            told = time.monotonic()

        return JobOutcome(maintainer.run(job, report), reached)

    def _recover(self) -> None:
        try:
            if self._flusher is not None:
                self._flusher.recover()
        except Exception:  # whoever publishes next finishes what was left, too
            log.exception("what a dead worker left could not be finished yet")

    def _tidy(self) -> None:
        try:
            if self._flusher is not None:
                self._flusher.tidy()
        except Exception:  # it is done with the next round, then
            log.exception("the journal could not be tidied up")

    def _look_after(self, upkeep: MaintenanceSchedule) -> None:
        try:
            upkeep.ask()
        except Exception:  # what is due now is due at the next look, too
            log.exception("cannot tell which datasets are due for maintenance")

    def _sweep(self) -> None:
        try:
            sweep(self._database, self._settings)
            with self._database.write() as connection:
                jobs.delete_finished(connection, now() - timedelta(days=self._settings.job_days))
            queue.delete_done(self._database, self._store, self._settings)
            self._trim_events()
            audit.trim(self._database, now() - timedelta(days=self._settings.audit_days))
        except Exception:  # what was left behind can wait; the jobs cannot
            log.exception("the journal could not be swept")

    def _trim_events(self) -> None:
        """Give up the events that are past their time, in short transactions."""
        before = now() - timedelta(days=self._settings.event_days)
        with self._database.read() as connection:
            past = events.expired_numbers(connection, before, self._settings.event_most)
        for stream, to in past.items():
            left = True
            while left:
                with self._database.write() as connection:
                    left = events.trim(connection, stream, to)
        if past:
            with self._database.write() as connection:
                events.forget_jobs(connection)

    def _beat(self) -> None:
        """Signs of life, of the worker and of the jobs it has, until it stops."""
        while not self._stop.wait(self._settings.worker_heartbeat):
            try:
                with self._database.write() as connection:
                    workers.beat(connection, self.id, FORGET_AFTER)
                    if held := self._jobs + self._other:
                        self._beat_all(connection, held)
            except Exception:  # a thread that ended here would end the worker's life for all others
                log.exception("no sign of life could be given")

    def _settle(self, outcome: str, job: Job, settle: Callable[[Connection], bool]) -> None:
        held = self._insist(settle)
        log.info("job over" if held else "job taken over by another worker", job=job.id, outcome=outcome)
        if held:
            self._record(job)

    def _record(self, job: Job) -> None:
        try:
            record_run(self._database, self._store, job.id)
        except Exception:  # the job is over, whether or not there is a record of it
            log.exception("a run could not be recorded", job=job.id)

    def _insist(self, act: Callable[[Connection], Answer]) -> Answer | None:
        """Do one transaction, again and again while the database is away; once only if the worker must stop."""
        for delay in delays(self._settings.commit_backoff_base, self._settings.commit_backoff_cap):
            try:
                with self._database.write() as connection:
                    return act(connection)
            except TarnError as error:
                log.warning("waiting for the database", problem=error.slug)
                if self._stop.wait(delay):
                    break
        return None
