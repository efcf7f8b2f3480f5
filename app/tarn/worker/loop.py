"""Worker loop: sends heartbeats, claims jobs, runs them, and requeues them when the worker must stop.

All flush jobs are claimed at once and done in one round, together with the datasets that are due. Other jobs run in a
few threads concurrently with the flushes; queue items and webhook deliveries run concurrently with both. Long work must
not delay short work.

How the job threads share their slots:
1. A tenant that has a running job leaves the last free slot to other tenants.
2. The tenant with the fewest running jobs is next; among equals, the one that was served the longest time ago.
3. A dataset has one running job at a time: a tenant's jobs on it run in the order in which they were requested.
"""

import math
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
from tarn.datasets import registry
from tarn.datasets.registry import Dataset, JobHeartbeat
from tarn.db import jobs, outbox, worker_heartbeats
from tarn.db.engine import Database
from tarn.db.notifications import ACCESS, EVENTS, JOURNAL, Waiter
from tarn.errors import Internal, Locked, TarnError
from tarn.journal.dataset_removal import remove_journal
from tarn.journal.expiry import sweep
from tarn.model.datasets.flush import Flusher, FlushOutcome
from tarn.model.ids import new_id, now
from tarn.model.work.backoff import delays
from tarn.model.work.cancellation import Cancellation
from tarn.model.work.event import EventKind
from tarn.model.work.job import FlushResult, Job, JobStopped, Maintainer, Operation, Progress, ResumeLater
from tarn.settings import Settings
from tarn.storage.connection import LONGEST_CALL
from tarn.storage.store import Store
from tarn.telemetry import Telemetry
from tarn.worker.deliveries import Deliveries
from tarn.worker.flush_rounds import FlushRounds
from tarn.worker.maintenance_schedule import MaintenanceSchedule
from tarn.worker.queue_consumer import QueueConsumer
from tarn.worker.run_records import record_run

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

FORGET_AFTER = 24 * 3600
"""Seconds after which a worker that ended without unregistering is no longer listed."""

PROGRESS_SECONDS = 0.2
"""Seconds between two writes of a job's progress: more frequent writes would mostly wait for the disk."""

CANCEL_POLL = 0.5
"""Seconds between two checks whether a running job was cancelled, and between two interrupts of a cancelled one."""

SWEEP_EVERY = 30.0
"""Seconds between two sweeps of expired rows in the journal, jobs, queue, events and audit log."""

RETRY_SECONDS = 0.5
"""Seconds after which a query for work that failed is repeated."""

QUEUE_INTERVAL = 0.02
"""Minimum seconds between two queries for queue items."""

ENDS_OF_JOBS = (EventKind.JOB_DONE, EventKind.JOB_FAILED, EventKind.JOB_CANCELLED)

MOST_DUE = 250
"""Due datasets that a round takes in addition to the requested ones. A flush that is requested during a round waits for
the end of the round, so rounds are bounded."""


class JobOutcome(NamedTuple):
    """Result of a job, and its last reported progress."""

    result: dict[str, Any]
    progress: Progress | None = None


