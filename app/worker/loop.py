"""The worker: gives signs of life, claims jobs one at a time, runs them, hands them back when it must stop."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import structlog
from sqlalchemy import Connection

from app.db import jobs, workers
from app.db.engine import Database
from app.errors import Internal, TarnError
from app.journal.removal import remove_journal
from app.journal.sweep import sweep
from app.lake import datasets
from app.lake.datasets import Dataset, Hold
from app.model.backoff import delays
from app.model.ids import new_id, now
from app.model.job import Job, NotYet, Operation, Progress
from app.settings import Settings
from app.storage.connection import LONGEST_CALL
from app.storage.store import Store

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer")

FORGET_AFTER = 24 * 3600
"""Seconds after which a worker that never said goodbye is no longer listed."""

SWEEP_EVERY = 30.0
"""Seconds between two looks for what was left behind in the journal."""


class Stopped(Exception):
    """The worker must stop, or has lost the job to another one; what it was doing goes on elsewhere."""


class Worker:
    """One worker process. Several may run: a job belongs to whoever claimed it, for as long as it beats."""

    def __init__(self, settings: Settings, database: Database, store: Store) -> None:
        self.id = new_id()
        self._settings = settings
        self._database = database
        self._store = store
        self._stop = threading.Event()
        self._job: Job | None = None
        self._operations: dict[Operation, Callable[[Job, Hold], dict[str, Any]]] = {Operation.DELETE: self._delete}

    def stop(self) -> None:
        """Ask the worker to finish: the job it has is handed back at its next step."""
        self._stop.set()

    def run(self) -> None:
        """Work until told to stop. A database that is away is waited for."""
        self._insist(lambda connection: workers.register(connection, self.id))
        beats = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        beats.start()
        log.info("worker started", worker=self.id)
        swept = -SWEEP_EVERY
        while not self._stop.is_set():
            if time.monotonic() >= swept + SWEEP_EVERY:
                self._sweep()
                swept = time.monotonic()
            if not self.step():
                self._stop.wait(self._settings.worker_poll)
        beats.join()
        self._insist(lambda connection: workers.leave(connection, self.id))
        log.info("worker stopped", worker=self.id)

    def step(self) -> bool:
        """Claim one job and run it. False if there is none, or the database does not answer."""
        try:
            with self._database.write() as connection:
                job = jobs.claim(connection, self.id, self._settings.worker_silent_after)
        except TarnError as error:
            log.warning("cannot look for work", problem=error.slug)
            return False
        if job is None:
            return False
        self._job = job
        try:
            self._run(job)
        finally:
            self._job = None
        return True

    def _run(self, job: Job) -> None:
        log.info("job started", job=job.id, operation=job.operation, dataset=job.dataset, attempt=job.attempts)

        def hold(connection: Connection, progress: Progress | None) -> None:
            if self._stop.is_set() or not jobs.beat(connection, job.id, self.id, progress):
                raise Stopped

        try:
            result = self._operations[job.operation](job, hold)
        except Stopped:
            self._settle("handed back", job, lambda connection: jobs.hand_back(connection, job.id, self.id))
        except NotYet as early:
            until = early.until
            self._settle("goes on later", job, lambda connection: jobs.hand_back(connection, job.id, self.id, until))
        except Exception as error:  # a job may fail in any way; the worker goes on
            known = error if isinstance(error, TarnError) else Internal("the job failed; the worker's log says why")
            again = job.operation.next_try(job.attempts, known.retryable, now())
            log.exception("job failed", job=job.id, attempt=job.attempts, again=again)
            problem = known.problem(instance=f"/v1/jobs/{job.id}").model_dump(mode="json")
            self._settle("failed", job, lambda connection: jobs.fail(connection, job.id, self.id, problem, again))
        else:
            self._settle("done", job, lambda connection: jobs.finish(connection, job.id, self.id, result))

    def _delete(self, job: Job, hold: Hold) -> dict[str, Any]:
        remove_journal(self._database, job.dataset_id, hold)
        settling = timedelta(seconds=max(LONGEST_CALL, self._settings.worker_silent_after))
        free_from = None if job.disturbed is None else job.disturbed + settling
        return datasets.delete(self._database, self._store, Dataset(job.dataset_id, job.dataset), hold, free_from)

    def _sweep(self) -> None:
        try:
            sweep(self._database, self._settings)
        except Exception:  # what was left behind can wait; the jobs cannot
            log.exception("the journal could not be swept")

    def _beat(self) -> None:
        """Signs of life, of the worker and of the job it has, until it stops."""
        while not self._stop.wait(self._settings.worker_heartbeat):
            try:
                with self._database.write() as connection:
                    workers.beat(connection, self.id, FORGET_AFTER)
                    if (job := self._job) is not None:
                        jobs.beat(connection, job.id, self.id, None)
            except Exception:  # a thread that ended here would end the worker's life for all others
                log.exception("no sign of life could be given")

    def _settle(self, outcome: str, job: Job, settle: Callable[[Connection], bool]) -> None:
        held = self._insist(settle)
        log.info("job over" if held else "job taken over by another worker", job=job.id, outcome=outcome)

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
