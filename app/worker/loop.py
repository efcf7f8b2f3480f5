"""The worker: gives signs of life, claims jobs one at a time, runs them, hands them back when it must stop."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import structlog
from sqlalchemy import Connection

from app.db import jobs, workers
from app.db.engine import Database
from app.errors import Internal, TarnError
from app.lake import datasets
from app.lake.datasets import Dataset
from app.model.backoff import delays
from app.model.ids import new_id
from app.model.job import Job, Operation, Progress
from app.settings import Settings
from app.storage.store import Store

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer")
Report = Callable[[Progress], None]

FORGET_AFTER = 24 * 3600
"""Seconds after which a worker that never said goodbye is no longer listed."""


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
        self._operations: dict[Operation, Callable[[Job, Report], dict[str, Any]]] = {Operation.DELETE: self._delete}

    def stop(self) -> None:
        """Ask the worker to finish: the job it has is handed back at its next step."""
        self._stop.set()

    def run(self) -> None:
        """Work until told to stop. A database that is away is waited for."""
        self._insist(lambda connection: workers.register(connection, self.id))
        beats = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        beats.start()
        log.info("worker started", worker=self.id)
        while not self._stop.is_set():
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
        try:
            result = self._operations[job.operation](job, lambda progress: self._report(job, progress))
        except Stopped:
            self._settle("handed back", job, lambda connection: jobs.hand_back(connection, job.id, self.id))
        except Exception as error:  # a job may fail in any way; the worker goes on
            log.exception("job failed", job=job.id)
            known = error if isinstance(error, TarnError) else Internal("the job failed; the worker's log says why")
            problem = known.problem(instance=f"/v1/jobs/{job.id}").model_dump(mode="json")
            self._settle("failed", job, lambda connection: jobs.fail(connection, job.id, self.id, problem))
        else:
            self._settle("done", job, lambda connection: jobs.finish(connection, job.id, self.id, result))

    def _delete(self, job: Job, report: Report) -> dict[str, Any]:
        return datasets.delete(self._database, self._store, Dataset(job.dataset_id, job.dataset), report)

    def _report(self, job: Job, progress: Progress) -> None:
        """Called by a running job between two steps. Raises Stopped if it must not go on."""
        with self._database.write() as connection:
            held = jobs.beat(connection, job.id, self.id, progress)
        if self._stop.is_set() or not held:
            raise Stopped

    def _beat(self) -> None:
        """Signs of life, of the worker and of the job it has, until it stops."""
        while not self._stop.wait(self._settings.worker_heartbeat):
            try:
                with self._database.write() as connection:
                    workers.beat(connection, self.id, FORGET_AFTER)
                    if (job := self._job) is not None:
                        jobs.beat(connection, job.id, self.id, None)
            except TarnError as error:
                log.warning("no sign of life could be given", problem=error.slug)

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