class Worker:
    """One worker process. Several may run: a job belongs to the worker that claimed it, for as long as it sends
    heartbeats."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        store: Store,
        flusher: Flusher | None = None,
        maintainer: Maintainer | None = None,
        consumer: QueueConsumer | None = None,
        watch: Telemetry | None = None,
    ) -> None:
        self._watch = watch or Telemetry()
        self.id = new_id()
        self._settings = settings
        self._database = database
        self._store = store
        self._flusher = flusher
        self._rounds = None if flusher is None else FlushRounds(flusher)
        self._consumer = consumer
        self._stop = threading.Event()
        self._waiters: set[Waiter] = set()
        """What the threads of this worker wait on for work. Replaced, never mutated, as `stop` reads it."""
        self._stopped = 0.0
        """Monotonic time at which `stop` was called."""
        self._claiming = threading.Lock()
        """Held while a job thread claims a job, so that two threads do not give one tenant the last slot."""
        self._releasing = threading.Lock()
        """Held while jobs are removed from a flush round."""
        self._maintenance_checked = time.monotonic()
        self._jobs: tuple[Job, ...] = ()
        """The flush jobs of the current round. Replaced, never mutated, because the heartbeat thread reads it."""
        self._other: tuple[Job, ...] = ()
        """The other running jobs. Replaced under `_claiming`, never mutated."""
        self._moved: dict[str, tuple[int, int]] = {}
        """By dataset id, for the datasets of a round: rows that are in snapshots so far, and rows in total."""
        self._operations: dict[Operation, Callable[[Job, JobHeartbeat], JobOutcome]] = {Operation.DELETE: self._delete}
        self._maintenance = None if maintainer is None else MaintenanceSchedule(database, store)
        self._deliveries = Deliveries(settings, database, self.id)
        if maintainer is not None:
            self._operations |= dict.fromkeys(maintainer.operations, partial(self._maintain, maintainer))

    def stop(self) -> None:
        """Request the worker to stop: it requeues its jobs at their next step."""
        self._stopped = time.monotonic()
        self._stop.set()
        self._wake_all()

    def run(self) -> None:
        """Work until `stop` is called. Waits for a database that does not answer."""
        self._retry_transaction(lambda connection: worker_heartbeats.register(connection, self.id))
        heartbeat_thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        heartbeat_thread.start()
        log.info("worker started", worker=self.id)
        try:
            self._recover()
            self._work()
        finally:
            if self._flusher is not None:
                self._flusher.close()
        heartbeat_thread.join()
        self._retry_transaction(lambda connection: worker_heartbeats.leave(connection, self.id))
        log.info("worker stopped", worker=self.id)

    def _work(self) -> None:
        job_threads = [
            threading.Thread(target=self._run_jobs, name=f"jobs-{slot}") for slot in range(self._settings.job_slots)
        ]
        for thread in job_threads:
            thread.start()
        queue_thread = threading.Thread(target=self._run_queues, name="queues")
        queue_thread.start()
        webhook_thread = threading.Thread(target=self._run_deliveries, name="webhooks")
        webhook_thread.start()
        if self._flusher is not None and self._settings.spark_warm_up:
            threading.Thread(target=self._warm_up, args=[self._flusher], name="warm-up", daemon=True).start()
        last_sweep = -SWEEP_EVERY
        with self._woken_by(EventKind.JOB_QUEUED, JOURNAL) as waiter:
            while not self._stop.is_set():
                if time.monotonic() >= last_sweep + SWEEP_EVERY:
                    self._sweep()
                    last_sweep = time.monotonic()
                if not self.flush():
                    waiter.wait(self._seconds_until_flush())
        for thread in job_threads:
            thread.join()
        queue_thread.join()
        webhook_thread.join()

    @contextmanager
    def _woken_by(self, *topics: str) -> Iterator[Waiter]:
        """Yield a waiter that notifications of these topics wake, and `stop`."""
        waiter = Waiter()
        with self._claiming:
            self._waiters = self._waiters | {waiter}
        if self._stop.is_set():
            waiter.wake()
        with self._database.notifications.subscribed(topics, waiter.wake):
            yield waiter

    def _seconds_until(self, query: Callable[[Connection], float]) -> float:
        """Return for how long to wait without a notification: at most until the time that a query returns."""
        try:
            with self._database.read() as connection:
                return min(self._settings.worker_poll, query(connection))
        except Exception as error:  # noqa: BLE001 - if this thread ended, its work would not be done
            log.warning("cannot query when work is due", error=f"{type(error).__name__}: {error}"[:300])
            return min(self._settings.worker_poll, RETRY_SECONDS)

    def _seconds_until_flush(self) -> float:
        until_due = math.inf if self._rounds is None else self._rounds.seconds_until_due()
        return min(until_due, self._seconds_until(jobs.seconds_until_retry))

    def _seconds_until_job(self) -> float:
        seconds = self._seconds_until(jobs.seconds_until_retry)
        if self._maintenance is None:
            return seconds
        next_check = self._maintenance_checked + self._settings.maintenance_interval
        return max(0.0, min(seconds, next_check - time.monotonic()))

    def _wake_later(self) -> None:
        """Wake all threads soon: a query failed, and the notification that led to it will not come again."""
        timer = threading.Timer(RETRY_SECONDS, self._wake_all)
        timer.daemon = True
        timer.start()

    def _wake_all(self) -> None:
        for waiter in self._waiters:
            waiter.wake()

    def _run_jobs(self) -> None:
        # A job that ends may free its dataset or its tenant's slot for another one.
        with self._woken_by(EventKind.JOB_QUEUED, *ENDS_OF_JOBS) as waiter:
            while not self._stop.is_set():
                if self._maintenance is not None and self._is_maintenance_due():
                    self._enqueue_maintenance(self._maintenance)
                try:
                    worked = self.step()
                except Exception:  # if this thread ended, its job slot would be lost
                    log.exception("a job thread failed unexpectedly")
                    worked = False
                if not worked:
                    waiter.wait(self._seconds_until_job())

    def _is_maintenance_due(self) -> bool:
        """Return whether this thread should check now which datasets are due for maintenance."""
        with self._claiming:
            is_due = time.monotonic() >= self._maintenance_checked + self._settings.maintenance_interval
            if is_due:
                self._maintenance_checked = time.monotonic()
            return is_due

    def _run_queues(self) -> None:
        with self._woken_by(EventKind.QUEUE_ITEM) as waiter:
            while self._consumer is not None and not self._stop.is_set():
                try:
                    worked = self._consumer.work(self._stop.is_set)
                except Exception:  # the items stay in the queues until the next poll
                    log.exception("queue items could not be processed")
                    worked = 0
                    self._wake_later()
                if not worked:
                    # Each item is several events: many in a short time are one reason to look for items.
                    self._stop.wait(QUEUE_INTERVAL)
                    waiter.wait(self._seconds_until(queue.seconds_until_due))

    def _warm_up(self, flusher: Flusher) -> None:
        start = time.monotonic()
        try:
            flusher.warm_up()
        except Exception as error:  # noqa: BLE001 - the first job tries again, and fails with the reason
            if not self._stop.is_set():
                log.warning("Spark could not be started in advance", error=f"{type(error).__name__}: {error}"[:500])
        else:
            log.info("Spark is ready", seconds=round(time.monotonic() - start, 1))

    def _run_deliveries(self) -> None:
        with self._woken_by(EVENTS, ACCESS) as waiter:
            self._deliveries.run(self._stop, waiter)

    def step(self) -> bool:
        """Claim one job and run it. Returns False if there is none, or the database does not answer."""
        try:
            with self._claiming:
                job = self._claim()
                if job is None:
                    return False
                self._other = (*self._other, job)
        except TarnError as error:
            log.warning("cannot claim a job", problem=error.slug)
            self._wake_later()
            return False
        start = time.perf_counter()
        try:
            with self._watch.span(f"job {job.operation}", job=job.id, attempt=job.attempts):
                outcome = self._run(job)
        finally:
            with self._claiming:
                self._other = tuple(each for each in self._other if each is not job)
        self._watch.jobs.labels(job.operation, outcome).observe(time.perf_counter() - start)
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
        """Claim all flush jobs and do them in one round, together with the datasets that are due.

        Returns False if there was nothing to do, or nothing was flushed: then the caller waits before it polls again.
        """
        if self._rounds is None:
            return False
        silent_after = self._settings.worker_silent_after
        claimed: list[Job] = []
        try:
            if self._is_any_free([Operation.FLUSH]):
                with self._database.write() as connection:
                    claimed = jobs.claim_all(connection, self.id, Operation.FLUSH, silent_after)
        except TarnError as error:
            log.warning("cannot claim flush jobs", problem=error.slug)
            self._wake_later()
            return False
        self._jobs = tuple(claimed)
        try:
            return self._flush(self._rounds)
        finally:
            self._jobs, self._moved = (), {}

    def _is_any_free(self, operations: Collection[Operation], without: Collection[str] = ()) -> bool:
        """Return whether there is a job to claim. Reads only: polling must not take SQLite's single write lock each
        time."""
        with self._database.read() as connection:
            return jobs.is_any_free(connection, self._settings.worker_silent_after, operations, without)

    def _flush(self, rounds: FlushRounds) -> bool:
        due = rounds.due()[:MOST_DUE]
        requested = list(dict.fromkeys([*(each for job in self._jobs for each in job.dataset_ids), *due]))
        if not requested and not self._jobs:
            return False
        log.info("flush started", datasets=len(requested), due=len(due), jobs=[job.id for job in self._jobs])

        def hold() -> None:
            if self._stop.is_set() or not (self._hold_all() or due):
                raise JobStopped

        def moved(dataset: str, done: int, total: int) -> None:
            self._moved[dataset] = done, total

        def is_needed() -> bool:
            return self._release_cancelled() or bool(due)

        cancellation = Cancellation()
        try:
            with cancellation.active(), self._watching(cancellation, is_needed):
                outcomes = rounds.flush(requested, hold, moved) if requested else {}
        except JobStopped:
            for job in self._jobs:
                self._requeue(job)
            return True
        for job in self._jobs:
            self._settle_flush(job, [outcomes[each] for each in job.dataset_ids])
        self._tidy()
        return bool(self._jobs) or any(outcome.snapshots and outcome.error is None for outcome in outcomes.values())

    def _hold_all(self) -> bool:
        """Send a heartbeat for the jobs of a round and remove those that were cancelled or lost. Returns False if none
        is left."""
        with self._releasing:
            if self._jobs:
                with self._database.write() as connection:
                    held_ids = self._beat_all(connection, self._jobs)
                self._keep(held_ids)
            return bool(self._jobs)

    def _release_cancelled(self) -> bool:
        """Remove cancelled jobs from the round without a heartbeat, so that they end before the round does. Returns
        False if no job is left."""
        with self._releasing:
            if self._jobs:
                with self._database.read() as connection:
                    held_ids = jobs.held(connection, [job.id for job in self._jobs], self.id)
                self._keep(held_ids)
            return bool(self._jobs)

    def _keep(self, held_ids: Collection[str]) -> None:
        lost = [job for job in self._jobs if job.id not in held_ids]
        self._jobs = tuple(job for job in self._jobs if job.id in held_ids)
        for job in lost:
            self._requeue(job)

    def _settle_flush(self, job: Job, outcomes: Sequence[FlushOutcome]) -> None:
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if errors:
            self._fail(job, errors[0])
            return
        result = FlushResult.of([snapshot for outcome in outcomes for snapshot in outcome.snapshots]).model_dump()
        progress = self._progress(job)
        self._settle("done", job, lambda connection: jobs.finish(connection, job.id, self.id, result, progress))

    def _beat_all(self, connection: Connection, held_jobs: Sequence[Job]) -> set[str]:
        progress_by_job = {job.id: progress for job in held_jobs if (progress := self._progress(job)) is not None}
        return jobs.beat_all(connection, [job.id for job in held_jobs], self.id, progress_by_job)

    def _progress(self, job: Job) -> Progress | None:
        """Return the progress of a flush job, in rows of its own datasets; None while it is not known."""
        moved = self._moved
        counts = [moved[each] for each in job.dataset_ids if each in moved]
        done, total = sum(done for done, _ in counts), sum(total for _, total in counts)
        return Progress(done=done, total=total, unit="rows") if counts else None

    def _run(self, job: Job) -> str:
        """Run a job and settle it. Returns the outcome as a label for metrics."""
        log.info("job started", job=job.id, operation=job.operation, dataset=job.dataset, attempt=job.attempts)

        def hold(connection: Connection, progress: Progress | None) -> None:
            if self._stop.is_set() or not jobs.beat(connection, job.id, self.id, progress):
                raise JobStopped

        def is_held() -> bool:
            with self._database.read() as connection:
                return jobs.is_held(connection, job.id, self.id)

        cancellation = Cancellation(pool=threading.current_thread().name)
        try:
            with cancellation.active(), self._watching(cancellation, is_held):
                done = self._operations[job.operation](job, hold)
        except JobStopped:
            self._requeue(job)
            return "stopped"
        except ResumeLater as early:
            until = early.until
            self._settle("postponed", job, lambda connection: jobs.requeue(connection, job.id, self.id, until))
            return "later"
        except Exception as error:  # noqa: BLE001 - a job may fail in any way; the worker goes on, and logs it below
            if cancellation.is_set() and not self._stop.is_set():  # an interrupted job ends with any error
                log.info("job interrupted", job=job.id, error=f"{type(error).__name__}: {error}"[:500])
                self._requeue(job)
                return "stopped"
            self._fail(job, error)
            return "failed"
        self._settle("done", job, lambda connection: jobs.finish(connection, job.id, self.id, *done))
        return "done"

    @contextmanager
    def _watching(self, cancellation: Cancellation, is_needed: Callable[[], bool]) -> Iterator[None]:
        """Set the cancellation once the job was cancelled or lost, or the worker must stop, and interrupt the work.

        When the worker must stop, only work that has not ended within the shutdown grace period is interrupted.
        """
        over = threading.Event()

        def watch() -> None:
            while not over.wait(CANCEL_POLL):
                try:
                    if not cancellation.is_set() and (self._stop.is_set() or not is_needed()):
                        cancellation.set()
                except Exception as error:  # noqa: BLE001 - the work goes on while the database does not answer
                    log.warning(
                        "cannot check whether a job is cancelled", error=f"{type(error).__name__}: {error}"[:500]
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

    def _requeue(self, job: Job) -> None:
        self._settle("requeued", job, lambda connection: jobs.requeue(connection, job.id, self.id))

    def _fail(self, job: Job, error: Exception) -> None:
        problem_error = (
            error if isinstance(error, TarnError) else Internal("the job failed; see the worker's log for the cause")
        )
        # The holder of a dataset's lease will release it, or the lease expires: worth a retry.
        passes = problem_error.retryable or isinstance(problem_error, Locked)
        # A worker that must stop interrupts its jobs; that does not count as a failure of the job.
        retry_at = now() if self._stop.is_set() else job.operation.next_try(job.attempts, passes, now())
        if isinstance(problem_error, Locked) and retry_at is not None:
            log.info(
                "job waits for a lease that another holder has",
                job=job.id,
                attempt=job.attempts,
                retry_at=retry_at,
                reason=problem_error.detail,
            )
        else:
            log.error("job failed", job=job.id, attempt=job.attempts, retry_at=retry_at, exc_info=error)
        problem = problem_error.problem(instance=f"/v1/jobs/{job.id}").model_dump(mode="json")
        self._settle("failed", job, lambda connection: jobs.fail(connection, job.id, self.id, problem, retry_at))

    def _delete(self, job: Job, hold: JobHeartbeat) -> JobOutcome:
        assert job.dataset is not None
        assert job.dataset_id is not None
        remove_journal(self._database, job.dataset_id, hold)
        remove_files(self._database, job.dataset_id, hold)
        remove_queue(self._database, job.dataset_id, hold)
        settling = timedelta(seconds=max(LONGEST_CALL, self._settings.worker_silent_after))
        free_from = None if job.disturbed is None else job.disturbed + settling
        return JobOutcome(
            registry.delete(self._database, self._store, Dataset(job.dataset_id, job.dataset), hold, free_from)
        )

    def _maintain(self, maintainer: Maintainer, job: Job, hold: JobHeartbeat) -> JobOutcome:
        reached: Progress | None = None
        recorded_at = time.monotonic()

        def report(progress: Progress | None) -> None:
            nonlocal reached, recorded_at
            reached = progress or reached
            if time.monotonic() < recorded_at + PROGRESS_SECONDS:
                with self._database.read() as connection:
                    if self._stop.is_set() or not jobs.is_held(connection, job.id, self.id):
                        raise JobStopped
                return
            with self._database.write() as connection:
                hold(connection, reached)
            recorded_at = time.monotonic()

        return JobOutcome(maintainer.run(job, report), reached)

    def _recover(self) -> None:
        try:
            if self._flusher is not None:
                self._flusher.recover()
        except Exception:  # the next publication of a dataset finishes the commit, too
            log.exception("unfinished commits of dead workers could not be recovered yet")

    def _tidy(self) -> None:
        try:
            if self._flusher is not None:
                self._flusher.tidy()
        except Exception:  # the next round tries again
            log.exception("flushed rows could not be deleted from the journal")

    def _enqueue_maintenance(self, schedule: MaintenanceSchedule) -> None:
        try:
            schedule.enqueue_due()
        except Exception:  # the next check finds the same datasets
            log.exception("cannot check which datasets are due for maintenance")

    def _sweep(self) -> None:
        try:
            sweep(self._database, self._settings)
            with self._database.write() as connection:
                jobs.delete_finished(connection, now() - timedelta(days=self._settings.job_days))
            queue.delete_done(self._database, self._store, self._settings)
            self._trim_events()
            audit.trim(self._database, now() - timedelta(days=self._settings.audit_days))
        except Exception:  # the sweep can wait; the jobs cannot
            log.exception("expired rows could not be swept")

    def _trim_events(self) -> None:
        """Delete events past their retention, in short transactions."""
        before = now() - timedelta(days=self._settings.event_days)
        with self._database.read() as connection:
            past = outbox.expired_numbers(connection, before, self._settings.event_max_retained)
        for stream, to in past.items():
            has_more = True
            while has_more:
                with self._database.write() as connection:
                    has_more = outbox.trim(connection, stream, to)
        if past:
            with self._database.write() as connection:
                outbox.forget_jobs(connection)

    def _beat(self) -> None:
        """Send heartbeats of the worker and of its jobs until it stops."""
        while not self._stop.wait(self._settings.worker_heartbeat):
            try:
                with self._database.write() as connection:
                    worker_heartbeats.beat(connection, self.id, FORGET_AFTER)
                    if held_jobs := self._jobs + self._other:
                        self._beat_all(connection, held_jobs)
            except Exception:  # if this thread ended, other workers would consider this one dead
                log.exception("the heartbeat could not be written")

    def _settle(self, outcome: str, job: Job, settle: Callable[[Connection], bool]) -> None:
        is_held = self._retry_transaction(settle)
        log.info("job finished" if is_held else "job taken over by another worker", job=job.id, outcome=outcome)
        if is_held:
            self._record(job)

    def _record(self, job: Job) -> None:
        try:
            record_run(self._database, self._store, job.id)
        except Exception:  # the job is finished, with or without a record
            log.exception("the run record could not be written", job=job.id)

    def _retry_transaction(self, act: Callable[[Connection], Result]) -> Result | None:
        """Run one transaction and retry while the database does not answer; try only once if the worker must stop."""
        for delay in delays(self._settings.commit_backoff_base, self._settings.commit_backoff_cap):
            try:
                with self._database.write() as connection:
                    return act(connection)
            except TarnError as error:
                log.warning("waiting for the database", problem=error.slug)
                if self._stop.wait(delay):
                    break
        return None
