"""Jobs as the API sees them: enqueue, read, retry and cancel the jobs of tenants."""

from collections.abc import Callable
from typing import Any

from tarn.access.audit import AuditedAction
from tarn.datasets import registry
from tarn.datasets.registry import Dataset, Readable
from tarn.db import jobs
from tarn.db.engine import Database
from tarn.db.notifications import job_topic
from tarn.errors import JobNotFound
from tarn.model.names import DatasetName, TenantName
from tarn.model.tenant import Identity, Level
from tarn.model.work.job import Job, Operation

LevelCheck = Callable[[DatasetName, Level], None]
"""Raises Forbidden unless the caller holds a level on a dataset."""


class JobService:
    """Enqueues, reads, retries and cancels jobs. Each change and its audit record are one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def page(self, tenant: TenantName | None, before: str | None, limit: int) -> list[Job]:
        """Return the jobs of one tenant or of all, newest first."""
        with self._database.read() as connection:
            return jobs.newest(connection, tenant, before, limit)

    def get(self, job_id: str) -> Job:
        """Return a job of any tenant. Raises JobNotFound."""
        with self._database.read() as connection:
            return jobs.get(connection, job_id)

    def get_visible(self, job_id: str, identity: Identity) -> Job:
        """Return a job of the caller's tenant, or of any for an administrator of the lake. Raises JobNotFound."""
        job = self.get(job_id)
        if job.tenant != identity.tenant and not identity.administers_lake:
            raise JobNotFound(f"there is no job {job_id!r}")
        return job

    @staticmethod
    def topics(job: Job) -> list[str]:
        """Return the notification topics of a job's changes."""
        return [job_topic(job.id)]

    def enqueue(
        self, operation: Operation, dataset: Dataset, act: AuditedAction, arguments: dict[str, Any], **audited: Any
    ) -> Job:
        """Enqueue a job on a dataset. The audit record names the job and has these details."""
        with self._database.write() as connection:
            job = jobs.enqueue(connection, operation, dataset.id, act.tenant, act.request, arguments)
            act.done(connection, job=job.id, **audited)
        return job

    def enqueue_flush(self, dataset: Dataset, act: AuditedAction) -> Job:
        """Enqueue the flush that a write waits for. There is no audit record of it, as the write has one."""
        with self._database.write() as connection:
            return jobs.enqueue(connection, Operation.FLUSH, dataset.id, act.tenant, act.request)

    def enqueue_flush_of_all(self, maintained: Readable, act: AuditedAction) -> Job:
        """Enqueue one flush of all datasets for which `maintained` is true."""
        with self._database.write() as connection:
            datasets = registry.page(connection, maintained, None, None)
            arguments = {"dataset_ids": [dataset.id for dataset in datasets]}
            job = jobs.enqueue(connection, Operation.FLUSH, None, act.tenant, act.request, arguments)
            act.done(connection, job=job.id, datasets=len(datasets))
        return job

    def retry(self, job: Job, require: LevelCheck, act: AuditedAction) -> Job:
        """Queue a failed or cancelled job again, if the caller holds the level of its operation on its datasets.

        Raises JobNotFound, JobConflict, and what `require` raises.
        """
        with self._database.write() as connection:
            for dataset in registry.page(connection, lambda _: True, None, None):
                if dataset.id in job.dataset_ids:
                    require(dataset.name, job.operation.level)
            retried = jobs.retry(connection, job.id)
            act.done(connection)
        return retried

    def cancel(self, job: Job, act: AuditedAction) -> Job:
        """Cancel a job; one that has ended stays as it is. Raises JobNotFound, JobConflict."""
        with self._database.write() as connection:
            cancelled = jobs.cancel(connection, job.id)
            act.done(connection)
        return cancelled
